"""GET /v1/dashboard: scopes of each key, and how seldom figures are computed."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from starlette.requests import Request

from outrider.engine.errors import EngineDiedError
from outrider.engine.events import EngineStats, TierStats
from outrider.gateway.http.dashboard.api import DashboardApi, DashboardSources
from outrider.gateway.http.dashboard.recent import RecentOutcomes
from outrider.gateway.http.dashboard.schema import Dashboard
from outrider.gateway.settings.slo import default_classes
from outrider.gateway.tenancy.keys.keys import ANONYMOUS, Principal, Scopes
from tests.gateway.http.dashboard.outcomes import outcome
from tests.gateway.waiting import HandClock

ADMIN = Principal(key_id="boss", name="boss", tenant="boss", scopes=Scopes(is_admin=True))
TEAM_KEY = Principal(key_id="key-b", name="b", tenant="team-1", team_id="team-1")
STATS = EngineStats(tiers={"large": TierStats(num_running=2, num_blocks=8, num_used_blocks=2)})


class Rig:
    """A dashboard over two tenants' requests; counts how often the engine is asked."""

    def __init__(
        self, read_experiments: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]] | None = None
    ) -> None:
        self.clock = HandClock(10_000.0)
        self.num_stats = 0
        self.failure: Exception | None = None
        self.stats: EngineStats | None = STATS
        recent = RecentOutcomes(clock=self.clock)
        self.clock.now_s += 10.0
        recent.observe(outcome(key_id="key-a"))
        recent.observe(outcome(key_id="key-b", team_id="team-1", tier="small"))
        self.recent = recent
        self.api = DashboardApi(
            DashboardSources(
                recent=recent,
                classes=default_classes(),
                read_stats=self._read_stats,
                clock=self.clock,
                wall_clock=lambda: 1.7e9,
                loop_lag_s=lambda share: share / 1000,
                stages_s=lambda share: {"route": share / 1000},
                read_experiments=read_experiments,
            )
        )

    async def _read_stats(self) -> EngineStats | None:
        self.num_stats += 1
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return self.stats

    async def ask(self, principal: Principal) -> Dashboard:
        scope = {"type": "http", "method": "GET", "path": "/v1/dashboard", "headers": []}
        response = await self.api.dashboard(Request(scope), principal)
        assert response.headers["cache-control"] == "private, no-store"
        return Dashboard.model_validate(json.loads(bytes(response.body)))


@pytest.mark.parametrize("principal", [ADMIN, ANONYMOUS])
def test_administrators_see_all_requests_and_so_does_every_client_without_keys(
    principal: Principal,
) -> None:
    told = asyncio.run(Rig().ask(principal))
    assert told.scope == "all"
    assert told.requests.num == 2
    assert told.engine is not None
    assert told.engine.tiers[0].kv_cache_usage == 0.25
    assert told.requests.cost_usd_per_s == pytest.approx(2 * 0.002 / 10)


def test_a_key_sees_the_requests_of_its_team_and_nothing_of_the_engine() -> None:
    async def read() -> list[dict[str, Any]]:
        return [{"name": "secret"}]

    rig = Rig(read)

    async def after_an_administrator() -> Dashboard:
        await rig.ask(ADMIN)
        rig.clock.now_s += 1.5
        assert (await rig.ask(ADMIN)).experiments is not None
        return await rig.ask(TEAM_KEY)

    told = asyncio.run(after_an_administrator())
    assert told.scope == "own"
    assert told.requests.num == 1
    assert [tier.name for tier in told.tiers] == ["small"]
    assert told.engine is None
    assert told.gateway is None
    assert told.experiments is None
    assert told.requests.cost_usd_per_s == pytest.approx(0.003 / 11.5), "what it pays"
    assert rig.num_stats == 2, "the engine was asked for the administrator only"


async def test_it_is_worked_out_once_a_second_however_many_ask() -> None:
    rig = Rig()

    told = await asyncio.gather(*(rig.ask(ADMIN) for _ in range(20)))
    assert len({one.model_dump_json() for one in told}) == 1
    assert rig.num_stats == 1
    rig.recent.observe(outcome())
    rig.clock.now_s += 0.5
    assert (await rig.ask(ADMIN)).requests.num == 2
    rig.clock.now_s += 0.6
    assert (await rig.ask(ADMIN)).requests.num == 3
    assert rig.num_stats == 2


async def test_scopes_do_not_share_cached_figures() -> None:
    rig = Rig()

    assert (await rig.ask(TEAM_KEY)).requests.num == 1
    assert (await rig.ask(ADMIN)).requests.num == 2
    assert (await rig.ask(TEAM_KEY)).requests.num == 1


def test_many_keys_do_not_fill_the_memory() -> None:
    rig = Rig()

    async def all_of_them() -> None:
        for number in range(70):
            name = f"key-{number}"
            await rig.ask(Principal(key_id=name, name=name, tenant=name))

    asyncio.run(all_of_them())
    assert len(rig.api._scopes) == 64


def test_without_an_engine_the_requests_are_shown_all_the_same() -> None:
    rig = Rig()
    rig.failure = EngineDiedError("gone")
    told = asyncio.run(rig.ask(ADMIN))
    assert told.engine is None
    assert told.requests.num == 2
    rig.failure, rig.stats = None, None
    rig.clock.now_s += 2.0
    assert asyncio.run(rig.ask(ADMIN)).engine is None


async def test_slow_experiments_delay_no_dashboard() -> None:
    may_go_on = asyncio.Event()
    num_reads = 0

    async def read() -> list[dict[str, Any]]:
        nonlocal num_reads
        num_reads += 1
        await may_go_on.wait()
        return [{"experiment": f"reading {num_reads}"}]

    rig = Rig(read)

    for _ in range(3):
        assert (await rig.ask(ADMIN)).experiments is None
        rig.clock.now_s += 1.5
    assert num_reads == 1, "the first is still being worked out"
    assert rig.api._experiments_task is not None
    may_go_on.set()
    await rig.api._experiments_task
    for seconds, known, reads in ((9.0, 1, 1), (1.5, 1, 2), (1.5, 2, 2)):
        rig.clock.now_s += seconds
        assert (await rig.ask(ADMIN)).experiments == [{"experiment": f"reading {known}"}]
        assert num_reads == reads
    await rig.api.close()


async def test_pending_figures_end_with_the_gateway() -> None:
    async def read() -> list[dict[str, Any]]:
        await asyncio.Event().wait()
        raise AssertionError

    rig = Rig(read)

    await rig.ask(ADMIN)
    await rig.api.close()
    assert rig.api._experiments_task is None


def test_experiments_that_cannot_be_read_do_not_break_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def read() -> list[dict[str, Any]]:
        raise RuntimeError("the database is away")

    rig = Rig(read)

    async def look() -> None:
        await rig.ask(ADMIN)
        rig.clock.now_s += 2.0
        assert (await rig.ask(ADMIN)).requests.num == 2
        await rig.api.close()

    asyncio.run(look())
    assert "error=RuntimeError" in caplog.text
    assert "database is away" not in caplog.text
