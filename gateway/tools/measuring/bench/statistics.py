"""How sure a figure of a run is: 95 % intervals of means, quantiles, shares and differences.

Within one run requests, and answers with all of their gaps, are drawn again independently. For two
runs it is a circular block bootstrap (Politis and Romano, 1992) over requests in the order of their
times: neighbours share a queue, so they are drawn together, in blocks of about the cube root of
their number (Hall, Horowitz and Jing, 1995).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.gateway.tools.measuring.bench.results import (
    BenchResult,
    IntervalEstimate,
    Quantities,
    RequestRow,
    rounded,
)

Samples = NDArray[np.float64]
Indexes = NDArray[np.int64]
Statistic = Callable[["Side", Indexes], Samples]
"""A figure of each resample: [num_resamples] for indexes [num_resamples, num_requests]."""

NUM_RESAMPLES: Final = 1000
_TAIL: Final = 0.025
_Z: Final = 1.959963984540054  # the normal quantile at 1 - _TAIL
_MAX_CELLS: Final = 2_000_000
_MAX_GAPS: Final = 100_000


# ---- intervals of one run ------------------------------------------------------------------------


def bootstrap_mean(samples: Samples, rng: np.random.Generator) -> IntervalEstimate:
    """The mean with a percentile bootstrap interval (Efron 1979).

    Samples [n] have to be independent. One sample has no interval. Raises ValueError for none.
    """
    if samples.size == 0:
        raise ValueError("no samples, so no mean")
    ones = np.ones_like(samples)
    return bootstrap_ratio(samples, ones, rng)


def bootstrap_ratio(sums: Samples, counts: Samples, rng: np.random.Generator) -> IntervalEstimate:
    """The mean of samples that come in clusters, such as the gaps of one answer.

    `sums` and `counts` [n]: of each cluster. Whole clusters are drawn, since what is within one is
    not independent. Raises ValueError where there is nothing.
    """
    if sums.size == 0 or counts.sum() == 0:
        raise ValueError("no samples, so no mean")
    value = rounded(float(sums.sum() / counts.sum()))
    if sums.size == 1:
        return IntervalEstimate(value=value)
    parts = []
    batch = max(1, _MAX_CELLS // sums.size)
    for start in range(0, NUM_RESAMPLES, batch):
        num_resamples = min(batch, NUM_RESAMPLES - start)
        draws = rng.integers(0, sums.size, size=(num_resamples, sums.size))
        parts.append(ratio_of(sums, counts, draws))
    return percentile_estimate(value, np.concatenate(parts))


def percentile_estimate(value: float, drawn: Samples | None) -> IntervalEstimate:
    """A figure with the interval of its resamples; without one where half of them have none."""
    if drawn is not None:
        drawn = drawn[np.isfinite(drawn)]
    if drawn is None or drawn.size < NUM_RESAMPLES // 2:
        return IntervalEstimate(value=rounded(value))
    low, high = np.quantile(drawn, (_TAIL, 1.0 - _TAIL))
    return IntervalEstimate(
        value=rounded(value), low=rounded(float(low)), high=rounded(float(high))
    )


def quantile_estimate(ordered: Samples, quantile: float) -> IntervalEstimate:
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


def share_difference(first: float, second: float, nums: Sequence[int]) -> IntervalEstimate:
    """Newcombe's interval: where all requests fared alike, drawing them again tells nothing."""
    sides = [
        proportion_estimate(round(share * num), num)
        for share, num in zip((first, second), nums, strict=True)
    ]
    (low_1, high_1), (low_2, high_2) = ((e.low or 0.0, e.high or 0.0) for e in sides)
    difference = second - first
    return IntervalEstimate(
        value=rounded(difference),
        low=rounded(difference - math.hypot(second - low_2, high_1 - first)),
        high=rounded(difference + math.hypot(high_2 - second, first - low_1)),
    )


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


# ---- two runs, drawn again and again ------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The requests of one run, in order; NaN for a missing figure."""

    latencies: Mapping[str, Samples]
    """Milliseconds."""
    attained: Samples
    failed: Samples
    tokens: Samples
    drafted: Samples
    accepted: Samples
    gaps: Samples
    """Sorted."""
    gap_owners: Indexes
    """The index of each gap's request."""
    per_request_s: float
    """Time of the run over its requests."""
    num_in_flight: float
    """The mean of a closed loop, 0 for an open one."""

    @property
    def num_requests(self) -> int:
        """Failed ones included."""
        return int(self.failed.size)


