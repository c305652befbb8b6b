"""Attempts before the first byte: other replicas, waits, and the error when all is in vain."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.shared.mock_upstream import MockRequest, MockScript, Toxic
from outrider.gateway.contract.errors.tree import (
    DeadlineExceededError,
    GatewayError,
    ThrottledError,
    UnavailableError,
    UpstreamError,
    UpstreamRefusalError,
)
from outrider.gateway.upstream.dialects.base import to_event
from tests.gateway.upstream.raw_server import CHUNKED, Connection, RawServer, raw_server
from tests.gateway.upstream.raw_server import chunk as framed
from tests.gateway.upstream.tiers import (
    Bench,
    bench,
    expected_text,
    read_all,
    read_broken,
    text_of,
    until,
)

HEALTHY = MockScript(num_pieces=6)


class Jitter(random.Random):
    """Draws the lower end of every range, and remembers the ranges."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed)
        self.ranges: list[tuple[float, float]] = []

    def uniform(self, a: float, b: float) -> float:
        self.ranges.append((a, b))
        return a

    @property
    def backoffs_s(self) -> list[float]:
        """Below what the waits between attempts were drawn."""
        return [high for low, high in self.ranges if low == 0]


def broken(kind: Any = "status", **toxic: Any) -> MockScript:
    """A server that fails in this way."""
    return MockScript(num_pieces=6, toxic=Toxic(kind=kind, **toxic))


def first(*scripts: MockScript) -> Callable[[MockRequest], MockScript]:
    """A server that answers its first requests so, and then is healthy."""
    return lambda request: [*scripts, HEALTHY][min(request.index, len(scripts))]


@asynccontextmanager
async def checked_bench(
    *scripts: Any, num_unseen: int = 0, **settings: Any
) -> AsyncIterator[Bench]:
    """A tier of these replicas. Nothing may be left."""
    async with bench(*scripts, **settings) as under_test:
        async with asyncio.timeout(8):
            yield under_test
        under_test.nothing_left(num_unseen=num_unseen)


async def complaint(under_test: Bench, **call: Any) -> GatewayError:
    """Return what an answer that cannot be had says, streamed."""
    received, error = await read_broken(under_test.answer(**call))
    assert received == []
    return error


TOXICS: dict[str, tuple[MockScript, str]] = {
    "reset": (broken("reset"), "reset"),
    "500": (broken(status=500), "status"),
    "408": (broken(status=408), "status"),
    "302": (broken(status=302), "status"),
    "429": (broken(status=429, retry_after_s=30.0), "throttled"),
    "503 with retry-after": (broken(status=503, retry_after_s=30.0), "status"),
    "slow headers": (broken("slow_headers"), "first_token_timeout"),
    "slow first token": (broken("slow_first_token"), "first_token_timeout"),
    "garbage": (broken("garbage"), "garbage"),
    "half closed": (broken("half_closed"), "reset"),
    "no done": (broken("no_done"), "ended_early"),
    "html": (broken("content_type"), "content_type"),
    "error event": (broken("error_event"), "reported"),
}


@pytest.mark.parametrize("name", TOXICS)
async def test_another_replica_answers(name: str) -> None:
    """At once: no request waits for the one that failed while another one was not asked."""
    script, failure = TOXICS[name]

    async with checked_bench(
        script, HEALTHY, timeouts={"first_token_s": 0.3 if "slow" in name else 2.0}
    ) as under_test:
        # The first one is asked first until it is known to be ill.
        under_test.tier.replicas.replicas[1].in_flight += 5
        began_s = time.monotonic()
        chunks = await read_all(under_test.answer())
        under_test.tier.replicas.replicas[1].in_flight -= 5
        assert text_of(chunks) == expected_text(HEALTHY)
        assert under_test.outcomes == [
            ("answer", "failed", failure),
            ("retry", "answered", None),
        ]
        assert time.monotonic() - began_s < 1.0
        assert under_test.booked[0].usage is None


