import numpy as np
import pytest

from benchmarks.shared.intervals import bootstrap, ratio_of_percentiles, ratio_of_rates


def test_the_interval_of_a_mean_is_the_normal_one() -> None:
    samples = np.random.default_rng(1).normal(5.0, 2.0, size=400)
    interval = bootstrap(lambda units: float(samples[units].mean()), 400)
    half = 1.96 * samples.std() / 20
    assert interval.estimate == pytest.approx(samples.mean())
    assert interval.low == pytest.approx(samples.mean() - half, abs=0.05)
    assert interval.high == pytest.approx(samples.mean() + half, abs=0.05)


@pytest.mark.slow
def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(2)
    hits = 0
    for _ in range(50):
        # 20 pairs whose second side takes 1.1 times as long, on a machine that is slow at times.
        machine = generator.uniform(1.0, 3.0, size=20)
        one, other = (machine * generator.lognormal(0.0, 0.05, size=20) for _ in range(2))
        interval = ratio_of_rates(([1.0] * 20, [1.0] * 20), (one.tolist(), (1.1 * other).tolist()))
        hits += interval.low <= 1.1 <= interval.high
    assert 42 <= hits <= 50


def test_a_rate_is_total_over_total() -> None:
    interval = ratio_of_rates(([10, 30], [10, 30]), ([1, 9], [2, 18]))
    assert interval.estimate == pytest.approx(2.0)
    assert (interval.low, interval.high) == (pytest.approx(2.0), pytest.approx(2.0))
    uneven = ratio_of_rates(([10, 30], [10, 10]), ([1, 9], [1, 1]))
    assert uneven.estimate == pytest.approx(4.0 / 10.0)


def test_percentiles_are_taken_over_all_samples_of_the_units() -> None:
    above = [[1.0, 2.0, 3.0], [4.0, 100.0]]
    below = [[2.0], [2.0]]
    assert ratio_of_percentiles(above, below, 50).estimate == pytest.approx(1.5)
    # Units without a sample are no reason to fail while others have some.
    assert ratio_of_percentiles([[], [3.0]], [[1.5], []], 50).estimate == pytest.approx(2.0)


def test_the_same_samples_give_the_same_interval() -> None:
    samples = ([3.0, 4.0, 5.0], [2.0, 2.0, 2.0])
    seconds = ([1.0, 1.1, 0.9], [1.0, 1.3, 1.0])
    assert ratio_of_rates(samples, seconds) == ratio_of_rates(samples, seconds)


def test_unequal_or_absent_units_are_refused() -> None:
    with pytest.raises(ValueError, match="unequal"):
        ratio_of_rates(([1.0], [1.0, 2.0]), ([1.0], [1.0, 2.0]))
    with pytest.raises(ValueError, match="no units"):
        ratio_of_rates(([], []), ([], []))
    with pytest.raises(ValueError, match="no samples"):
        ratio_of_percentiles([[]], [[1.0]], 50)
    with pytest.raises(ValueError, match="1 units over 2"):
        ratio_of_percentiles([[1.0]], [[1.0], [2.0]], 50)