def side_of(result: BenchResult, rows: Sequence[RequestRow]) -> Side:
    """The samples of these rows of a run, in their order."""

    def values(get: Callable[[RequestRow], float | None]) -> Samples:
        # A failed request has no latency, however soon it failed.
        found = [get(row) if row.is_success else None for row in rows]
        return np.array([np.nan if one is None else one for one in found], dtype=np.float64)

    gaps = [(gap, owner) for owner, row in enumerate(rows) if row.is_success for gap in row.gaps_ms]
    gaps.sort()
    if len(gaps) > _MAX_GAPS:
        gaps = gaps[:: -(-len(gaps) // _MAX_GAPS)]
    e2e_s = sum(row.e2e_ms for row in rows) / 1e3
    duration_s = max(result.summary.duration_s, 1e-9)
    return Side(
        latencies={
            "ttft": values(lambda row: row.ttft_ms),
            "tpot": values(lambda row: row.tpot_ms),
            "e2e": values(lambda row: row.e2e_ms),
        },
        attained=np.array([row.attains(result.objectives) for row in rows], dtype=np.float64),
        failed=np.array([not row.is_success for row in rows], dtype=np.float64),
        tokens=np.array([row.num_completion_tokens for row in rows], dtype=np.float64),
        drafted=np.array([row.num_drafted_tokens or 0 for row in rows], dtype=np.float64),
        accepted=np.array([row.num_accepted_tokens or 0 for row in rows], dtype=np.float64),
        gaps=np.array([gap for gap, _ in gaps], dtype=np.float64),
        gap_owners=np.array([owner for _, owner in gaps], dtype=np.int64),
        per_request_s=duration_s / len(rows),
        num_in_flight=e2e_s / duration_s if result.meta.loop == "closed" else 0.0,
    )


def block_indexes(num: int, num_resamples: int, rng: np.random.Generator) -> Indexes:
    """Circular blocks of about num ** (1/3) neighbours, joined to samples of `num`.

    Returns [num_resamples, num].
    """
    length = max(1, round(num ** (1 / 3)))
    num_blocks = -(-num // length)
    starts = rng.integers(0, num, size=(num_resamples, num_blocks))
    blocks = (starts[:, :, None] + np.arange(length)) % num  # [num_resamples, num_blocks, length]
    return blocks.reshape(num_resamples, -1)[:, :num].astype(np.int64)


# ---- statistics ----------------------------------------------------------------------------------


def _in_parts(work: Callable[[Indexes], Samples], draws: Indexes) -> Samples:
    """The same for all resamples, so many at a time that memory stays small."""
    rows = max(1, _MAX_CELLS // max(draws.shape[1], 1))
    parts = [work(draws[start : start + rows]) for start in range(0, draws.shape[0], rows)]
    return np.concatenate(parts)


def mean_of(name: str) -> Statistic:
    """Return the mean of the latency of that name."""

    def statistic(side: Side, draws: Indexes) -> Samples:
        values = side.latencies[name]
        known = np.isfinite(values)
        return ratio_of(np.where(known, values, 0.0), known.astype(np.float64), draws)

    return statistic


def quantile_of(name: str, share: float) -> Statistic:
    """Return a quantile of the latency of that name, linear between the nearest ranks."""

    def statistic(side: Side, draws: Indexes) -> Samples:
        values = side.latencies[name]

        def work(part: Indexes) -> Samples:
            drawn = np.sort(values[part], axis=1)  # [num_resamples, num], NaN last
            known = np.isfinite(drawn).sum(axis=1)
            rank = np.maximum(known - 1, 0) * share
            low = rank.astype(np.int64)
            high = np.minimum(low + 1, np.maximum(known - 1, 0))
            rows = np.arange(part.shape[0])
            below, above = drawn[rows, low], drawn[rows, high]
            found: Samples = below + (above - below) * (rank - low)
            return found

        return _in_parts(work, draws)

    return statistic


def gap_quantile(share: float) -> Statistic:
    """Return a quantile of all gaps between events."""

    def statistic(side: Side, draws: Indexes) -> Samples:
        if not side.gaps.size:
            return np.full(draws.shape[0], np.nan)
        found = np.empty(draws.shape[0])
        for row, drawn in enumerate(draws):
            counts = np.bincount(drawn, minlength=side.num_requests)
            sums = np.cumsum(counts[side.gap_owners])
            at = np.searchsorted(sums, share * sums[-1])
            found[row] = side.gaps[min(int(at), side.gaps.size - 1)]
        return found

    return statistic


def ratio_of(above: Samples, below: Samples, draws: Indexes) -> Samples:
    """Sum over sum of each resample; NaN where there is nothing below."""

    def work(part: Indexes) -> Samples:
        sums = below[part].sum(axis=1)
        found: Samples = np.divide(
            above[part].sum(axis=1), sums, out=np.full(sums.shape, np.nan), where=sums > 0
        )
        return found

    return _in_parts(work, draws)


def share_attained(side: Side, draws: Indexes) -> Samples:
    """Requests that met their objectives, of all."""
    return ratio_of(side.attained, np.ones_like(side.attained), draws)


def share_failed(side: Side, draws: Indexes) -> Samples:
    """Requests without a whole answer, of all."""
    return ratio_of(side.failed, np.ones_like(side.failed), draws)


def acceptance(side: Side, draws: Indexes) -> Samples:
    """Accepted tokens, of all drafted ones."""
    return ratio_of(side.accepted, side.drafted, draws)


def goodput(side: Side, draws: Indexes) -> Samples:
    """Requests per second that met their objectives."""
    return _rate(side, side.attained, draws)


def token_rate(side: Side, draws: Indexes) -> Samples:
    """Tokens of answers per second."""
    return _rate(side, side.tokens, draws)


def _rate(side: Side, amounts: Samples, draws: Indexes) -> Samples:
    """Amounts per second. An open loop's time does not depend on the answers; a closed loop's does:
    by Little's law it is the sum of their times over the mean number in flight."""
    e2e_s = side.latencies["e2e"] / 1e3
    if side.num_in_flight and np.isfinite(e2e_s).all():
        return ratio_of(amounts, e2e_s / side.num_in_flight, draws)
    return ratio_of(amounts, np.full_like(amounts, side.per_request_s), draws)
