"""95 % intervals of means, quantiles and shares."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.gateway.tools.measuring.bench.results import IntervalEstimate, Quantities, rounded

_Floats = NDArray[np.float64]

_TAIL: Final = 0.025
_Z: Final = 1.959963984540054  # the normal quantile at 1 - _TAIL
_NUM_RESAMPLES: Final = 1000
_MOST_DRAWS: Final = 2_000_000  # held at a time


def bootstrap_mean(samples: _Floats, rng: np.random.Generator) -> IntervalEstimate:
    """The mean with a percentile bootstrap interval (Efron 1979).

    Samples [n] have to be independent. One sample has no interval. Raises ValueError for none.
    """
    if samples.size == 0:
        raise ValueError("no samples, so no mean")
    ones = np.ones_like(samples)
    return bootstrap_ratio(samples, ones, rng)


def bootstrap_ratio(sums: _Floats, counts: _Floats, rng: np.random.Generator) -> IntervalEstimate:
    """The mean of samples that come in clusters, such as the gaps of one answer.

    `sums` and `counts` [n]: of each cluster. Whole clusters are drawn, since what is within one is
    not independent. Raises ValueError where there is nothing.
    """
    if sums.size == 0 or counts.sum() == 0:
        raise ValueError("no samples, so no mean")
    value = rounded(float(sums.sum() / counts.sum()))
    if sums.size == 1:
        return IntervalEstimate(value=value)
    means = []
    batch = max(1, _MOST_DRAWS // sums.size)
    for start in range(0, _NUM_RESAMPLES, batch):
        num_resamples = min(batch, _NUM_RESAMPLES - start)
        drawn = rng.integers(0, sums.size, size=(num_resamples, sums.size))
        totals = counts[drawn].sum(axis=1)
        means.append(sums[drawn].sum(axis=1)[totals > 0] / totals[totals > 0])
    low, high = np.quantile(np.concatenate(means), (_TAIL, 1.0 - _TAIL))
    return IntervalEstimate(value=value, low=rounded(float(low)), high=rounded(float(high)))


def quantile_estimate(ordered: _Floats, quantile: float) -> IntervalEstimate:
    """A quantile with the interval of its order statistics (Conover 1999, section 3.2).

    `ordered` [n]: independent samples in ascending order. It assumes no distribution; a bound is
    None where even the extreme samples do not reach it (p99 wants several hundred samples).
    Raises ValueError for no samples or a quantile outside (0, 1).
    """
    if ordered.size == 0 or not 0.0 < quantile < 1.0:
        raise ValueError(f"no quantile {quantile} of {ordered.size} samples")
    value = rounded(float(np.quantile(ordered, quantile)))
    low_rank, high_rank = _ranks(ordered.size, quantile)
    return IntervalEstimate(
        value=value,
        low=None if low_rank < 1 else rounded(float(ordered[low_rank - 1])),
        high=None if high_rank > ordered.size else rounded(float(ordered[high_rank - 1])),
    )


def _ranks(num_samples: int, quantile: float) -> tuple[int, int]:
    """The ranks (from 1) between which the quantile lies with 95 %; 0 and n + 1 are none.

    The number of samples below the quantile is binomial.
    """
    counts = np.arange(num_samples + 1)
    log_factorials = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, num_samples + 1)))))
    log_choose = log_factorials[-1] - log_factorials - log_factorials[::-1]
    log_mass = log_choose + counts * math.log(quantile)
    log_mass += (num_samples - counts) * math.log1p(-quantile)
    below = np.cumsum(np.exp(log_mass))  # [n + 1]: at most so many samples are below
    low_rank = int(np.searchsorted(below, _TAIL, side="right"))
    high_rank = int(np.searchsorted(below, 1.0 - _TAIL, side="left")) + 1
    return low_rank, high_rank


def proportion_estimate(num_hits: int, num_trials: int) -> IntervalEstimate:
    """A share with Wilson's score interval (1927). Raises ValueError for no trials."""
    if num_trials < 1 or not 0 <= num_hits <= num_trials:
        raise ValueError(f"no share of {num_hits} in {num_trials}")
    share = num_hits / num_trials
    spread = _Z * _Z / num_trials
    center = (share + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(share * (1 - share) / num_trials + spread / 4 / num_trials)
    low = 0.0 if num_hits == 0 else max(0.0, center - half)
    high = 1.0 if num_hits == num_trials else min(1.0, center + half)
    return IntervalEstimate(value=rounded(share), low=rounded(low), high=rounded(high))


def quantities(samples: Sequence[float], rng: np.random.Generator) -> Quantities | None:
    """A distribution of independent samples; None for none."""
    if not samples:
        return None
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    return Quantities(
        num_samples=ordered.size,
        mean=bootstrap_mean(ordered, rng),
        p50=quantile_estimate(ordered, 0.5),
        p90=quantile_estimate(ordered, 0.9),
        p95=quantile_estimate(ordered, 0.95),
        p99=quantile_estimate(ordered, 0.99),
        minimum=rounded(float(ordered[0])),
        maximum=rounded(float(ordered[-1])),
    )


def clustered_quantities(
    clusters: Sequence[Sequence[float]], rng: np.random.Generator
) -> Quantities | None:
    """A distribution of samples in clusters; None for none.

    The quantiles have no intervals: those of independent samples would be too narrow.
    """
    arrays = [np.asarray(cluster, dtype=np.float64) for cluster in clusters if cluster]
    if not arrays:
        return None
    samples = np.concatenate(arrays)
    sums = np.asarray([array.sum() for array in arrays])
    counts = np.asarray([array.size for array in arrays], dtype=np.float64)
    p50, p90, p95, p99 = np.quantile(samples, (0.5, 0.9, 0.95, 0.99))
    return Quantities(
        num_samples=samples.size,
        mean=bootstrap_ratio(sums, counts, rng),
        p50=IntervalEstimate(value=rounded(float(p50))),
        p90=IntervalEstimate(value=rounded(float(p90))),
        p95=IntervalEstimate(value=rounded(float(p95))),
        p99=IntervalEstimate(value=rounded(float(p99))),
        minimum=rounded(float(samples.min())),
        maximum=rounded(float(samples.max())),
    )
