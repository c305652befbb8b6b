"""GET /v1/dashboard: current figures, for the page at /dashboard."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from outrider.engine.errors import EngineError
from outrider.engine.events import EngineStats
from outrider.gateway.answering.jobs.prompt_heads import HeadFigures, PromptHeads
from outrider.gateway.engines.fleet.roster import ReplicaState
from outrider.gateway.http.dashboard.engine_figures import EngineMoments
from outrider.gateway.http.dashboard.figures import figures
from outrider.gateway.http.dashboard.process_figures import LagReader, ProcessMoments, StageReader
from outrider.gateway.http.dashboard.recent import RecentOutcomes, RecentRows, joined
from outrider.gateway.http.dashboard.schema import (
    ChangingHead,
    Dashboard,
    EngineFigures,
    GatewayFigures,
    ReplicaFigures,
)
from outrider.gateway.settings.slo import SloClassSettings
from outrider.gateway.tenancy.keys.keys import ANONYMOUS, Principal
from outrider.gateway.workers.siblings import Siblings

logger = logging.getLogger(__name__)

FRESH_S: Final = 1.0
"""Figures are computed at most once in this time for each scope, for any number of viewers."""

SAMPLE_S: Final = 5.0
"""Time between two samples of the engine for the charts, whether or not a page is open."""

_EXPERIMENTS_FRESH_S: Final = 10.0
_STATS_TIMEOUT_S: Final = 2.0
_MAX_SCOPES: Final = 64
_MAX_HEADS: Final = 20
_HEADERS: Final = {"cache-control": "private, no-store"}

StatsReader = Callable[[], Awaitable[EngineStats | None]]
"""Returns the engine's snapshot; None while there is none. May raise EngineError."""
ProcessReport = tuple[RecentRows, GatewayFigures, list[HeadFigures]]
"""The latest requests of a process, the process's own figures, and clients with changing heads."""
ExperimentReader = Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]
"""The experiments with their intervals, as JSON values. It may take long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardSources:
    """The sources of the figures."""

    recent: RecentOutcomes
    classes: Mapping[str, SloClassSettings]
    read_stats: StatsReader
    clock: Callable[[], float]
    """That of `recent`."""
    wall_clock: Callable[[], float]
    """Since 1970."""
    loop_lag_s: LagReader
    stages_s: StageReader
    read_experiments: ExperimentReader | None = None
    read_replicas: Callable[[], Sequence[ReplicaState]] | None = None
    siblings: Siblings | None = None
    prompt_heads: PromptHeads = field(default_factory=PromptHeads)


@dataclass(slots=True)
class _Scope:
    """The last figures of one scope. The lock: concurrent viewers get the same ones."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    made_s: float = float("-inf")
    body: bytes = b""


