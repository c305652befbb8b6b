"""Running a gateway: socket, engine, HTTP server, and the order in which they come and go."""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, cast

import uvicorn
import uvloop
from starlette.types import ASGIApp

from outrider.engine.errors import EngineError, EngineNotStartedError
from outrider.engine.events import EngineInfo
from outrider.gateway.engines.backends.spawning import EngineProcess
from outrider.gateway.engines.backends.step_loop import LoadingCallback, no_progress
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.http.edge.connection_class import (
    check_uvicorn,
    connection_class,
    log_unbounded,
)
from outrider.gateway.http.edge.cors import CorsPolicy
from outrider.gateway.http.edge.headers import EdgeHeaders
from outrider.gateway.http.server.draining import DrainGate, Draining, watch_draining
from outrider.gateway.http.server.listening import listen, url_of
from outrider.gateway.settings.keys import KeySettings
from outrider.gateway.settings.tree import Settings
from outrider.gateway.storage.urls import NO_DATABASE
from outrider.gateway.wiring.application import build_app
from outrider.gateway.wiring.audit import record_settings
from outrider.gateway.wiring.build import AnyEngineClient, build_client, build_parts
from outrider.gateway.wiring.gateway_parts import GatewayParts
from outrider.gateway.wiring.prices import log_prices
from outrider.gateway.wiring.process import shared_client
from outrider.gateway.wiring.start import check_models
from outrider.gateway.wiring.upstream import check_upstreams
from outrider.gateway.workers.connections import Receiver
from outrider.gateway.workers.siblings import Siblings
from outrider.verifier.params import Tier

logger = logging.getLogger(__name__)

_SMALL_KNOWN_S: Final = 3.0
_GC_THRESHOLDS: Final = (10_000, 20, 50)
_SWITCH_INTERVAL_S: Final = 0.0005


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: it would end the process before the engine is closed."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and tell that it has been done."""
        await super().startup(sockets)
        self.has_started.set()

    def make_protocol(self) -> asyncio.Protocol:
        """Make the protocol of one connection."""
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """The place of one of several processes of a gateway, which the parent process gives."""

    siblings: Siblings
    connections: Receiver
    """Its clients'."""
    engine: str | None
    """The address of the engine that all share; None for others."""


