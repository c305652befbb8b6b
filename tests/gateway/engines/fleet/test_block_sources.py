"""Prompts that other replicas have, or compute: only where that pays, and never private ones."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from outrider.engine.cache.block_pool import PRIVATE_SALT
from outrider.engine.config import EngineRole
from outrider.engine.events import EngineInfo, Finished
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.fleet import block_sources
from outrider.gateway.engines.fleet.block_sources import Work, pays_apart
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import EngineReplica
from outrider.gateway.engines.fleet.replica_placement import ReplicaLoad
from outrider.verifier.params import SamplingParams
from tests.gateway.engines.backends.clients import collect, run, started, tokens
from tests.gateway.engines.backends.test_resuming import Reader
from tests.gateway.engines.fleet.replicas import MortalEngine, all_up
from tests.gateway.engines.fleet.test_cache_aware import Fleet, ask, text
from tests.gateway.scripted_engine import make_request

LONG = tuple(range(2000))


# ---- whether it pays ---------------------------------------------------------------------------


def work(num_tokens: int = 2000, **load: Any) -> Work:
    """A prompt at a replica that computes 200 tokens a second, and writes an answer's in 50 ms."""
    figures = {"seconds_per_prompt_token": 0.005, "seconds_per_output_token": 0.05}
    return Work(load=ReplicaLoad(replica_id="x", **figures | load), num_tokens=num_tokens)


@pytest.mark.parametrize(
    ("here", "there", "moved_s", "pays"),
    [
        pytest.param(work(num_running=2), work(), 0.2, True, id="answers would wait for it"),
        pytest.param(work(), work(), 0.2, False, id="nobody waits for it"),
        pytest.param(work(), work(seconds_per_prompt_token=0.002), 0.2, True, id="faster there"),
        pytest.param(work(num_queued_prompt_tokens=4000), work(), 0.2, True, id="others are first"),
        pytest.param(
            work(num_running=2), work(num_queued_prompt_tokens=9000), 0.2, False, id="busy there"
        ),
        pytest.param(work(num_running=2), work(), 20.0, False, id="a slow line"),
        pytest.param(work(100, num_running=2), work(2000), 0.01, False, id="most is cached here"),
    ],
)
def test_a_prompt_is_computed_apart_where_readers_wait_less(
    here: Work, there: Work, moved_s: float, pays: bool
) -> None:
    assert pays_apart(here, there, moved_s) is pays


# ---- placement by what can be moved --------------------------------------------------------------


def loads(moved_token_s: float, **first: Any) -> dict[str, ReplicaLoad]:
    common = {"seconds_per_prompt_token": 0.005, "seconds_per_moved_token": moved_token_s}
    return {
        f"r{lane}": ReplicaLoad(
            replica_id=str(lane), index_lane=lane, **common | (first if lane == 0 else {})
        )
        for lane in (0, 1)
    }


def placed(moved_token_s: float, salt: str = "", **first: Any) -> tuple[Fleet, int]:
    fleet, turn = Fleet(2), text(0, 700)
    fleet.keeps(0, turn, salt=salt)
    request = ask(turn + text(1, 50), salt=salt)
    return fleet, fleet.choose(request, **loads(moved_token_s, **first))


def test_a_conversation_moves_where_its_replica_is_busier_than_moving_takes() -> None:
    busy = {"num_queued_prompt_tokens": 200}  # a second
    fleet, chosen = placed(0.0001, **busy)
    source = fleet.placement.source("a")
    assert chosen == 1
    assert source is not None
    assert (source.lane, source.num_tokens) == (0, 688)
    assert fleet.placement.expected_hit("a") == 688
    for moved_token_s, num_queued in ((0.0001, 0), (0.004, 200), (float("inf"), 200)):
        fleet, chosen = placed(moved_token_s, num_queued_prompt_tokens=num_queued)
        assert chosen == 0
        assert fleet.placement.source("a") is None


def test_a_private_conversation_never_moves() -> None:
    fleet, _ = placed(0.0001, f"{PRIVATE_SALT}t", num_queued_prompt_tokens=10**6)
    assert fleet.placement.source("a") is None


def test_a_replica_that_sends_nothing_loses_its_credit() -> None:
    fleet, turn = Fleet(2), text(0, 700)
    fleet.keeps(0, turn)
    sources = []
    for number in range(12):
        request = ask(turn + text(1, 50), f"{number}")
        fleet.choose(request, **loads(0.0005, num_queued_prompt_tokens=400))
        sources.append(fleet.placement.source(f"{number}"))
        fleet.placement.note_prefill(f"{number}", 0)
    assert sources[0] is not None
    assert sources[-1] is None or sources[-1].num_tokens < 100


# ---- a pool with a replica for prompts ----------------------------------------------------------