class DashboardApi:
    """Computes figures on request, at most once a second for each scope."""

    def __init__(self, sources: DashboardSources) -> None:
        self._sources = sources
        self._moments = EngineMoments()
        self._process = ProcessMoments()
        self._scopes: OrderedDict[str | None, _Scope] = OrderedDict()
        self._turns = asyncio.Semaphore(1)
        self._experiments: list[dict[str, Any]] | None = None
        self._experiments_made_s = float("-inf")
        self._experiments_task: asyncio.Task[None] | None = None

    async def dashboard(self, request: Request, principal: Principal) -> Response:
        """Return the figures. Administrators see all requests; without keys, so do all callers.

        Other keys see the requests of their team, or their own if they are in none.
        """
        del request
        sees_all = principal.scopes.is_admin or principal is ANONYMOUS
        scope = self._scope(None if sees_all else principal.tenant)
        async with scope.lock:
            if self._sources.clock() - scope.made_s >= FRESH_S:
                async with self._turns:
                    scope.body = await self._body(None if sees_all else principal.tenant)
                scope.made_s = self._sources.clock()
        return Response(scope.body, media_type="application/json", headers=_HEADERS)

    async def run(self) -> None:
        """Sample the engine's gauges for as long as the task runs, so that charts have a past."""
        while True:
            await self.sample()
            await asyncio.sleep(SAMPLE_S)

    async def sample(self) -> None:
        """Keep the gauges of this moment; none of the engine's while it is not there."""
        self._process.add(self._sources.clock())
        stats = await self._read_stats()
        if stats is not None:
            self._moments.add(stats, self._sources.clock())

    async def close(self) -> None:
        """Cancel computations under way."""
        if self._experiments_task is not None:
            self._experiments_task.cancel()
            await asyncio.wait([self._experiments_task])

    def _scope(self, tenant: str | None) -> _Scope:
        """Return the scope's figures; beyond 64 scopes the least recently used one is dropped."""
        scope = self._scopes.setdefault(tenant, _Scope())
        self._scopes.move_to_end(tenant)
        if len(self._scopes) > _MAX_SCOPES:
            self._scopes.popitem(last=False)
        return scope

    async def figures_here(self, tenant: str | None) -> ProcessReport:
        """Return this process's part of the figures, for another one's page."""
        rows = self._sources.recent.rows(tenant)
        sources = self._sources
        process = self._process.figures(rows, sources.loop_lag_s, sources.stages_s)
        return rows, process, sources.prompt_heads.figures(tenant, sources.clock())

    async def _figures(self, tenant: str | None) -> ProcessReport:
        """Return the requests and the process's figures, of all processes of this gateway."""
        own = await self.figures_here(tenant)
        if self._sources.siblings is None:
            return own
        parts = [own, *await self._sources.siblings.others("dashboard", tenant)]
        rows, processes, heads = zip(*parts, strict=True)
        process = ProcessMoments.joined(list(zip(rows, processes, strict=True)))
        return joined(rows), process, list(chain.from_iterable(heads))

    async def _body(self, tenant: str | None) -> bytes:
        sources, sees_all = self._sources, tenant is None
        engine = await self._engine() if sees_all else None
        if sees_all:
            self._refresh_experiments()
        experiments = self._experiments if sees_all else None
        rows, process, heads = await self._figures(tenant)
        replicas = None
        if sees_all and sources.read_replicas is not None:
            replicas = [ReplicaFigures(**asdict(state)) for state in sources.read_replicas()]
        at = sources.wall_clock()

        def work() -> bytes:
            done = figures(rows, sources.classes, shows_costs=sees_all)
            snapshot = Dashboard(
                at=at,
                scope="all" if sees_all else "own",
                window_s=done.window_s,
                requests=done.requests,
                latency=done.latency,
                tiers=done.tiers,
                classes=done.classes,
                series=done.series,
                engine=engine,
                gateway=process if sees_all else None,
                replicas=replicas,
                experiments=experiments,
                changing_heads=[ChangingHead(**asdict(one)) for one in heads[:_MAX_HEADS]],
            )
            return snapshot.model_dump_json().encode()

        return await asyncio.to_thread(work)

    async def _engine(self) -> EngineFigures | None:
        stats = await self._read_stats(level=logging.WARNING)
        now_s = self._sources.clock()
        if stats is None:
            return None
        self._moments.add(stats, now_s)
        return self._moments.figures(now_s)

    async def _read_stats(self, level: int = logging.DEBUG) -> EngineStats | None:
        try:
            async with asyncio.timeout(_STATS_TIMEOUT_S):
                return await self._sources.read_stats()
        except (TimeoutError, EngineError) as error:
            logger.log(level, "no engine statistics error=%s", type(error).__name__)
            return None

    def _refresh_experiments(self) -> None:
        """Compute intervals in the background: the first caller gets the previous ones."""
        if self._sources.read_experiments is None or self._experiments_task is not None:
            return
        if self._sources.clock() - self._experiments_made_s < _EXPERIMENTS_FRESH_S:
            return
        task = asyncio.create_task(self._read_experiments(self._sources.read_experiments))
        self._experiments_task = task

    async def _read_experiments(self, read: ExperimentReader) -> None:
        try:
            self._experiments = [dict(one) for one in await read()]
        except Exception as error:  # noqa: BLE001 - the other figures are shown all the same
            logger.warning("no experiments for the dashboard error=%s", type(error).__name__)
        finally:
            self._experiments_made_s = self._sources.clock()
            self._experiments_task = None
