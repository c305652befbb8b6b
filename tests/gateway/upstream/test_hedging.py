"""A second request for a late answer: which one goes on, which is cut off, what it may cost."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared.mock_upstream import MockRequest, MockScript, Toxic
from outrider.gateway.contract.errors.tree import (
    ThrottledError,
    UpstreamError,
    UpstreamRefusalError,
)
from outrider.gateway.upstream.hedging import HedgeBudget
from outrider.gateway.upstream.upstream_request import UpstreamRequest
from tests.gateway.upstream.tiers import (
    Bench,
    bench,
    call_of,
    expected_text,
    read_all,
    read_broken,
    text_of,
    until,
)

FAST = MockScript(num_pieces=6)
SLOW = MockScript(num_pieces=6, first_token_delay_s=0.4)
SILENT = MockScript(toxic=Toxic(kind="slow_first_token"))
LATE_S = 0.05


@asynccontextmanager
async def checked_bench(
    *scripts: Any, late_s: float | None = LATE_S, **settings: Any
) -> AsyncIterator[Bench]:
    """A tier that hedges every request, and asks its first replica first. Nothing may be left.

    late_s: what it has learned; None: nothing yet.
    """
    async with bench(*scripts, **{"hedge_share": 1.0, **settings}) as under_test:
        first, *others = under_test.tier.replicas.replicas
        first.latency.add(1e-6)
        for other in others:
            other.latency.add(0.01)
        for _ in range(20 if late_s else 0):
            under_test.tier.first_token.add(late_s)
        async with asyncio.timeout(8):
            yield under_test
        under_test.nothing_left()


async def ask(under_test: Bench) -> str:
    return text_of(await read_all(under_test.answer()))


# ---- the budget ---------------------------------------------------------------------------------


def test_ten_requests_pay_for_one_hedge() -> None:
    budget = HedgeBudget(0.1)
    for _ in range(9):
        budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend()
    assert not budget.spend()


@given(st.floats(0, 1), st.lists(st.booleans(), max_size=300))
def test_there_are_never_more_hedges_than_their_share(share: float, wants: list[bool]) -> None:
    budget = HedgeBudget(share)
    num_hedges = 0
    for number, is_wanted in enumerate(wants, start=1):
        budget.earn()
        num_hedges += is_wanted and budget.spend()
        assert num_hedges <= share * number + 1e-6


def test_quiet_times_do_not_pay_for_a_storm() -> None:
    budget = HedgeBudget(1.0)
    for _ in range(1000):
        budget.earn()
    assert sum(budget.spend() for _ in range(1000)) == 10


# ---- races --------------------------------------------------------------------------------------


async def test_the_rival_is_faster() -> None:
    async with checked_bench(SILENT, FAST) as under_test:
        answer = under_test.answer()
        began_s = time.monotonic()
        chunks = await read_all(answer)
        assert LATE_S <= time.monotonic() - began_s < 1.0
        assert text_of(chunks) == expected_text(FAST)
        assert under_test.outcomes == [("answer", "lost", None), ("hedge", "answered", None)]
        assert answer.is_hedged
        assert answer.num_attempts == 2
        assert answer.replica == under_test.tier.replicas.replicas[1].name
        # The loser is told to stop.
        await under_test.mocks[0].settled()
        assert under_test.mocks[0].requests[0].outcome == "client_left"
        # It is paid, but only the winner's tokens are the client's.
        lost, answered = under_test.booked
        assert lost.usage is not None
        assert lost.usage.num_completion_tokens == 0
        assert answer.usage == answered.usage


async def test_the_first_one_is_faster_after_all() -> None:
    async with checked_bench(
        MockScript(num_pieces=6, first_token_delay_s=2 * LATE_S), SILENT
    ) as under_test:
        answer = under_test.answer()
        assert text_of(await read_all(answer)) == expected_text(SLOW)
        assert under_test.outcomes == [("hedge", "lost", None), ("answer", "answered", None)]
        assert answer.replica == under_test.tier.replicas.replicas[0].name
        await under_test.mocks[1].settled()
        assert under_test.mocks[1].requests[0].outcome == "client_left"


async def test_in_one_piece() -> None:
    async with checked_bench(SLOW, FAST, late_s=None) as under_test:
        for _ in range(20):
            under_test.tier._state.whole.add(LATE_S)
        answer = under_test.answer()
        assert (await answer.whole()).texts == (expected_text(FAST),)
        await answer.aclose()
        assert under_test.outcomes == [("answer", "lost", None), ("hedge", "answered", None)]


async def test_an_answer_in_time_is_not_hedged() -> None:
    async with checked_bench(FAST, FAST, late_s=1.5) as under_test:
        answer = under_test.answer()
        await read_all(answer)
        assert not answer.is_hedged
        assert under_test.num_asked == [1, 0]


@pytest.mark.parametrize("settings", [{"hedge_share": 0.0}, {"late_s": None}])
async def test_no_rival_without_a_share_or_knowledge(settings: dict[str, Any]) -> None:
    async with checked_bench(
        MockScript(num_pieces=6, first_token_delay_s=2 * LATE_S), FAST, **settings
    ) as under_test:
        assert await ask(under_test) == expected_text(SLOW)
        assert under_test.num_asked == [1, 0]


async def test_the_share_of_rivals_is_kept() -> None:
    slow = MockScript(num_pieces=6, first_token_delay_s=2 * LATE_S)

    async with checked_bench(slow, slow, hedge_share=0.4) as under_test:
        for _ in range(6):
            # The rivals' own quick answers would bring down what counts as late.
            for _ in range(20):
                under_test.tier.first_token.add(LATE_S)
            await ask(under_test)
        assert [kind for kind, _, _ in under_test.outcomes].count("hedge") == 2


async def test_a_single_server_is_its_own_rival() -> None:
    def one_slow(request: MockRequest) -> MockScript:
        return SILENT if request.index == 0 else FAST

    async with checked_bench(one_slow) as under_test:
        assert await ask(under_test) == expected_text(FAST)
        assert under_test.outcomes == [("answer", "lost", None), ("hedge", "answered", None)]


async def test_mirrors_have_no_rival() -> None:
    slow = MockScript(num_pieces=6, first_token_delay_s=2 * LATE_S)
    async with checked_bench(slow, slow) as under_test:
        await read_all(under_test.answer(kind="mirror"))
        assert sum(under_test.num_asked) == 1


# ---- races in which somebody fails --------------------------------------------------------------


async def test_the_first_one_fails_while_the_rival_works() -> None:
    slow = MockScript(num_pieces=6, first_token_delay_s=0.3)
    async with checked_bench(
        SILENT, slow, late_s=0.2, timeouts={"first_token_s": 0.4}
    ) as under_test:
        answer = under_test.answer()
        assert text_of(await read_all(answer)) == expected_text(SLOW)
        assert under_test.outcomes == [
            ("answer", "failed", "first_token_timeout"),
            ("hedge", "answered", None),
        ]
        assert answer.num_attempts == 2


async def test_the_rival_fails_while_the_first_one_works() -> None:
    slow = MockScript(num_pieces=6, first_token_delay_s=0.4)
    async with checked_bench(
        slow, MockScript(toxic=Toxic(kind="status", status=500))
    ) as under_test:
        answer = under_test.answer()
        assert text_of(await read_all(answer)) == expected_text(FAST)
        assert under_test.outcomes == [("hedge", "failed", "status"), ("answer", "answered", None)]


async def test_both_fail_and_a_third_attempt_answers() -> None:
    def once(script: MockScript) -> Callable[[MockRequest], MockScript]:
        return lambda request: script if request.index == 0 else FAST

    failing = MockScript(toxic=Toxic(kind="status", status=500))
    async with checked_bench(
        once(SILENT), once(failing), timeouts={"first_token_s": 0.4}
    ) as under_test:
        answer = under_test.answer()
        assert text_of(await read_all(answer)) == expected_text(FAST)
        assert [(kind, outcome) for kind, outcome, _ in under_test.outcomes] == [
            ("hedge", "failed"),
            ("answer", "failed"),
            ("retry", "answered"),
        ]
        assert answer.num_attempts == 3


async def test_all_fail_and_the_error_tells_most() -> None:
    throttled = MockScript(toxic=Toxic(kind="status", status=429, retry_after_s=30.0))
    async with checked_bench(
        SILENT, throttled, max_retries=0, timeouts={"first_token_s": 0.4}
    ) as under_test:
        received, error = await read_broken(under_test.answer())
        assert received == []
        assert isinstance(error, ThrottledError)
        assert [kind for kind, _, _ in under_test.outcomes] == ["hedge", "answer"]


async def test_a_failure_in_time_is_tried_again_as_ever() -> None:
    async with checked_bench(
        MockScript(toxic=Toxic(kind="status", status=500)), FAST, late_s=1.5
    ) as under_test:
        assert await ask(under_test) == expected_text(FAST)
        assert under_test.outcomes == [("answer", "failed", "status"), ("retry", "answered", None)]


async def test_a_refusal_ends_the_race() -> None:
    """The request is at fault: the other one would say the same."""

    async with checked_bench(
        SILENT, MockScript(toxic=Toxic(kind="status", status=400))
    ) as under_test:
        received, error = await read_broken(under_test.answer())
        assert received == []
        assert isinstance(error, UpstreamRefusalError)
        assert under_test.outcomes == [("hedge", "refused", None), ("answer", "lost", None)]


async def test_the_winner_may_still_break_off() -> None:
    async with checked_bench(
        SILENT, MockScript(num_pieces=6, toxic=Toxic(kind="reset", after_events=3))
    ) as under_test:
        received, error = await read_broken(under_test.answer())
        assert isinstance(error, UpstreamError)
        assert expected_text(FAST).startswith(text_of(received))
        assert under_test.outcomes == [("answer", "lost", None), ("hedge", "failed", "reset")]


async def test_a_loser_is_lost_also_with_all_of_its_answer() -> None:
    """Both may come to their end at the same moment, but only one of them is delivered."""

    async with checked_bench(MockScript(num_pieces=0)) as under_test:
        tier, call = under_test.tier, call_of()
        request = UpstreamRequest(
            tier._state,
            call,
            tier.replicas.replicas[0],
            kind="hedge",
            body=tier._state.parts.dialect.body(call, tier.traits),
        )
        await request.start()
        request.given_up_as = "lost"
        await request.aclose()
        assert under_test.outcomes == [("hedge", "lost", None)]


# ---- leaving ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_sent", [1, 2])
async def test_leaving_a_race(num_sent: int) -> None:
    async with checked_bench(SILENT, SILENT) as under_test:
        answer = under_test.answer()
        task = asyncio.create_task(answer.begin())
        await until(lambda: sum(under_test.num_asked) == num_sent)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await answer.aclose()
        for mock in under_test.mocks:
            await mock.settled()
        assert [outcome for _, outcome, _ in under_test.outcomes] == ["cancelled"] * num_sent


@pytest.mark.slow_cases
@pytest.mark.parametrize("num_cancels", [1, 2])
async def test_leaving_a_race_at_every_step(num_cancels: int) -> None:
    """Also in the very moment in which one has won and the other one is cut off."""

    async with bench(FAST, FAST, hedge_share=1.0) as under_test:
        tier = under_test.tier
        num_attempts = num_hedges = 0
        for num_turns in range(100):
            for _ in range(40):
                tier.first_token.add(1e-6)  # everything is late
            answer = under_test.answer()
            task = asyncio.create_task(answer.begin())
            for _ in range(num_turns):
                await asyncio.sleep(0)
            for _ in range(num_cancels):
                task.cancel()
                await asyncio.sleep(0)
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                await answer.aclose()  # it has begun
            num_attempts += answer.num_attempts
            num_hedges += answer.is_hedged
            assert [replica.in_flight for replica in tier.replicas.replicas] == [0, 0]
            assert len(under_test.booked) == num_attempts
        assert num_hedges > 50
        outcomes = {outcome for _, outcome, _ in under_test.outcomes}
        assert outcomes >= {"lost", "cancelled"}
        for mock in under_test.mocks:
            await mock.settled()
