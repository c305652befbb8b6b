"""A gateway with local models and upstream tiers: real sockets, scripted engine, mock servers."""

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.shared.mock_upstream import MockScript, MockThread, mock_in_thread
from outrider.gateway.answering.jobs.routing_parts import RoutingParts
from outrider.gateway.answering.reading.gateway_limits import GatewayLimits
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.experiments.experiments import build_experiments
from outrider.gateway.experiments.slo.slo_parts import build_slo
from outrider.gateway.settings.tree import Settings
from outrider.gateway.telemetry.capture import build_capture
from outrider.gateway.telemetry.tracer import NULL_TRACER, Tracer
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from outrider.gateway.upstream.upstream_metrics import UpstreamMetrics
from outrider.gateway.wiring.aliases import alias_policies
from outrider.gateway.wiring.application import build_app
from outrider.gateway.wiring.batches import build_batch_store
from outrider.gateway.wiring.caching import build_cache
from outrider.gateway.wiring.checks import build_checks
from outrider.gateway.wiring.gateway_parts import GatewayParts
from outrider.gateway.wiring.responses import build_response_store
from outrider.gateway.wiring.tenancy import build_tenancy
from outrider.gateway.wiring.upstream import build_upstream
from outrider.router.guard import RouteGuard
from outrider.router.policy import NO_CONSTRAINTS, Route, RouteConstraints
from outrider.router.watch import WatchPlan
from outrider.verifier.params import Tier
from tests.gateway.conftest import parts_over, running
from tests.gateway.scripted_client import Script, ScriptedClient, Step
from tests.gateway.watches import PlannedWatch

LOCAL_TEXT = "Hello there, I am fine."
CHAT = {"model": "auto", "messages": [{"role": "user", "content": "How are you today?"}]}


@dataclass
class TestPolicy:
    """Says what the test wants: a tier, or the small one under a watch."""

    __test__ = False

    tier: Tier = "small"
    watch: Callable[[], PlannedWatch] | None = None
    hold_back_s: float | None = None
    is_explored: bool = False

    def route(self, text: str, constraints: RouteConstraints = NO_CONSTRAINTS) -> Route:
        plan = None
        if self.watch is not None and constraints.may_watch:
            plan = WatchPlan(
                new_watch=self.watch, hold_back_s=self.hold_back_s, is_explored=self.is_explored
            )
        return Route(
            tier=self.tier,
            reason=f"router: {self.tier} (0.40 < 0.50)",
            quality=0.4,
            watch=plan,
            is_own=True,
        )


@dataclass
class World:
    """A running gateway and everything around it."""

    url: str
    engine: ScriptedClient
    clouds: Sequence[MockThread]
    context: GatewayParts
    policy: TestPolicy
    http: httpx.Client
    encode: Callable[[str], list[int]] = field(repr=False, default=lambda text: [])

    @property
    def cloud(self) -> MockThread:
        """The first upstream server."""
        return self.clouds[0]

    def says(self, *texts: str, **script: Any) -> None:
        """Set the answer of the local models, a token a step; of several, the last one stays."""
        scripts = [
            Script(steps=[Step(token_ids=(token,)) for token in self.encode(text)], **script)
            for text in texts
        ]
        self.engine.script = lambda _: scripts.pop(0) if len(scripts) > 1 else scripts[0]

    def chat(self, **fields: Any) -> httpx.Response:
        """One chat request."""
        headers = fields.pop("headers", None)
        return self.http.post("/v1/chat/completions", json={**CHAT, **fields}, headers=headers)

    def stream(self, **fields: Any) -> "Streamed":
        """One streamed chat request, read to its end."""
        response = self.chat(stream=True, **fields)
        assert response.status_code == 200, response.text
        return Streamed(response)

    def count(self, sample: str) -> float:
        """A sample of /metrics; 0 where it is not there."""
        return self._samples().get(sample, 0.0)

    def decisions(self) -> dict[str, float]:
        """The requests that the metrics count, by tier and reason."""
        decided = "outrider_router_decisions_total{"
        return {name: n for name, n in self._samples().items() if name.startswith(decided)}

    def _samples(self) -> dict[str, float]:
        response = self.http.get("/metrics")
        assert response.status_code == 200, response.text
        lines = response.text.splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}


