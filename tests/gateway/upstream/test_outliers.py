"""Outliers: replicas far slower than the others, and those that only has more to do."""

import pytest

from outrider.gateway.upstream.outliers import NUM_RECENT, RecentTimes, low_median, outliers


def _times(seconds: float, *, load: int = 1, count: int = NUM_RECENT) -> RecentTimes:
    recent = RecentTimes()
    for _ in range(count):
        recent.add(seconds, load)
    return recent


def test_a_few_peaks_do_not_move_the_medians() -> None:
    recent = _times(0.2, load=2, count=19)
    assert not recent.is_full
    assert recent.seconds is None
    assert recent.per_load_s is None
    recent.add(60.0, 2)
    assert recent.seconds == pytest.approx(0.2)
    assert recent.per_load_s == pytest.approx(0.1)
    for _ in range(11):
        recent.add(5.0, 5)
    assert recent.seconds == pytest.approx(5.0)
    assert recent.per_load_s == pytest.approx(1.0)
    recent.clear()
    assert not recent.is_full


def test_the_slowest_is_named_first() -> None:
    times = [_times(0.7), _times(0.2), _times(0.9), _times(0.2), _times(0.2)]
    assert outliers(times) == [2, 0]


def test_a_queue_of_our_own_making_makes_no_outlier() -> None:
    one_after_the_other = [_times(0.8, load=8), _times(0.1), _times(0.1)]
    assert outliers(one_after_the_other) == []


def test_an_idle_server_among_batching_ones_is_no_outlier() -> None:
    batching = [_times(0.3), _times(0.3, load=10), _times(0.3, load=10)]
    assert outliers(batching) == []


@pytest.mark.parametrize("slow_load", [1, 2, 5])
def test_a_slow_server_is_an_outlier_under_the_load_that_it_still_gets(slow_load: int) -> None:
    times = [_times(0.2, load=5), _times(4.0, load=slow_load), _times(0.2, load=5)]
    assert outliers(times) == [1]


@pytest.mark.parametrize(
    "times",
    [
        [],
        [_times(9.0)],
        [_times(9.0), _times(0.1, count=19)],
        [_times(9.0, count=19), _times(0.1)],
        [_times(0.59), _times(0.2)],
        [_times(0.09), _times(0.01)],
    ],
)
def test_normal_latencies_are_no_outliers(times: list[RecentTimes]) -> None:
    assert outliers(times) == []


def test_the_lower_median() -> None:
    assert low_median([3.0, 1.0, 2.0]) == 2.0
    assert low_median([4.0, 1.0, 2.0, 3.0]) == 2.0
    assert low_median([5.0]) == 5.0
