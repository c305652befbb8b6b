"""Answers of a pool are judged by replicas with nothing to do, which harms nobody."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

from outrider.engine.cache.block_pool import PRIVATE_SALT
from outrider.engine.errors import InvalidRequestError
from outrider.engine.events import EngineEvent, Finished, PrefillDone, TokensEmitted
from outrider.engine.request import BlockSource, EngineRequest, GrammarSpec
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.fleet import answer_audits
from outrider.gateway.engines.fleet.answer_audits import AuditPolicy
from outrider.gateway.engines.fleet.audited_answer import AuditedAnswer, can_be_audited, is_same
from outrider.gateway.engines.fleet.block_sources import BlockSources
from outrider.gateway.engines.fleet.fleet_metrics import FleetMetrics
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import EngineReplica
from outrider.gateway.engines.fleet.replica_attempt import ReplicaAttempt
from outrider.gateway.engines.fleet.replica_placement import CachedElsewhere, LeastWork, LoadBoard
from outrider.gateway.settings.fleet import FleetSettings
from outrider.gateway.settings.sections import EngineSettings
from outrider.gateway.settings.tree import Settings
from outrider.gateway.wiring.fleet import build_remote
from outrider.verifier.params import CascadeParams
from outrider.verifier.token_logprobs import Judgement
from tests.gateway.engines.backends.clients import becomes, started
from tests.gateway.engines.backends.test_resuming import Reader
from tests.gateway.engines.fleet.replicas import MortalEngine, all_up
from tests.gateway.scripted_engine import make_request

ALL = AuditPolicy(share=1.0, removes_at=0.5)


class JudgingEngine(MortalEngine):
    """Judges by the tokens that it would write itself.

    They are `shift` off, behind prompts whose first token is `wrong_from` or more.
    """

    def __init__(
        self,
        *,
        shift: int = 0,
        wrong_from: int = 0,
        refuses: Literal["silently", "with an error"] | None = None,
        dies: bool = False,
        judges_with: str = "",
    ) -> None:
        super().__init__(step_s=0.001, numerics="the same")
        self.shift = shift
        self.wrong_from = wrong_from
        self.refuses = refuses
        self.dies = dies
        self.judges_with = judges_with
        self.asked: list[EngineRequest] = []

    def submit(self, request: EngineRequest) -> None:
        if request.verification is not None:
            self.asked.append(request)
            if self.refuses == "with an error":
                raise InvalidRequestError("This engine judges nothing.")
        super().submit(request)
        if request.verification is not None:
            self.is_doomed = self.dies

    def step(self, *args: Any) -> list[EngineEvent]:
        running = {request_id: each.request for request_id, each in self.running.items()}
        judged = [self._judged(each) for each in running.values() if each.verification]
        written = [
            self._shifted(event, running[event.request_id])
            if isinstance(event, TokensEmitted)
            else event
            for event in super().step(*args)
        ]
        return [*([] if self.refuses else judged), *written]

    def _shift_of(self, prompt: tuple[int, ...]) -> int:
        return self.shift if prompt[0] >= self.wrong_from else 0

    def _shifted(self, event: TokensEmitted, request: EngineRequest) -> TokensEmitted:
        shift = self._shift_of(request.prompt_token_ids)
        return replace(event, token_ids=tuple(token + shift for token in event.token_ids))

    def _judged(self, request: EngineRequest) -> PrefillDone:
        assert request.verification is not None
        count = request.verification.num_tokens
        prompt, text = request.prompt_token_ids[:-count], request.prompt_token_ids[-count:]
        first = sum(prompt) + self._shift_of(prompt)
        num_same = sum(token == first + place for place, token in enumerate(text))
        gap = 10.0 * (count - num_same)
        return PrefillDone(
            request_id=request.request_id,
            tier=request.tier,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=0,
            queue_s=0.0,
            numerics=self.judges_with,
            judgements=(Judgement(num_tokens=count, num_same=num_same, total_gap=gap),),
        )


@asynccontextmanager
async def fleet(
    policy: AuditPolicy = ALL, **engines: JudgingEngine
) -> AsyncIterator[tuple[EnginePool, dict[str, JudgingEngine]]]:
    replicas = [
        EngineReplica(name, InProcessEngineClient(lambda _, engine=engine: engine))
        for name, engine in engines.items()
    ]
    async with started(EnginePool(replicas, audits=policy)) as pool:
        await all_up(pool)
        yield pool, engines


async def ask(pool: EnginePool, *requests: EngineRequest) -> None:
    readers = [Reader(pool, request) for request in requests]
    for ending in await asyncio.gather(*(reader.rest() for reader in readers)):
        assert isinstance(ending, Finished)


async def asked(pool: EnginePool, count: int, first: int = 0) -> None:
    """Have requests answered by all replicas in turn, and audited."""
    for number in range(first, first + count):
        await ask(pool, make_request(str(number), (number + 1, 7), max_tokens=6))
    await becomes(lambda: not pool.audits.num_kept)


def counts(pool: EnginePool) -> dict[tuple[str, str], int]:
    return {(name, word): count for name, word, count in pool.audits.counts() if count}


def not_taking(pool: EnginePool) -> list[str]:
    return [state.name for state in pool.states() if state.is_draining]


async def test_an_honest_answer_is_confirmed_by_one_prefill_of_another_replica() -> None:
    async with fleet(x=JudgingEngine(), y=JudgingEngine(), z=JudgingEngine()) as (pool, engines):
        await asked(pool, 6)
        assert {word for _, word in counts(pool)} == {"same"}
        assert sum(counts(pool).values()) == 6
        judging = [request for engine in engines.values() for request in engine.asked]
        assert len(judging) == 6
        assert len({request.prompt_token_ids for request in judging}) == 6
        assert all(request.sampling.max_tokens == 0 for request in judging)
        assert all(request.cache_salt.startswith(PRIVATE_SALT) for request in judging)
        assert all(state.num_in_flight == 0 for state in pool.states())


async def test_the_one_that_differs_from_all_others_is_taken_out_and_readmitted() -> None:
    engines = {"x": JudgingEngine(shift=3), "y": JudgingEngine(), "z": JudgingEngine()}
    async with fleet(**engines) as (pool, _):
        await asked(pool, 24)
        found = counts(pool)
        assert found["x", "removed"] == 1
        assert found["x", "odd"] >= 3
        assert ("y", "odd") not in found
        assert ("z", "odd") not in found
        assert not_taking(pool) == ["x"]
        (state,) = [state for state in pool.states() if state.name == "x"]
        assert "fleet.audit_removes_at" in state.reason
        num_before = state.num_requests
        await asked(pool, 6, first=24)
        assert [s.num_requests for s in pool.states() if s.name == "x"] == [num_before]
        pool.readmit(state.group)
        assert not_taking(pool) == []


@pytest.mark.parametrize(("removes_at", "is_removed"), [(0.0, False), (0.9, False), (0.1, True)])
async def test_below_the_rate_and_at_none_it_is_told_of_only(
    removes_at: float, *, is_removed: bool
) -> None:
    wrong = JudgingEngine(shift=3, wrong_from=21)
    engines = {"x": wrong, "y": JudgingEngine(), "z": JudgingEngine()}
    async with fleet(AuditPolicy(share=1.0, removes_at=removes_at), **engines) as (pool, _):
        await asked(pool, 60)
        assert counts(pool)["x", "odd"] >= 3
        assert ("y", "odd") not in counts(pool)
        assert not_taking(pool) == (["x"] if is_removed else [])


async def test_of_two_replicas_neither_is_blamed(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet(x=JudgingEngine(shift=3), y=JudgingEngine()) as (pool, _):
        await asked(pool, 12)
        assert {word for _, word in counts(pool)} == {"different"}
        assert sum(counts(pool).values()) == 12
        assert not_taking(pool) == []
    assert "replicas differ author=" in caplog.text
    assert "odd=unknown" in caplog.text


@pytest.mark.parametrize("refuses", ["silently", "with an error"])
async def test_replicas_that_refuse_audits_harm_nothing(
    refuses: Literal["silently", "with an error"],
) -> None:
    engines = {"x": JudgingEngine(refuses=refuses), "y": JudgingEngine(refuses=refuses)}
    async with fleet(**engines, z=JudgingEngine()) as (pool, _):
        await asked(pool, 24)
        found = counts(pool)
        refused = sum(found.get((name, "refused"), 0) for name in "xy")
        assert refused == sum(len(engine.asked) for engine in engines.values()) > 0
        ended = [count for (_, word), count in found.items() if word in {"same", "missed"}]
        assert sum(ended) == 24
        assert not_taking(pool) == []


async def test_audits_that_nobody_answers_are_missed() -> None:
    engines = {name: JudgingEngine(refuses="silently") for name in "xy"}
    async with fleet(**engines) as (pool, _):
        await asked(pool, 4)
        found = counts(pool)
        assert sum(count for (_, word), count in found.items() if word == "missed") == 4
        assert sum(count for (_, word), count in found.items() if word == "refused") == 4


async def test_a_replica_that_dies_of_an_audit_ends_audits_for_a_while() -> None:
    engines = {"x": JudgingEngine(), "y": JudgingEngine(dies=True), "z": JudgingEngine(dies=True)}
    async with fleet(**engines) as (pool, _):
        await ask(pool, *(make_request(f"{n}", (n + 1,), max_tokens=9) for n in range(9)))
        await becomes(lambda: [state.is_up for state in pool.states()].count(False) == 1)
        await ask(pool, *(make_request(f"x{n}", (n + 1,), max_tokens=9) for n in range(9)))
        await asyncio.sleep(0.3)
        assert sum(len(engines[name].asked) for name in "yz") == 1
        assert pool.audits.num_kept
        assert not_taking(pool) == []


async def test_a_judge_that_computes_otherwise_by_now_says_nothing() -> None:
    async with fleet(x=JudgingEngine(judges_with="b"), y=JudgingEngine(judges_with="b")) as found:
        pool, _ = found
        await asked(pool, 3)
        assert {word for _, word in counts(pool)} == {"missed", "refused"}


async def test_a_replica_that_has_work_judges_later() -> None:
    async with fleet(x=JudgingEngine(), y=JudgingEngine()) as (pool, engines):
        busy = asyncio.create_task(Reader(pool, make_request("long", max_tokens=4000)).rest())
        await becomes(lambda: sum(state.num_in_flight for state in pool.states()) == 1)
        await ask(pool, make_request("short", max_tokens=4))
        await asyncio.sleep(0.3)
        assert pool.audits.num_kept == 1
        assert not [*engines["x"].asked, *engines["y"].asked]
        await pool.abort("long")
        await busy
        await becomes(lambda: not pool.audits.num_kept)
        assert list(counts(pool).values()) == [1]


@pytest.mark.parametrize(("name", "value"), [("MOST_ANSWERS", 3), ("MOST_BYTES", 3 * 40 * 6)])
async def test_what_is_kept_is_bounded(
    name: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_audits, name, value)
    async with fleet(x=JudgingEngine(), y=JudgingEngine()) as (pool, _):
        busy = asyncio.create_task(Reader(pool, make_request("long", max_tokens=4000)).rest())
        await becomes(lambda: sum(state.num_in_flight for state in pool.states()) == 1)
        for number in range(5):
            await ask(pool, make_request(f"{number}", max_tokens=4))  # 6 tokens with the prompt
        assert pool.audits.num_kept == 3
        assert [word for _, word in counts(pool)] == ["missed"]
        assert list(counts(pool).values()) == [2]
        await pool.abort("long")
        await busy


async def test_what_is_kept_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_audits, "KEPT_S", 0.0)
    async with fleet(x=JudgingEngine(), y=JudgingEngine()) as (pool, engines):
        await asked(pool, 3)
        assert {word for _, word in counts(pool)} == {"missed"}
        assert not [*engines["x"].asked, *engines["y"].asked]


def no_audit(name: str) -> EngineRequest:
    """A request whose answer is not audited."""
    request = make_request(name)
    match name:
        case "private":
            return replace(request, cache_salt=PRIVATE_SALT + "tenant")
        case "cascade":
            return replace(request, cascade=CascadeParams(alpha=0.3))
        case "resumed":
            return replace(request, resumed_token_ids=(30,))
    return replace(request, source=BlockSource(endpoint="tcp://a:1", num_tokens=2, wait_s=1.0))


@pytest.mark.parametrize("name", ["private", "cascade", "resumed", "blocks of another"])
def test_some_answers_are_never_audited(name: str) -> None:
    assert can_be_audited(make_request("plain"))
    assert not can_be_audited(no_audit(name))


async def test_a_private_request_never_leaves_its_replica() -> None:
    async with fleet(x=JudgingEngine(), y=JudgingEngine()) as (pool, engines):
        await ask(pool, replace(make_request("a"), cache_salt=PRIVATE_SALT))
        assert not pool.audits.num_kept
        assert not [*engines["x"].asked, *engines["y"].asked]


async def test_nothing_is_kept_without_a_share_or_another_replica() -> None:
    async with fleet(AuditPolicy(), x=JudgingEngine(), y=JudgingEngine()) as (pool, _):
        await ask(pool, make_request("a"))
        assert (pool.audits.num_kept, list(pool.audits.counts())) == (0, [])
    async with fleet(x=JudgingEngine()) as (pool, _):
        await ask(pool, make_request("a"))
        assert (pool.audits.num_kept, counts(pool)) == (0, {})


async def test_an_answer_of_two_replicas_is_nobodys() -> None:
    async with fleet(x=JudgingEngine(), y=JudgingEngine()) as (pool, engines):
        reader = Reader(pool, make_request("a", max_tokens=40))
        await reader.until(TokensEmitted)
        (author,) = [state.name for state in pool.states() if state.num_in_flight]
        assert await pool.move_off(author) == 1
        await reader.rest()
        assert (pool.audits.num_kept, counts(pool)) == (0, {})
        assert not [*engines["x"].asked, *engines["y"].asked]


@dataclass
class Process:
    generation: str
    is_draining: bool = False


def test_a_replica_that_is_started_anew_is_trusted_again() -> None:
    process = Process("first")
    client = InProcessEngineClient(lambda _: JudgingEngine())
    replica = EngineReplica("x", client, process=process)
    attempt = ReplicaAttempt(
        make_request("a"), replica, "first", JudgingEngine().info(), is_switching=False
    )
    answer = AuditedAnswer(attempt=attempt, token_ids=(30, 31), kept_s=0.0)
    replica.distrust()
    assert (replica.is_draining, answer.is_stale) == (True, False)
    process.generation = "second"
    assert (replica.is_draining, answer.is_stale) == (False, True)


def test_the_grammar_and_the_sampling_of_an_answer_go_with_it() -> None:
    grammar = GrammarSpec(kind="choice", text='["a", "b"]')
    request = replace(make_request("a", (5, 6)), grammar=grammar)
    replica = EngineReplica("x", InProcessEngineClient(lambda _: JudgingEngine()))
    attempt = ReplicaAttempt(request, replica, None, JudgingEngine().info(), is_switching=False)
    answer = AuditedAnswer(attempt=attempt, token_ids=(7,), kept_s=0.0)
    judging = answer.judging("judge")
    assert (judging.prompt_token_ids, judging.grammar) == ((5, 6, 7), grammar)
    assert judging.verification is not None
    assert judging.verification.hypotheses[0].sampling == request.sampling
    assert answer.num_bytes == 3 * 40 + len(grammar.text)


def test_only_rounding_is_forgiven_and_only_where_there_is_any() -> None:
    near_tie = Judgement(num_tokens=10, num_same=9, total_gap=0.02)
    cut_off = Judgement(num_tokens=10, num_same=9, total_gap=10.0)
    whole = Judgement(num_tokens=10, num_same=10)
    assert [is_same(each, is_deterministic=True) for each in (whole, near_tie, cut_off)] == [
        True, False, False,
    ]  # fmt: skip
    assert [is_same(each, is_deterministic=False) for each in (whole, near_tie, cut_off)] == [
        True, True, False,
    ]  # fmt: skip


class OtherHasBlocks(LeastWork):
    """A placement that counts on the blocks of replica 1."""

    def source(self, request_id: str) -> CachedElsewhere | None:
        return CachedElsewhere(lane=1, num_tokens=100)


def test_no_blocks_come_from_a_replica_whose_answers_are_wrong() -> None:
    info = JudgingEngine().info()
    tier = replace(info.tiers["large"], kv_fingerprint="f", kv_token_bytes=1.0)
    replicas = {}
    for lane, name in enumerate("xy"):
        client = InProcessEngineClient(lambda _: JudgingEngine())
        replicas[name] = EngineReplica(name, client, index_lane=lane, endpoint=f"tcp://{name}:1")
        replicas[name].info = replace(info, tiers={"large": tier})
    sources = BlockSources(replicas, LoadBoard(), OtherHasBlocks())
    request = make_request("a")
    assert sources.find(request, replicas["x"], may_prefill=False) is not None
    replicas["y"].distrust()
    assert sources.find(request, replicas["x"], may_prefill=False) is None


async def test_metrics_count_by_replica_and_outcome() -> None:
    async with fleet(x=JudgingEngine(), y=JudgingEngine()) as (pool, _):
        await asked(pool, 3)
        (found,) = [each for each in FleetMetrics(pool).collect() if each.name == "outrider_audits"]
        assert len(found.samples) == 12
        assert sum(each.value for each in found.samples if each.labels["outcome"] == "same") == 3
        assert sum(each.value for each in found.samples) == 3


def test_the_settings_say_how_much_is_audited() -> None:
    engines = EngineSettings(replicas=("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"))
    for given, policy in (
        (FleetSettings(), AuditPolicy(share=0.0, removes_at=0.05)),
        (
            FleetSettings(audit_share=0.25, audit_removes_at=0.0),
            AuditPolicy(share=0.25, removes_at=0.0),
        ),
    ):
        pool = build_remote(Settings(engine=engines, fleet=given))
        assert isinstance(pool, EnginePool)
        assert pool.audits.policy == policy
