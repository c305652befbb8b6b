"""Expected times of the local models, learnt from past requests."""

import heapq
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.answering.reading.local_load import LoadTicket, LocalLoad
from tests.gateway.waiting import HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def load(clock: HandClock) -> LocalLoad:
    return LocalLoad(clock)


def answer(
    load: LocalLoad, *, queue_s: float = 0.0, prefill_s: float = 0.1, token_s: float = 0.01
) -> None:
    """One request with 11 tokens, alone."""
    clock = load.clock
    assert isinstance(clock, HandClock)
    ticket = load.admit()
    clock.now_s += queue_s + prefill_s
    ticket.began(queue_s)
    ticket.first_text()
    clock.now_s += 10 * token_s
    ticket.ended(11)


def test_unmeasured_times_count_as_zero(load: LocalLoad) -> None:
    expected = load.expected(100)
    assert (expected.queue_s, expected.first_token_s, expected.total_s) == (0, 0, 0)
    assert load.would_miss(1000.001, 100_000) is None
    assert load.queues_longer_than(0.0) is None


def test_times_are_learnt(load: LocalLoad, clock: HandClock) -> None:
    for _ in range(5):
        answer(load, prefill_s=0.2, token_s=0.03)
    expected = load.expected(101)
    assert expected.queue_s == 0
    assert expected.first_token_s == pytest.approx(0.2, rel=0.02)
    assert expected.total_s == pytest.approx(3.2, rel=0.02)
    assert load.expected(1).total_s == expected.first_token_s
    assert load.expected(0).total_s == expected.first_token_s
    for _ in range(30):
        answer(load, prefill_s=0.4, token_s=0.01)
    assert load.expected(101).total_s == pytest.approx(1.4, rel=0.05)


def test_a_deadline_is_missed_by_queue_or_by_length(load: LocalLoad, clock: HandClock) -> None:
    for _ in range(5):
        answer(load, prefill_s=0.2, token_s=0.03)
    assert load.would_miss(clock.now_s + 4, 101) is None
    assert load.would_miss(clock.now_s + 1, 101) == "load: 3.2 s for the answer against 1.0 s left"
    assert load.would_miss(clock.now_s + 1, 5) is None
    load.admit()
    clock.now_s += 3.2  # of which 0.2 s may be its prefill
    assert load.would_miss(clock.now_s + 1, 5) == "load: 3.0 s of queue against 1.0 s left"
    reason = load.queues_longer_than(2.5)
    assert reason == "load: 3.0 s of queue, more than 2.5 s"
    assert reason.isascii()
    assert load.queues_longer_than(3.1) is None


def test_a_waiting_request_reveals_the_queue_before_any_measurement(
    load: LocalLoad, clock: HandClock
) -> None:
    first = load.admit()
    clock.now_s += 2.0
    second = load.admit()
    assert load.expected(1).queue_s == 2.0
    first.ended(0)  # refused
    assert load.num_waiting == 1
    assert load.expected(1).queue_s == 0.0
    clock.now_s += 1.0
    second.began()
    assert (load.num_waiting, load.num_running) == (0, 1)
    assert load.expected(1).queue_s == 1.0  # it is still the last that is known


def test_a_place_that_became_free_ends_the_queue(load: LocalLoad, clock: HandClock) -> None:
    running, waiting = load.admit(), load.admit()
    running.began(0.0)
    clock.now_s += 4.0
    running.ended(10)
    waiting.began(4.0)
    assert load.expected(1).queue_s > 0.5
    waiting.ended(10)
    assert load.expected(1).queue_s == 0.0


def test_a_jam_is_forgotten_when_all_is_handed_over(load: LocalLoad, clock: HandClock) -> None:
    """An old measurement must not hold for ever."""
    ticket = load.admit()
    clock.now_s += 8.0
    ticket.began(8.0)  # and runs on
    assert load.queues_longer_than(4.0)
    clock.now_s += 6.0
    assert load.queues_longer_than(4.0) is None
    for _ in range(5):
        answer(load, token_s=1.0)
    assert load.would_miss(clock.now_s + 50, 100)
    clock.now_s += 600.0
    assert load.would_miss(clock.now_s + 50, 100) is None


