"""Computes the live page's figures from the latest requests: exact quantiles, rates, shares."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.gateway.http.dashboard.recent import ENDINGS, WINDOW_S, RecentRows
from outrider.gateway.http.dashboard.schema import (
    ClassFigures,
    Latencies,
    Quantiles,
    QuantileSeries,
    RequestFigures,
    Series,
    TierFigures,
)
from outrider.gateway.settings.slo import SloClassSettings

CELL_S: Final = 5.0
_NUM_CELLS: Final = round(WINDOW_S / CELL_S)
_QUANTILES: Final = (0.5, 0.95, 0.99)
_NANOS: Final = 1e9
_LATENCIES: Final = {
    "ttft_ms": "ttft_s",
    "inter_token_ms": "inter_token_s",
    "e2e_ms": "duration_s",
}
_ANSWERED: Final = ENDINGS.index("answered")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All figures about requests."""

    window_s: float
    requests: RequestFigures
    latency: Latencies
    tiers: list[TierFigures]
    classes: list[ClassFigures]
    series: Series


def figures(
    rows: RecentRows, classes: Mapping[str, SloClassSettings], *, shows_costs: bool
) -> Figures:
    """Compute figures from rows. `shows_costs`: our cost of tokens instead of the charge."""
    money = rows["cost_nanos" if shows_costs else "charge_nanos"]
    return Figures(
        window_s=rows.window_s,
        requests=_requests(rows, money),
        latency=Latencies(**{name: _quantiles(_values(rows, name)) for name in _LATENCIES}),
        tiers=_tiers(rows),
        classes=_classes(rows, classes),
        series=_series(rows, money),
    )


def _values(rows: RecentRows, name: str) -> NDArray[np.float64]:
    """Return a latency in ms; NaN where a request has none. Only answers have an end to end."""
    values = rows[_LATENCIES[name]] * 1000.0
    if name == "e2e_ms":
        values = np.where(rows["ending"] == _ANSWERED, values, np.nan)
    return values


def _requests(rows: RecentRows, money: NDArray[np.int64]) -> RequestFigures:
    counts = np.bincount(rows["ending"], minlength=len(ENDINGS))
    by_ending = {f"num_{ending}": int(n) for ending, n in zip(ENDINGS, counts, strict=True)}
    over_s = rows.window_s
    return RequestFigures(
        num=len(rows),
        per_s=len(rows) / over_s,
        tokens_per_s=float(rows["num_tokens"].sum()) / over_s,
        goodput=int((rows["attained"] == 1).sum()) / over_s,
        cost_usd_per_s=float(money.sum()) / _NANOS / over_s,
        **by_ending,
    )


def _quantiles(values: NDArray[np.float64]) -> Quantiles:
    finite = np.sort(values[np.isfinite(values)])
    if not len(finite):
        return Quantiles(num=0, p50=None, p95=None, p99=None)
    p50, p95, p99 = (float(finite[_rank(q, len(finite))]) for q in _QUANTILES)
    return Quantiles(num=len(finite), p50=p50, p95=p95, p99=p99)


def _rank(quantile: float, num: int) -> int:
    """Return the index of the quantile among `num` sorted values: the nearest rank."""
    return max(0, int(np.ceil(quantile * num)) - 1)


def _tiers(rows: RecentRows) -> list[TierFigures]:
    """Return the tiers that answered, most often first."""
    answered = rows["tier"][rows["ending"] == _ANSWERED]
    counts = np.bincount(answered, minlength=len(rows.tiers))
    shares = [
        TierFigures(name=name, num=int(num), share=int(num) / len(answered))
        for name, num in zip(rows.tiers, counts, strict=True)
        if num
    ]
    return sorted(shares, key=lambda tier: -tier.num)


def _classes(rows: RecentRows, classes: Mapping[str, SloClassSettings]) -> list[ClassFigures]:
    """Return every class of the settings, and requests without a class, if any."""
    counted = rows["attained"] >= 0
    length = len(rows.classes)
    nums = np.bincount(rows["slo_class"][counted], minlength=length)
    attained = np.bincount(rows["slo_class"][rows["attained"] == 1], minlength=length)
    seen = {
        name: (int(num), int(good))
        for name, num, good in zip(rows.classes, nums, attained, strict=True)
    }
    names = [*classes, *(name for name in seen if name not in classes and seen[name][0])]
    found = []
    for name in names:
        num, good = seen.get(name, (0, 0))
        settings = classes.get(name, SloClassSettings())
        found.append(
            ClassFigures(
                name=name,
                num=num,
                num_attained=good,
                attainment=good / num if num else None,
                goodput=good / rows.window_s,
                ttft_ms=settings.ttft_ms or None,
                inter_token_ms=settings.inter_token_ms or None,
            )
        )
    return found


def _series(rows: RecentRows, money: NDArray[np.int64]) -> Series:
    """Return cells that begin at whole multiples of `CELL_S`, so that past cells do not change."""
    newest = int(rows.now_s // CELL_S)
    cells = (rows["at_s"] // CELL_S).astype(np.int64) - (newest - _NUM_CELLS + 1)
    is_inside = cells >= 0
    lasted_s = np.full(_NUM_CELLS, CELL_S)
    lasted_s[-1] = max(rows.now_s - newest * CELL_S, 0.5)

    def rates(weights: NDArray[np.float64] | NDArray[np.int64]) -> list[float]:
        sums = np.bincount(cells[is_inside], weights=weights[is_inside], minlength=_NUM_CELLS)
        return [float(rate) for rate in sums / lasted_s]

    def quantiles(name: str) -> QuantileSeries:
        return _quantile_series(_values(rows, name)[is_inside], cells[is_inside])

    ends_s = (np.arange(_NUM_CELLS) - _NUM_CELLS + 1 + newest + 1) * CELL_S
    return Series(
        cell_s=CELL_S,
        age_s=[round(float(age_s), 3) for age_s in rows.now_s - ends_s],
        ttft_ms=quantiles("ttft_ms"),
        inter_token_ms=quantiles("inter_token_ms"),
        e2e_ms=quantiles("e2e_ms"),
        requests_per_s=rates(np.ones(len(rows))),
        goodput=rates((rows["attained"] == 1).astype(np.float64)),
        tokens_per_s=rates(rows["num_tokens"]),
        cost_usd_per_s=rates(money / _NANOS),
    )


def _quantile_series(values: NDArray[np.float64], cells: NDArray[np.int64]) -> QuantileSeries:
    is_finite = np.isfinite(values)
    values, cells = values[is_finite], cells[is_finite]
    order = np.lexsort((values, cells))
    values = values[order]
    counts = np.bincount(cells, minlength=_NUM_CELLS)
    starts = np.cumsum(counts) - counts
    p50, p95, p99 = (
        [
            float(values[start + _rank(quantile, num)]) if num else None
            for start, num in zip(starts.tolist(), counts.tolist(), strict=True)
        ]
        for quantile in _QUANTILES
    )
    return QuantileSeries(p50=p50, p95=p95, p99=p99)