class Streamed:
    """A stream that was read."""

    def __init__(self, response: httpx.Response) -> None:
        self.headers = response.headers
        self.raw = response.content
        events = [e for e in response.text.split("\n\n") if e]
        self.is_done = events[-1] == "data: [DONE]"
        self.chunks: list[dict[str, Any]] = [
            json.loads(event.removeprefix("data:"))
            for event in events
            if not event.endswith("[DONE]")
        ]

    @property
    def text(self) -> str:
        """All content of the first choice."""
        return "".join(
            choice["delta"].get("content") or ""
            for chunk in self.chunks
            for choice in chunk.get("choices", ())
        )

    @property
    def roles(self) -> list[str]:
        """The roles that were said."""
        return [
            choice["delta"]["role"]
            for chunk in self.chunks
            for choice in chunk.get("choices", ())
            if choice["delta"].get("role")
        ]

    @property
    def ids(self) -> set[str]:
        """The ids of its chunks."""
        return {chunk["id"] for chunk in self.chunks if "id" in chunk}

    @property
    def report(self) -> dict[str, Any]:
        """The `outrider` object of the last chunk that has one."""
        found = [chunk["outrider"] for chunk in self.chunks if "outrider" in chunk]
        assert len(found) == 1, found
        return found[0]

    @property
    def error(self) -> dict[str, Any] | None:
        """The error event, where there is one; it is the last event then."""
        return self.chunks[-1].get("error")


@contextmanager
def hybrid(
    tokenizer: ChatTokenizer,
    encode: Callable[[str], list[int]],
    *,
    clouds: Sequence[MockScript | Callable[..., MockScript]] = (MockScript(),),
    tier: Mapping[str, Any] | None = None,
    local: tuple[Tier, ...] = ("small", "large"),
    policy: TestPolicy | None = None,
    environ: Mapping[str, str] | None = None,
    **sections: Any,
) -> Iterator[World]:
    """A gateway with one upstream tier, `cloud`, whose replicas are `clouds`.

    `tier` adds to `[tiers.cloud]`; `others` are further tiers by name, each a script and settings;
    other sections (handoff, mirror) are as in the settings, `tracer` traces, and `guard` watches
    the router. Without a `database_url` everybody may ask, and nothing is kept.
    """
    with ExitStack() as stack:
        mocks = [stack.enter_context(mock_in_thread(script)) for script in clouds]
        options = {
            "url": ",".join(mock.url for mock in mocks),
            "model": "mock-model",
            "max_retries": 0,
            **(tier or {}),
        }
        tiers = {**({"cloud": options} if mocks or tier else {}), **sections.pop("tiers", {})}
        for name, (script, more) in sections.pop("others", {}).items():
            other = stack.enter_context(mock_in_thread(script, name=name))
            mocks.append(other)
            tiers[name] = {"url": other.url, "model": "mock-model", "max_retries": 0, **more}
        tracer: Tracer = sections.pop("tracer", NULL_TRACER)
        guard: RouteGuard | None = sections.pop("guard", None)
        if mirrored := sections.pop("mirrored", None):
            second = stack.enter_context(mock_in_thread(mirrored))
            mocks.append(second)
            tiers["shadow"] = {"url": second.url, "model": "mock-model"}
        settings = Settings.model_validate({"tiers": tiers, **sections})
        metrics = GatewayMetrics()
        cloud = build_upstream(settings, environ or {}, local, UpstreamMetrics(metrics.registry))
        engine = ScriptedClient(
            vocab_size=420, script=lambda _: Script(), tiers=local or ("large",)
        )
        router = policy or TestPolicy(tier=local[0] if local else "large")
        tenancy = build_tenancy(settings, metrics.registry) if settings.database_url else Tenancy()
        parts = parts_over(
            engine,
            tokenizer,
            tiers=local,
            router=router,
            routing=RoutingParts(guard=guard, prefer=settings.routing.prefer),
            limits=GatewayLimits(default_max_tokens=64),
            upstream=cloud,
            aliases=settings.aliases,
            alias_policies=alias_policies(settings),
            unknown_fields=settings.unknown_fields,
            cache=build_cache(settings),
            checks=build_checks(settings, metrics.registry),
            responses=build_response_store(settings),
            batches=build_batch_store(settings, tenancy.database),
            sign_in=settings.sign_in,
            metrics=metrics,
            tenancy=tenancy,
            experiments=build_experiments(settings.experiments, tenancy.database, metrics.registry),
            slo=build_slo(settings.slo, metrics.registry),
            http=settings.http,
            tracer=tracer,
            capture=build_capture(
                settings.telemetry.capture,
                metrics.registry,
                rng=random.Random(1),
                wall_clock=time.time,
                shows_texts=settings.telemetry.traces.content is True,
            ),
        )
        with running(build_app(parts)) as url, httpx.Client(base_url=url, timeout=60) as http:
            made = World(url, engine, mocks, parts, router, http, encode)
            made.says(LOCAL_TEXT)
            yield made
        assert not engine.running, "a local answer was left running"