@pytest.mark.parametrize("name", ["reset", "500", "429", "slow headers"])
async def test_another_replica_answers_in_one_piece(name: str) -> None:
    script, failure = TOXICS[name]

    async with checked_bench(
        script, HEALTHY, timeouts={"first_token_s": 0.3 if "slow" in name else 2.0}
    ) as under_test:
        under_test.tier.replicas.replicas[1].in_flight += 5
        answer = under_test.answer()
        assert (await answer.whole()).texts == (expected_text(HEALTHY),)
        await answer.aclose()
        under_test.tier.replicas.replicas[1].in_flight -= 5
        assert under_test.outcomes == [
            ("answer", "failed", failure),
            ("retry", "answered", None),
        ]


@pytest.mark.parametrize("kind", ["garbage", "reset", "half_closed", "content_type"])
async def test_half_a_whole_answer_is_none(kind: str) -> None:
    """Nothing was sent to the client, so the second half is no matter."""

    async with checked_bench(first(broken(kind, after_events=1))) as under_test:
        answer = under_test.answer()
        assert (await answer.whole()).texts == (expected_text(HEALTHY),)
        await answer.aclose()
        assert answer.num_attempts == 2


async def test_a_refused_connection_is_retried_at_the_next_replica() -> None:
    async with bench(HEALTHY, HEALTHY) as under_test:
        await under_test.mocks[0].refuse()
        for _ in range(4):
            chunks = await read_all(under_test.answer())
            assert text_of(chunks) == expected_text(HEALTHY)
        outcomes = under_test.outcomes
        assert outcomes.count(("answer", "failed", "refused")) == len(outcomes) - 4
        await under_test.mocks[0].listen()


async def test_a_single_server_is_asked_again_after_a_wait() -> None:
    rng = Jitter()

    async with checked_bench(first(broken(), broken()), rng=rng) as under_test:
        chunks = await read_all(under_test.answer())
        assert text_of(chunks) == expected_text(HEALTHY)
        assert [kind for kind, _, _ in under_test.outcomes] == ["answer", "retry", "retry"]
        # Full jitter: anything between nothing and a bound that doubles.
        assert rng.backoffs_s == [0.1, 0.2]


async def test_two_servers_are_asked_before_there_is_a_wait() -> None:
    rng = Jitter()

    async with checked_bench(broken(), broken(), rng=rng) as under_test:
        error = await complaint(under_test)
        assert isinstance(error, UpstreamError)
        assert under_test.num_asked in ([2, 1], [1, 2])
        assert len(rng.backoffs_s) == 1


@pytest.mark.parametrize("max_retries", [0, 1, 3])
async def test_there_are_no_more_attempts_than_allowed(max_retries: int) -> None:
    async with checked_bench(broken(), max_retries=max_retries, rng=Jitter()) as under_test:
        answer = under_test.answer()
        _, error = await read_broken(answer)
        assert isinstance(error, UpstreamError)
        assert (error.failure, error.status) == ("status", 500)
        assert answer.num_attempts == max_retries + 1
        assert under_test.num_asked == [max_retries + 1]


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_refusal_is_not_retried_at_another_replica(is_streamed: bool) -> None:
    async with checked_bench(broken(status=400), broken(status=400)) as under_test:
        answer = under_test.answer()
        with pytest.raises(UpstreamRefusalError):
            await (answer.begin() if is_streamed else answer.whole())
        assert sum(under_test.num_asked) == 1


# ---- what servers ask for -----------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_honoured(status: int) -> None:
    async with checked_bench(
        first(broken(status=status, retry_after_s=0.3)), rng=Jitter()
    ) as under_test:
        chunks = await read_all(under_test.answer())
        assert text_of(chunks) == expected_text(HEALTHY)
        failed, answered = under_test.booked
        assert 0.3 <= answered.started_s - failed.ended_s < 1.0


async def test_the_soonest_of_several_replicas_is_waited_for() -> None:
    soon, late = broken(status=429, retry_after_s=0.2), broken(status=429, retry_after_s=9.0)
    async with checked_bench(first(soon), first(late), rng=Jitter()) as under_test:
        chunks = await read_all(under_test.answer())
        assert text_of(chunks) == expected_text(HEALTHY)
        assert under_test.num_asked == [2, 1]