class RoleEngine(MortalEngine):
    """Has a part among others, and notes what it is sent."""

    def __init__(self, role: EngineRole, fingerprint: str = "f") -> None:
        super().__init__(step_s=0.001)
        self._role, self._fingerprint = role, fingerprint
        self.seen: list[EngineRequest] = []

    def submit(self, request: EngineRequest) -> None:
        self.seen.append(request)
        super().submit(request)

    def info(self) -> EngineInfo:
        info = super().info()
        tier = replace(info.tiers["large"], kv_fingerprint=self._fingerprint, kv_token_bytes=1000.0)
        return replace(info, tiers={"large": tier}, role=self._role)


Engines = Mapping[str, RoleEngine]


def with_pool(
    engines: Engines, main: Callable[[EnginePool], Awaitable[None]], *, pays: bool = True
) -> None:
    async def serve() -> None:
        pool = EnginePool(
            EngineReplica(
                name, InProcessEngineClient(lambda _, e=engine: e), endpoint=f"tcp://{name}:1"
            )
            for name, engine in engines.items()
        )
        async with started(pool):
            await all_up(pool)
            await main(pool)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sources, "pays_apart", lambda *_: pays)
        run(serve())


def of_roles(*roles: EngineRole) -> dict[str, RoleEngine]:
    return {f"{role[0]}{number}": RoleEngine(role) for number, role in enumerate(roles)}


def test_a_long_prompt_is_computed_by_the_prefill_replica_and_pulled_from_there() -> None:
    engines = of_roles("prefill", "decode")

    async def main(pool: EnginePool) -> None:
        events = await collect(pool, "r", prompt=LONG)
        assert tokens(events) == [sum(LONG) + k for k in range(5)]
        (prompt,), (answer,) = engines["p0"].seen, engines["d1"].seen
        assert prompt.sampling.max_tokens == 0
        assert prompt.prompt_token_ids == answer.prompt_token_ids == LONG
        assert prompt.cache_salt == answer.cache_salt
        assert answer.source is not None
        assert answer.source.endpoint == "tcp://p0:1"
        assert answer.source.num_tokens == len(LONG)
        assert [each.num_in_flight for each in pool.states()] == [0, 0]

    with_pool(engines, main)


async def ask_private(pool: EnginePool) -> None:
    await Reader(pool, replace(make_request("r", LONG), cache_salt=f"{PRIVATE_SALT}t")).rest()


async def ask_with_adapter(pool: EnginePool) -> None:
    ref = AdapterRef(name="a", tier="large", folder="/a")
    await Reader(pool, replace(make_request("r", LONG), adapters=(ref,))).rest()


async def ask_for_logprobs(pool: EnginePool) -> None:
    sampling = SamplingParams(max_tokens=5, num_prompt_logprobs=0)
    await Reader(pool, replace(make_request("r", LONG), sampling=sampling)).rest()


async def ask_short(pool: EnginePool) -> None:
    await collect(pool, "r", prompt=LONG[:60])


@pytest.mark.parametrize("request_it", [ask_private, ask_with_adapter, ask_for_logprobs, ask_short])
def test_some_prompts_are_never_computed_apart(
    request_it: Callable[[EnginePool], Awaitable[None]],
) -> None:
    engines = of_roles("prefill", "decode")
    with_pool(engines, request_it)
    assert not engines["p0"].seen
    assert [each.source for each in engines["d1"].seen] == [None]


@pytest.mark.parametrize(
    ("engines", "pays"),
    [
        pytest.param(of_roles("prefill", "decode"), False, id="it does not pay"),
        pytest.param(of_roles("prefill", "both"), True, id="it computes its own"),
        pytest.param(of_roles("decode", "decode"), True, id="there is none for prompts"),
        pytest.param(
            {"p": RoleEngine("prefill", "other"), "d": RoleEngine("decode")},
            True,
            id="another cache",
        ),
    ],
)
def test_the_answering_replica_computes_where_nothing_is_gained(
    engines: Engines, pays: bool
) -> None:
    async def main(pool: EnginePool) -> None:
        await collect(pool, "r", prompt=LONG)

    with_pool(engines, main, pays=pays)
    (seen,) = [request for engine in engines.values() for request in engine.seen]
    assert seen.source is None
    assert not [name for name in engines if name.startswith("p") and engines[name].seen]


def test_a_prefill_replica_answers_where_no_other_is_left() -> None:
    engines = of_roles("prefill", "decode")

    async def main(pool: EnginePool) -> None:
        engines["d1"].is_doomed = True
        reader = Reader(pool, make_request("r", LONG))
        assert isinstance(await reader.rest(), Finished)
        assert tokens(reader.events) == [sum(LONG) + k for k in range(5)]

    with_pool(engines, main)
    assert engines["p0"].seen[-1].sampling.max_tokens == 5


def test_a_prefill_replica_that_ends_costs_no_answer_and_is_not_asked_again() -> None:
    engines = of_roles("prefill", "decode", "decode")
    engines["p0"].is_doomed = True

    async def main(pool: EnginePool) -> None:
        reader = Reader(pool, make_request("r", LONG))
        assert isinstance(await reader.rest(), Finished)
        assert tokens(reader.events) == [sum(LONG) + k for k in range(5)]

    with_pool(engines, main)
    assert len(engines["p0"].seen) <= 1