def test_the_engines_word_on_the_queue_is_taken(load: LocalLoad, clock: HandClock) -> None:
    ticket = load.admit()
    clock.now_s += 1.0
    ticket.began(0.25)  # the rest was prefill
    ticket.first_text()
    assert load.expected(1).queue_s == 0.25
    assert load.expected(1).first_token_s == 1.0
    for absurd in (-1.0, 50.0):
        fresh = LocalLoad(clock)
        ticket = fresh.admit()
        clock.now_s += 1.0
        ticket.began(absurd)
        ticket.first_text()
        assert 0.0 <= fresh.expected(1).queue_s <= 1.0
        assert fresh.expected(1).first_token_s == 1.0


def test_words_count_once_and_never_after_the_end(load: LocalLoad, clock: HandClock) -> None:
    ticket = load.admit()
    ticket.began(0.0)
    clock.now_s += 1.0
    ticket.began(1.0)
    ticket.first_text()
    clock.now_s += 1.0
    ticket.first_text()
    ticket.ended(2)
    ticket.ended(2)
    ticket.began()
    ticket.first_text()
    assert (load.num_waiting, load.num_running) == (0, 0)
    assert load.expected(2).first_token_s == pytest.approx(1.0, rel=0.01)
    assert load.expected(2).total_s == pytest.approx(2.0, rel=0.01)


WORDS: dict[str, Any] = {
    "began": LoadTicket.began,
    "told": lambda ticket: ticket.began(0.5),
    "text": LoadTicket.first_text,
    "ended": lambda ticket: ticket.ended(7),
    "refused": lambda ticket: ticket.ended(0),
}


@given(
    st.lists(
        st.tuples(st.sampled_from(["admit", *WORDS]), st.integers(0, 5), st.floats(0.0, 3.0)),
        max_size=60,
    )
)
def test_in_any_order(steps: list[tuple[str, int, float]]) -> None:
    clock = HandClock()
    load = LocalLoad(clock)
    tickets = [load.admit()]
    for word, index, wait_s in steps:
        clock.now_s += wait_s
        if word == "admit":
            tickets.append(load.admit())
        else:
            WORDS[word](tickets[index % len(tickets)])
        assert 0 <= load.num_waiting + load.num_running <= len(tickets)
        assert load.num_waiting >= 0
        assert load.num_running >= 0
        expected = load.expected(10)
        assert 0.0 <= expected.queue_s <= expected.first_token_s <= expected.total_s
        assert expected.total_s < 10_000
    for ticket in tickets:
        ticket.ended(1)
    assert (load.num_waiting, load.num_running) == (0, 0)
    assert load.expected(1).queue_s == 0.0


def _simulate(
    *, slots: int, answer_s: float, gap_s: float, count: int
) -> list[tuple[float, float]]:
    """A server with so many places: what was expected at each arrival, and how long it waited."""
    rng = random.Random(5)
    clock = HandClock(0.0)
    load = LocalLoad(clock)
    free = [0.0] * slots
    events: list[tuple[float, int, Any]] = []  # (time, order, what happens)
    arrival_s, results = 0.0, []
    for order in range(count):
        arrival_s += rng.expovariate(1 / gap_s)
        heapq.heappush(events, (arrival_s, order, None))
    order = count
    while events:
        clock.now_s, _, happens = heapq.heappop(events)
        if happens is not None:
            happens()
            continue
        begins_s = max(heapq.heappop(free), clock.now_s)
        ends_s = begins_s + answer_s * rng.uniform(0.8, 1.2)
        heapq.heappush(free, ends_s)
        results.append((load.expected(1).queue_s, begins_s - clock.now_s))
        ticket = load.admit()
        queue_s = begins_s - clock.now_s
        heapq.heappush(events, (begins_s, order, lambda t=ticket, q=queue_s: t.began(q)))
        heapq.heappush(events, (ends_s, order + 1, lambda t=ticket: t.ended(5)))
        order += 2
    return results


def test_an_idle_server_is_not_avoided() -> None:
    results = _simulate(slots=4, answer_s=1.0, gap_s=1.0, count=300)
    assert sum(real == 0 for _, real in results) > 250
    assert sum(expected > 0.5 for expected, _ in results) < 10


def test_an_overloaded_server_is_seen() -> None:
    """Twice as much comes as it can take: the queue grows without end."""
    results = _simulate(slots=4, answer_s=1.0, gap_s=0.125, count=300)
    late = [(expected, real) for expected, real in results if real > 2.0]
    assert len(late) > 150
    ratios = sorted(expected / real for expected, real in late)
    assert ratios[len(ratios) // 10] > 0.5
    assert ratios[-len(ratios) // 10] < 2.0