async def test_a_long_retry_after_is_passed_on_at_once() -> None:
    async with checked_bench(
        broken(status=429, retry_after_s=20.0), timeouts={"total_s": 60.0}
    ) as under_test:
        error = await complaint(under_test)
        assert isinstance(error, ThrottledError)
        assert error.retry_after_s == pytest.approx(20, abs=0.5)
        assert under_test.num_asked == [1]
        # It is not even asked again before that.
        error = await complaint(under_test)
        assert isinstance(error, ThrottledError)
        assert error.retry_after_s == pytest.approx(20, abs=0.5)
        assert under_test.num_asked == [1]
        assert under_test.tier.retry_after_s == pytest.approx(20, abs=0.5)


async def test_a_retry_after_of_another_request_delays_no_request() -> None:
    """The wait is short enough, but another server may answer meanwhile."""

    async with checked_bench(HEALTHY) as under_test:
        under_test.tier.replicas.replicas[0].begin().failed("throttled", 3.0)
        began_s = time.monotonic()
        error = await complaint(under_test)
        assert isinstance(error, ThrottledError)
        assert error.retry_after_s == pytest.approx(3, abs=0.5)
        assert time.monotonic() - began_s < 1.0
        assert under_test.num_asked == [0]


async def test_a_long_retry_after_of_a_503_is_passed_on() -> None:
    async with checked_bench(broken(status=503, retry_after_s=20.0)) as under_test:
        error = await complaint(under_test)
        assert isinstance(error, UnavailableError)
        assert error.retry_after_s == pytest.approx(20, abs=0.5)
        assert under_test.num_asked == [1]


async def test_no_retry_waits_beyond_the_deadline() -> None:
    """It fails at once, so that another server may answer in the time that is left."""

    async with checked_bench(broken(status=429, retry_after_s=2.0)) as under_test:
        began_s = time.monotonic()
        error = await complaint(under_test, deadline_in_s=1.5)
        assert isinstance(error, ThrottledError)
        assert time.monotonic() - began_s < 1.0


# ---- deadlines ----------------------------------------------------------------------------------


async def test_a_deadline_that_has_passed() -> None:
    async with checked_bench(HEALTHY) as under_test:
        error = await complaint(under_test, deadline_in_s=-1.0)
        assert isinstance(error, DeadlineExceededError)
        assert under_test.num_asked == [0]


@pytest.mark.parametrize("kind", ["slow_headers", "slow_first_token"])
async def test_a_deadline_ends_the_wait_for_a_first_token(kind: str) -> None:
    async with checked_bench(broken(kind), num_unseen=6) as under_test:
        error = await complaint(under_test, deadline_in_s=0.15)
        assert isinstance(error, DeadlineExceededError)
        assert under_test.outcomes == [("answer", "cancelled", "deadline_exceeded")]
        # The request was in a hurry; that is not the server's fault.
        breaker = under_test.tier.replicas.replicas[0].breaker
        for _ in range(6):
            await complaint(under_test, deadline_in_s=0.02)
        assert breaker.state == "closed"


async def test_a_deadline_ends_a_stream() -> None:
    async with checked_bench(broken("stall", after_events=2)) as under_test:
        received, error = await read_broken(under_test.answer(deadline_in_s=0.4))
        assert isinstance(error, DeadlineExceededError)
        assert expected_text(HEALTHY).startswith(text_of(received))
        assert under_test.outcomes == [("answer", "cancelled", "deadline_exceeded")]
        assert under_test.booked[0].usage is not None


async def test_the_total_time_bounds_all_attempts_together() -> None:
    timeouts = {"first_token_s": 0.3, "total_s": 0.55}
    async with checked_bench(
        broken("slow_headers"), max_retries=5, timeouts=timeouts, rng=Jitter()
    ) as under_test:
        error = await complaint(under_test)
        assert isinstance(error, UpstreamError)
        assert under_test.num_asked == [2]


async def test_empty_chunks_do_not_stand_for_a_first_token() -> None:
    event = to_event(b'{"id":"x","choices":[{"index":0,"delta":{"role":"assistant"}}]}')

    async def handler(connection: Connection, server: RawServer) -> None:
        del server
        await connection.request()
        await connection.send(CHUNKED)
        while True:
            await connection.send(framed(event))
            await asyncio.sleep(0.05)

    timeouts = {"first_token_s": 0.3}
    async with (
        bench(HEALTHY, max_retries=0, timeouts=timeouts) as under_test,
        raw_server(handler) as server,
    ):
        under_test.tier.replicas.replicas[0].url = server.url
        error = await complaint(under_test)
        assert isinstance(error, UpstreamError)
        assert error.failure == "first_token_timeout"


