"""Samples of two runs, drawn again and again: how sure a figure is.

A circular block bootstrap (Politis and Romano, 1992) over requests in the order of their times:
neighbours share a queue, so they are drawn together, in blocks of about the cube root of their
number (Hall, Horowitz and Jing, 1995). Requests are drawn, each with all of its gaps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.gateway.tools.measuring.bench.results import BenchResult, RequestRow

Samples = NDArray[np.float64]
Indexes = NDArray[np.int64]
Statistic = Callable[["Side", Indexes], Samples]
"""A figure of each resample: [num_resamples] for indexes [num_resamples, num_requests]."""

_MAX_CELLS: Final = 4_000_000
_MAX_GAPS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The requests of one run, in order; NaN for a missing figure.

    Latencies are milliseconds. `gaps` are sorted; `gap_owners` holds the index of each gap's
    request. `per_request_s`: time of the run over its requests. `num_in_flight`: the mean of a
    closed loop, 0 for an open one.
    """

    latencies: Mapping[str, Samples]
    attained: Samples
    failed: Samples
    tokens: Samples
    drafted: Samples
    accepted: Samples
    gaps: Samples
    gap_owners: Indexes
    per_request_s: float
    num_in_flight: float

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
