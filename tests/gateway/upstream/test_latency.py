"""First-token times: what the average follows, what the quantiles hold, what is forgotten."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.upstream.latency import LatencyEstimate
from tests.gateway.waiting import HandClock

TAU_S = 10.0


def _learned(*samples: float, gap_s: float = 0.1) -> tuple[LatencyEstimate, HandClock]:
    clock = HandClock()
    estimate = LatencyEstimate(clock=clock)
    for seconds in samples:
        clock.now_s += gap_s
        estimate.add(seconds)
    return estimate, clock


def test_nothing_is_known_before_the_first_sample() -> None:
    estimate = LatencyEstimate(clock=HandClock())
    assert estimate.ewma_s is None
    assert estimate.quantile(0.95) is None
    assert estimate.num_samples == 0
    assert estimate.expected_s(0.7, 5.0) == 0.7


def test_the_average_follows_a_peak_at_once_and_forgets_it_by_time() -> None:
    estimate, clock = _learned(0.2, 0.6)
    assert estimate.ewma_s == pytest.approx(0.6)
    clock.now_s += TAU_S
    estimate.add(0.2)
    assert estimate.ewma_s == pytest.approx(0.2 + 0.4 / math.e)


def test_how_fast_a_peak_is_forgotten_does_not_depend_on_the_request_rate() -> None:
    figures = []
    for num_samples in (10, 200):
        estimate, clock = _learned(0.2, 0.8)
        for _ in range(num_samples):
            clock.now_s += TAU_S / num_samples
            estimate.add(0.2)
        assert estimate.ewma_s is not None
        figures.append(estimate.ewma_s)
    assert figures[0] == pytest.approx(0.2 + 0.6 / math.e)
    assert figures[1] == pytest.approx(figures[0])


def test_one_hiccup_raises_the_average_fourfold_at_most() -> None:
    estimate, _ = _learned(0.2, 60.0)
    assert estimate.ewma_s == pytest.approx(0.8)
    estimate.add(60.0)
    assert estimate.ewma_s == pytest.approx(3.2)


def test_an_old_figure_goes_to_the_typical_one() -> None:
    estimate, clock = _learned(2.0)
    assert estimate.expected_s(0.2, clock()) == pytest.approx(2.0)
    assert estimate.expected_s(0.2, clock() + TAU_S) == pytest.approx(0.2 + 1.8 / math.e)
    assert estimate.expected_s(0.2, clock() + 1e6) == pytest.approx(0.2)
    assert estimate.ewma_s == pytest.approx(2.0), "what was learned is not touched"


def test_a_wait_that_was_given_up_counts_from_the_median_on() -> None:
    estimate, _ = _learned(0.2)
    assert not estimate.add_at_least(0.1)
    assert estimate.num_samples == 1
    assert estimate.add_at_least(0.5)
    assert estimate.ewma_s == pytest.approx(0.5)


def test_a_wait_that_was_given_up_never_lowers_the_average() -> None:
    estimate, clock = _learned(*[0.2] * 19, 0.8)
    clock.now_s += TAU_S
    assert estimate.add_at_least(0.5)
    assert estimate.ewma_s == pytest.approx(0.8)
    assert estimate.quantile(0.95) == pytest.approx(0.5), "it is among the samples"


def test_a_wait_that_was_given_up_is_no_first_sample() -> None:
    estimate = LatencyEstimate(clock=HandClock())
    # a client that leaves early says nothing of a server that nobody knows
    assert not estimate.add_at_least(0.5)
    assert estimate.ewma_s is None


def test_samples_are_forgotten_by_age() -> None:
    estimate, clock = _learned(*[1.0] * 30)
    clock.now_s += 1000
    for _ in range(25):
        estimate.add(2.0)
    assert estimate.quantile(0.1) == 1.0
    clock.now_s += 1000
    assert estimate.quantile(0.1) == 2.0
    clock.now_s += 1000
    assert estimate.quantile(0.1) is None


def test_zero_seconds_do_not_stop_the_average_from_rising() -> None:
    estimate, _ = _learned(0.0, *[1.0] * 12)
    assert estimate.ewma_s == pytest.approx(1.0)


@given(
    st.integers(0, 1000),
    st.sampled_from([1, 19, 20, 255, 256, 257, 600]),
    st.sampled_from([-0.1, 0.0, 0.1]),
    st.sampled_from([0.01, 0.5, 0.9, 0.95, 1.0]),
)
def test_quantiles_are_those_of_the_last_256_samples(
    seed: int, count: int, trend: float, share: float
) -> None:
    rng = random.Random(seed)
    # equal ones are among them; where they rise or fall, what is kept too long is seen
    samples = [round(rng.uniform(1, 3), 1) + trend * (number // 100) for number in range(count)]
    estimate, _ = _learned(*samples, gap_s=0.001)
    window = sorted(samples[-256:])
    found = estimate.quantile(share)
    if len(window) < 20:
        assert found is None
    else:
        assert found is not None
        assert sum(sample <= found for sample in window) >= share * len(window)
        assert sum(sample < found for sample in window) < share * len(window)


@given(st.lists(st.tuples(st.floats(0.001, 100), st.floats(0, 60)), min_size=1))
def test_the_average_stays_among_the_samples(steps: list[tuple[float, float]]) -> None:
    clock = HandClock()
    estimate = LatencyEstimate(clock=clock)
    samples = []
    for seconds, pause_s in steps:
        clock.now_s += pause_s
        estimate.add(seconds)
        samples.append(seconds)
        assert estimate.ewma_s is not None
        assert min(samples) * 0.999 <= estimate.ewma_s <= max(samples) * 1.001
