"""Quantiles of sketches against the values themselves."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.experiments.sketch import MAX_BINS, RELATIVE_ACCURACY, QuantileSketch

_LATENCIES = st.lists(st.floats(min_value=1e-6, max_value=1e5), min_size=1, max_size=300)


def _sketch(values: list[float]) -> QuantileSketch:
    sketch = QuantileSketch()
    sketch.extend(values)
    return sketch


@given(values=_LATENCIES, q=st.floats(min_value=0.0, max_value=1.0))
def test_a_quantile_is_within_its_relative_accuracy(values: list[float], q: float) -> None:
    true = sorted(values)[max(1, math.ceil(q * len(values))) - 1]
    told = _sketch(values).quantile(q)
    assert abs(told - true) <= RELATIVE_ACCURACY * true * (1 + 1e-9)


@given(one=_LATENCIES, two=_LATENCIES)
def test_merged_is_as_if_one_had_counted_all(one: list[float], two: list[float]) -> None:
    merged = _sketch(one).merged(_sketch(two))
    together = _sketch(one + two)
    assert merged.bins == together.bins
    assert merged.count == len(one) + len(two)


@given(values=_LATENCIES, zeros=st.integers(min_value=0, max_value=5))
def test_edges_and_cdf_surely_hold_the_values(values: list[float], zeros: int) -> None:
    values = values + [0.0] * zeros
    sketch = _sketch(values)
    lower, upper, cumulative = sketch.cdf()
    assert cumulative[-1] == len(values)
    for low, high, count in zip(lower, upper, cumulative, strict=True):
        assert sum(value <= high * (1 + 1e-12) for value in values) == count
        assert low < high or high == 0.0
    for rank, true in enumerate(sorted(values), start=1):
        low, high = sketch.edges_at_rank(rank)
        assert low * (1 - 1e-12) <= true <= high * (1 + 1e-12)


def test_many_lognormal_values() -> None:
    values = np.random.default_rng(7).lognormal(-2.0, 1.0, 100_000)
    sketch = _sketch(values.tolist())
    assert len(sketch.bins) < 600
    for q in (0.01, 0.5, 0.95, 0.99, 0.999):
        true = float(np.quantile(values, q, method="inverted_cdf"))
        assert sketch.quantile(q) == pytest.approx(true, rel=RELATIVE_ACCURACY)


def test_bins_are_bounded_and_high_quantiles_stay_exact() -> None:
    gamma = (1 + RELATIVE_ACCURACY) / (1 - RELATIVE_ACCURACY)
    sketch = QuantileSketch()
    for index in range(-500, MAX_BINS + 500):
        sketch.add(gamma**index * 0.999)
    assert len(sketch.bins) == MAX_BINS
    assert sketch.count == MAX_BINS + 1000
    top = gamma ** (MAX_BINS + 499) * 0.999
    assert sketch.quantile(1.0) == pytest.approx(top, rel=RELATIVE_ACCURACY)


def test_zeros_and_nothing() -> None:
    assert math.isnan(QuantileSketch().quantile(0.5))
    assert QuantileSketch().count == 0
    zeros = _sketch([0.0, 0.0])
    assert (zeros.quantile(0.9), zeros.edges_at_rank(2)) == (0.0, (0.0, 0.0))
    mixed = _sketch([0.0, 1.0])
    assert mixed.quantile(0.5) == 0.0
    assert mixed.quantile(0.51) == pytest.approx(1.0, rel=RELATIVE_ACCURACY)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf])
def test_invalid_latencies_are_refused(value: float) -> None:
    sketch = QuantileSketch()
    with pytest.raises(ValueError, match=r"counted|bin"):
        sketch.add(value)
    assert sketch.count == 0


def test_counts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        QuantileSketch({3: 0})
    with pytest.raises(ValueError, match="share from 0 to 1"):
        _sketch([1.0]).quantile(1.5)
