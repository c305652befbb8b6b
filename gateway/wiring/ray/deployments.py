"""The deployments of a fleet: engine replicas, and the directory of their addresses."""

import asyncio
import logging
import threading
import time
from typing import Any, Final

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.gateway.engines.backends.fleet_keys import read_fleet_keys
from outrider.gateway.engines.backends.remote_client import RemoteEngineClient
from outrider.gateway.wiring.ray.engine_child import EngineChild
from outrider.gateway.wiring.ray.leases import RENEW_S, Leases
from outrider.gateway.wiring.ray.on_demand import MOST_BYTES, OnDemand
from outrider.gateway.wiring.ray.plan import EnginePlan, FleetPlan
from outrider.gateway.wiring.ray.scaling import LoadMeter

logger = logging.getLogger("ray.serve")

_LOAD_TIMEOUT_S: Final = 1800.0
_LOOK_BACK_S: Final = 15.0  # longer than Serve takes between two figures
_START_S: Final = 30.0
_HEALTH_PERIOD_S: Final = 2.0
_HEALTH_TIMEOUT_S: Final = 30.0


class Directory:
    """The application's ingress: it knows the addresses of the replicas. GET / lists them.

    POST / says that requests wait for an engine, and lists them too.
    """

    def __init__(self, plans: dict[str, EnginePlan], *engines: DeploymentHandle) -> None:
        """`engines`: the deployments of the plans, in their order."""
        self._leases = Leases()
        self._plans = plans
        self._engines = dict(zip(plans, engines, strict=True))
        self._on_demand = OnDemand(plans)
        self._starts: dict[str, asyncio.Task[None]] = {}

    async def renew(self, name: str, engine: str, endpoint: str) -> None:
        """See `Leases.renew`."""
        self._leases.renew(name, engine, endpoint)

    async def end(self, name: str) -> None:
        """See `Leases.end`."""
        self._leases.end(name)

    async def describe(self) -> dict[str, tuple[EnginePlan, list[str]]]:
        """Return the plan and the addresses of each engine."""
        return {name: (plan, self._leases.endpoints(name)) for name, plan in self._plans.items()}

    async def __call__(self, request: Request) -> Response:
        """List the addresses, for gateways with `--engines http://...`."""
        if request.method == "POST":
            try:
                self._start(self._on_demand.to_start(await _small_body(request)))
            except ValueError as error:
                return JSONResponse({"error": str(error)}, status_code=400)
        if not self._leases.knows_all:
            return JSONResponse({"error": "this directory has just started"}, status_code=503)
        found = {"replicas": self._leases.endpoints(), "startable": self._on_demand.startable}
        return JSONResponse(found)

    def _start(self, names: list[str]) -> None:
        for name in names:
            if name not in self._starts or self._starts[name].done():
                self._starts[name] = asyncio.create_task(self._call(name))

    async def _call(self, name: str) -> None:
        """Call an engine's deployment: Serve starts a replica for a call that finds none."""
        logger.info("requests wait for an engine name=%s", name)
        try:
            await self._engines[name].wake.remote()
        except Exception as error:  # noqa: BLE001 - whoever waits asks again
            logger.warning("engine is not started name=%s error=%s", name, error)


async def _small_body(request: Request) -> bytes:
    """Read a body of JSON. Raises ValueError where it is none, as another site's page may send."""
    if request.headers.get("content-type") != "application/json":
        raise ValueError("send content-type: application/json")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise ValueError(f"send at most {MOST_BYTES} bytes")
    return body


class EngineReplica:
    """Starts an engine's process, and keeps its lease and its figures for Ray."""

    def __init__(self, plan: EnginePlan, host: str | None, key: bytes | None) -> None:
        """Return when the engine serves. `key`: the content of the fleet's key file."""
        context = serve.get_replica_context()
        self._plan = plan
        self._name = context.replica_id.unique_id
        self._application = context.app_name
        self._engine = context.deployment
        self._meter = LoadMeter()
        self._client: RemoteEngineClient | None = None
        self._is_ending = threading.Event()
        self._child = EngineChild(
            plan.flags(), host=host or ray.util.get_node_ip_address(), key=key
        )
        try:
            self._endpoint = self._child.wait_ready(_LOAD_TIMEOUT_S)
        except BaseException:
            self._child.stop(0.0)
            raise
        logger.info("engine serves endpoint=%s pid=%d", self._endpoint, self._child.pid)
        threading.Thread(target=self._keep_lease, name="lease", daemon=True).start()

    def _keep_lease(self) -> None:
        while not self._is_ending.is_set():
            try:
                self._child.check()
                directory = serve.get_app_handle(self._application)
                renewal = directory.renew.remote(self._name, self._engine, self._endpoint)
                renewal.result(timeout_s=RENEW_S)
            except Exception as error:  # noqa: BLE001 - the lease runs out; Ray asks check_health
                logger.warning("lease is not renewed error=%s", error)
            self._is_ending.wait(RENEW_S)

    def check_health(self) -> None:
        """Raise EngineEndedError where the engine has ended: Ray starts another replica then."""
        self._child.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the number of replicas follows; see `scaling.ObjectivePolicy`."""
        if self._client is None:
            file = self._child.key_file
            keys = None if file is None else read_fleet_keys(file)
            client = RemoteEngineClient(self._endpoint, keys)
            await client.start()
            self._client = client
        return self._meter.figures(await self._client.stats(), time.monotonic())

    async def wake(self) -> None:
        """Do nothing: the call has had a replica started."""

    async def pid(self) -> int:
        """Return the engine's process."""
        return self._child.pid

    async def __del__(self) -> None:
        """Let running answers end, then end the engine. Gateways send it nothing new."""
        self._is_ending.set()
        try:
            await serve.get_app_handle(self._application).end.remote(self._name)
        except Exception as error:  # noqa: BLE001 - the directory may be gone; the lease runs out
            logger.warning("lease is not ended error=%s", error)
        finally:
            if self._client is not None:
                await self._client.close()
            await asyncio.to_thread(self._child.stop, self._plan.drain_timeout_s)


def build_application(plan: FleetPlan) -> serve.Application:
    """Return the application of a plan."""
    key = None if plan.key is None else plan.key.read_bytes()
    engines = [
        _engine_deployment(name, engine).bind(engine, plan.host, key)
        for name, engine in plan.engines.items()
    ]
    options = {"num_cpus": 0}
    directory = serve.deployment(Directory, name="directory", ray_actor_options=options)
    return directory.bind(dict(plan.engines), *engines)


def _engine_deployment(name: str, plan: EnginePlan) -> Any:
    options: dict[str, Any] = {}
    if plan.max_replicas > plan.min_replicas:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=plan.min_replicas,
            max_replicas=plan.max_replicas,
            look_back_period_s=_LOOK_BACK_S,
            upscale_delay_s=plan.upscale_delay_s,
            downscale_delay_s=plan.downscale_delay_s,
            policy=AutoscalingPolicy(
                policy_function="outrider.gateway.wiring.ray.scaling:ObjectivePolicy",
                policy_kwargs={"first_token_s": plan.first_token_s, "start_s": _START_S},
            ),
        )
    else:
        options["num_replicas"] = plan.min_replicas
    return serve.deployment(
        EngineReplica,
        name=name,
        ray_actor_options={"num_cpus": plan.num_cpus, "num_gpus": plan.num_gpus},
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=plan.drain_timeout_s + 15.0,
        **options,
    )