class GatewayRun:
    """One gateway, or one of its processes, from start to end, in one event loop."""

    def __init__(
        self,
        settings: Settings,
        source: socket.socket | WorkerPlace,
        *,
        on_progress: LoadingCallback = no_progress,
        on_ready: Callable[[EngineInfo, str], None] = lambda info, routing: None,
        engine_process: EngineProcess | None = None,
    ) -> None:
        """Store the arguments; callbacks run in the event loop.

        `source`: of connections. A listening socket is closed at the end. `engine_process`: one
        that was started for these settings already.
        """
        self._settings = settings
        self._listener = source if isinstance(source, socket.socket) else None
        self._place = None if isinstance(source, socket.socket) else source
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._engine_process = engine_process
        self._server: _Server | None = None
        self._tokenizers: Future[Mapping[Tier, str]] = Future()
        self._draining = Draining()
        self._closing: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        """Serve until `stop`. Raises SettingsError or EngineError when the models do not load."""
        self._task = asyncio.current_task()
        with self._listener or contextlib.nullcontext():
            check_uvicorn(self._settings.http)
            check_models(self._settings)
            check_upstreams(self._settings, os.environ)
            if self._is_first:
                log_prices(self._settings)
                log_unbounded(self._settings.http)
            engine = self._build_client()
            starting = asyncio.create_task(engine.start())
            try:
                await self._serve(engine, starting)
            finally:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                await engine.close()
                gc.unfreeze()  # so that the process's remains are cleared away

    @property
    def _is_first(self) -> bool:
        """True in one of a gateway's processes."""
        return self._place is None or self._place.siblings.number == 1

    def _build_client(self) -> AnyEngineClient:
        if self._place is not None and self._place.engine is not None:
            return shared_client(self._settings, self._place.engine)
        return build_client(
            self._settings, self._on_progress, self._engine_process, self._tokenizers
        )

    async def _serve(self, engine: AnyEngineClient, starting: asyncio.Task[None]) -> None:
        """Open the port while the engine starts; returns when the server has ended."""
        # While the engine loads, this process reads the tokenizers.
        parts = await _unless_failed(
            starting,
            asyncio.to_thread(
                build_parts,
                self._settings,
                engine,
                self._tokenizers.set_result,
                None if self._place is None else self._place.siblings,
            ),
        )
        if self._is_first:
            await asyncio.to_thread(record_settings, parts.tenancy.audit, self._settings)
        watch_draining(self._draining, parts.metrics.registry)
        gate = DrainGate(build_app(parts), self._draining)
        self._server = _Server(self._uvicorn_config(gate, parts))
        listeners = [] if self._listener is None else [self._listener]
        serving = asyncio.create_task(self._server.serve(sockets=listeners))
        taking = asyncio.create_task(self._take_connections(self._server))
        try:
            await asyncio.wait({starting, serving}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and starting.exception() is None:
                settle_process()
                if self._place is not None:
                    await self._place.siblings.may_change()
                self._on_ready(await _models(engine), await _routing(parts))
            else:
                self._server.should_exit = True
        finally:
            await serving
            taking.cancel()
            if self._closing is not None:
                self._closing.cancel()
            if self._server.force_exit:  # uvicorn would leave the application without notice
                await self._server.lifespan.shutdown()
        if starting.done():
            starting.result()

    async def _take_connections(self, server: _Server) -> None:
        """Take connections from the parent, in place of a listening socket, until cancelled."""
        if self._place is None:
            return
        await server.has_started.wait()
        self._place.connections.start(server.make_protocol, self._close_port)
        self._place.siblings.notify_parent("serving")
        await self._place.siblings.report_connections(
            self._place.connections, lambda: len(server.server_state.connections)
        )

    def begin_draining(self) -> None:
        """Report the end on /ready; the port stays open."""
        self._draining.has_begun = True

    def _close_port(self) -> None:
        if self._server is not None:
            self._server.should_exit = True

    def stop(self) -> None:
        """Finish the running requests and end; called again, end at once."""
        if self._server is None or not self._server.started:
            if self._task is not None:
                self._task.cancel()
        elif not self._draining.has_begun:
            self._drain(self._server)
        else:
            self._server.should_exit = self._server.force_exit = True

    def _drain(self, server: _Server) -> None:
        """Report the end on /ready; close the port once that can have been noticed."""
        grace_s = self._settings.server.drain_grace_s
        logger.info(
            "draining grace_s=%g timeout_s=%g", grace_s, self._settings.server.drain_timeout_s
        )
        self.begin_draining()
        if not grace_s:
            server.should_exit = True
            return
        self._closing = asyncio.get_running_loop().call_later(grace_s, self._close_port)

    def _uvicorn_config(self, app: ASGIApp, parts: GatewayParts) -> uvicorn.Config:
        server, http = self._settings.server, self._settings.http
        return uvicorn.Config(
            EdgeHeaders(app, cors=CorsPolicy.of(http.cors)),
            http=connection_class(http, parts.edge_metrics),
            timeout_keep_alive=max(1, round(http.keep_alive_s)),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=server.access_log,
            server_header=False,
            proxy_headers=False,  # behind a proxy the peer is the proxy
            timeout_graceful_shutdown=max(1, round(server.drain_timeout_s)),
        )


async def _models(engine: AnyEngineClient) -> EngineInfo:
    """Return the loaded models; none where a fleet has yet to start its first engine."""
    try:
        return await engine.info()
    except EngineNotStartedError:
        return EngineInfo(tiers={}, speculation=False)


async def _routing(parts: GatewayParts) -> str:
    """Return how requests are routed, in a line; waits a little for what a server tells."""
    summary = parts.routing.summary
    if isinstance(parts.engine, EnginePool) and parts.engine.is_asleep:
        summary += "; no engine runs now, the first request has one started"
    small, rules = parts.upstream.small, parts.upstream.rules
    if small is not None:
        await small.until_known(_SMALL_KNOWN_S)
        return f"{summary}; small: {small.tier.name}, {small.summary}"
    if not rules.has_local:
        return (
            f"all to {rules.upstream_tier}: no model here (--small MODEL, a server's URL, or demo)"
        )
    return summary


def settle_process() -> None:
    """Keep collections and other threads from holding the event loop.

    Start-up's objects (100,000 that stay) are exempt from garbage collection.

    Scanning them takes tens of milliseconds, in which no token is passed on. Requests leave no
    circles of objects, so that the objects of those under way start few scans of their own.

    Threads that build prompts or write the ledger give the interpreter back to the event loop soon:
    by default each may keep it for 5 ms.

    Asynchronous generators are not entered in the loop's list of those that its end closes (10,000
    instructions each, and a request has six): all of ours are closed by their readers.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.set_asyncgen_hooks(firstiter=None, finalizer=sys.get_asyncgen_hooks().finalizer)


async def _unless_failed(starting: asyncio.Task[None], work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of `work`; when both fail, raise the engine's error, which says more."""
    try:
        return await work
    except EngineError:
        await asyncio.wait({starting}, timeout=10)
        if starting.done():
            starting.result()
        raise


@contextlib.contextmanager
def background_gateway(settings: Settings, on_progress: LoadingCallback) -> Iterator[str]:
    """Run a gateway in a thread on a free loopback port; yield its URL when ready.

    It is this process's own: it wants no keys and keeps no ledger.

    Raises EngineError when the models cannot be loaded.
    """
    own = {"database_url": NO_DATABASE, "redis_url": None, "keys": KeySettings()}
    settings = settings.model_copy(update=own)
    listener = listen("127.0.0.1", 0)
    url = url_of(listener)
    ready: Future[None] = Future()
    loop = uvloop.new_event_loop()
    run = GatewayRun(
        settings, listener, on_progress=on_progress, on_ready=lambda *_: ready.set_result(None)
    )

    def main() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(run.run())
        except BaseException as error:  # noqa: BLE001 - raised in the other thread
            if not ready.done():
                ready.set_exception(error)

    thread = threading.Thread(target=main, name="gateway")
    thread.start()
    try:
        ready.result()
        yield url
    finally:
        if thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
                loop.call_soon_threadsafe(run.stop)
        thread.join()