async def test_the_connection_of_a_failure_is_cut() -> None:
    """Nobody reads the rest of it, which may never come."""
    has_left = asyncio.Event()

    async def handler(connection: Connection, server: RawServer) -> None:
        del server
        first, _, _ = await connection.request()
        if first.startswith("POST"):
            await connection.send(b"HTTP/1.1 500 Oops\r\ncontent-length: 10\r\n\r\n")
            await connection.client_left()
            has_left.set()

    async with raw_server(handler) as server, bench(HEALTHY, max_retries=0) as under_test:
        under_test.tier.replicas.replicas[0].url = server.url
        answer = under_test.answer()
        with pytest.raises(UpstreamError):
            await answer.begin()
        async with asyncio.timeout(5):
            await has_left.wait()


# ---- the error that tells most ------------------------------------------------------------------


async def test_throttled_tells_more_than_failed() -> None:
    async with checked_bench(
        broken(status=429, retry_after_s=30.0), broken(), max_retries=1, rng=Jitter()
    ) as under_test:
        error = await complaint(under_test)
        assert isinstance(error, ThrottledError)
        assert sum(under_test.num_asked) == 2


async def test_a_refusal_tells_more_than_throttled() -> None:
    async with checked_bench(
        broken(status=429, retry_after_s=30.0), broken(status=400)
    ) as under_test:
        under_test.tier.replicas.replicas[1].in_flight += 5
        error = await complaint(under_test)
        under_test.tier.replicas.replicas[1].in_flight -= 5
        assert isinstance(error, UpstreamRefusalError)
        assert under_test.num_asked == [1, 1]


async def test_open_breakers_fail_at_once() -> None:
    async with checked_bench(broken(), max_retries=0) as under_test:
        for _ in range(5):
            error = await complaint(under_test)
            assert isinstance(error, UpstreamError)
        assert under_test.num_asked == [5]
        assert not under_test.tier.is_available
        began_s = time.monotonic()
        error = await complaint(under_test)
        assert isinstance(error, UnavailableError)
        assert 0 < error.retry_after_s <= 1.2
        assert time.monotonic() - began_s < 0.2
        assert under_test.num_asked == [5]


async def test_no_retry_waits_for_an_open_breaker() -> None:
    """Time alone does not close it, so the failure is told at once."""

    rng = Jitter()
    async with checked_bench(broken(), max_retries=5, rng=rng) as under_test:
        for _ in range(4):
            under_test.tier.replicas.replicas[0].begin().failed("status")
        error = await complaint(under_test)
        assert isinstance(error, UpstreamError)
        assert error.failure == "status"
        assert under_test.num_asked == [1]
        assert rng.backoffs_s == []


# ---- leaving ------------------------------------------------------------------------------------


async def test_leaving_while_it_waits() -> None:
    async with checked_bench(broken(status=429, retry_after_s=5.0)) as under_test:
        answer = under_test.answer()
        task = asyncio.create_task(answer.begin())
        await until(lambda: len(under_test.booked) == 1)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await answer.aclose()
        assert under_test.outcomes == [("answer", "failed", "throttled")]


async def test_leaving_at_every_step() -> None:
    """However many turns of the event loop it lives: nothing leaks, all is booked once."""

    async with bench(first(*[broken()] * 1000), HEALTHY) as under_test:
        replicas = under_test.tier.replicas.replicas
        replicas[0].latency.add(1e-6)  # looks fast, so it is asked first
        num_attempts = 0
        for num_turns in range(80):
            answer = under_test.answer()
            task = asyncio.create_task(read_all(answer))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            num_attempts += answer.num_attempts
            assert [replica.in_flight for replica in replicas] == [0, 0]
            assert len(under_test.booked) == num_attempts
            # It must not open, or nobody would be asked.
            replicas[0].begin().succeeded()
        outcomes = {outcome for _, outcome, _ in under_test.outcomes}
        assert outcomes == {"answered", "failed", "cancelled"}
        for mock in under_test.mocks:
            await mock.settled()
