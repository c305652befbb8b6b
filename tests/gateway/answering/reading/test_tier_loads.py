import pytest

from outrider.gateway.answering.reading.local_load import LocalLoad, TierLoads
from outrider.verifier.params import Tier
from tests.gateway.waiting import HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def answer(
    loads: TierLoads, clock: HandClock, tier: Tier, *, queue_s: float, token_s: float
) -> None:
    """One answer of 11 tokens."""
    ticket = loads.admit(tier, LocalLoad(clock).admit())
    clock.now_s += queue_s
    ticket.began(queue_s)
    clock.now_s += token_s
    ticket.first_text()
    clock.now_s += 10 * token_s
    ticket.ended(11)


def measured(clock: HandClock, max_factor: float = 4.0) -> TierLoads:
    """Small answers of 0.11 s and large ones of 1.1 s."""
    loads = TierLoads(clock, max_factor=max_factor)
    answer(loads, clock, "small", queue_s=0.0, token_s=0.01)
    answer(loads, clock, "large", queue_s=0.0, token_s=0.1)
    return loads


def queued(clock: HandClock, wait_s: float, max_factor: float = 4.0) -> TierLoads:
    """The large model has let a request wait so long that no model has begun with yet."""
    loads = measured(clock, max_factor)
    loads.admit("large", LocalLoad(clock).admit())
    clock.now_s += wait_s + 0.1  # a prompt takes 0.1 s to read
    return loads


def test_nothing_is_raised_while_a_tier_was_not_measured(clock: HandClock) -> None:
    loads = TierLoads(clock)
    assert loads.busy_factor(10) == 1.0
    answer(loads, clock, "large", queue_s=5.0, token_s=0.1)
    assert loads.busy_factor(10) == 1.0


def test_a_wait_counts_like_the_longer_time_of_the_answer(clock: HandClock) -> None:
    loads = queued(clock, 0.99)
    assert loads.busy_factor(11) == pytest.approx(2.0, rel=0.05)
    assert loads.busy_factor(22) < loads.busy_factor(11)


def test_no_queue_changes_nothing(clock: HandClock) -> None:
    assert measured(clock).busy_factor(11) == 1.0


def test_the_factor_is_bounded_and_can_be_turned_off(clock: HandClock) -> None:
    assert queued(clock, 1000.0).busy_factor(11) == 4.0
    assert queued(clock, 1000.0, max_factor=1.0).busy_factor(11) == 1.0


def test_a_small_model_that_is_slower_makes_no_bar(clock: HandClock) -> None:
    loads = TierLoads(clock)
    answer(loads, clock, "small", queue_s=0.0, token_s=0.2)
    answer(loads, clock, "large", queue_s=3.0, token_s=0.1)
    assert loads.busy_factor(11) == 1.0


def test_the_whole_load_hears_of_every_request(clock: HandClock) -> None:
    loads, whole = TierLoads(clock), LocalLoad(clock)
    ticket = loads.admit("large", whole.admit())
    assert whole.num_waiting == 1
    ticket.began(0.0)
    assert (whole.num_waiting, whole.num_running) == (0, 1)
    ticket.first_text()
    ticket.ended(4)
    assert whole.num_running == 0
