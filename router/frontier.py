"""Answerers on the plane of cost and accuracy: single models, chance, oracle, a router's settings.

Two scores of the field compare them there. RouterBench (Hu et al., 2024) has AIQ, the average
improvement in quality: the mean height of a router's non-decreasing convex hull between the costs
of the cheapest and the dearest model. RouterArena (Lu et al., 2025) has one number for a setting:
the weighted harmonic mean of its accuracy and its cost on a logarithmic scale, where a thousand
requests cost between 0.0044 and 200 USD.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.router.calibration import (
    ALWAYS_LARGE,
    OperatingPoint,
    Prices,
    StageRows,
    measure,
    request_costs,
    request_seconds,
)
from outrider.router.features import FloatRows
from outrider.router.rows import best_answers

_ARENA_BETA: Final = 0.1
_ARENA_USD: Final = (0.0044, 200.0)  # of a thousand requests
_NUM_SHARES: Final = 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Answerer:
    """One way of choosing who answers. Costs and times are None where data or prices lack them."""

    accuracy: float
    strong_share: float
    cost_usd: float | None = None
    """Mean of a request."""
    p50_s: float | None = None
    p95_s: float | None = None

    @property
    def arena_score(self) -> float | None:
        """RouterArena's score; None without costs."""
        return None if self.cost_usd is None else arena_score(self.accuracy, self.cost_usd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The answerers that bound a router, and its settings by rising strong share."""

    small: Answerer
    large: Answerer
    oracle: Answerer
    random: tuple[Answerer, ...]
    """A coin decides, for shares of the large model from 0 to 1."""
    setting: Answerer
    settings: tuple[Answerer, ...]
    singles: Mapping[str, Answerer]
    """Every tier alone, by rising cost."""

    @property
    def coin(self) -> Answerer:
        """A fair coin."""
        return self.random[len(self.random) // 2]

    def aiq(self, answerers: Sequence[Answerer]) -> float | None:
        """AIQ of what chooses between these and the two models; None without costs."""
        points = [
            (one.cost_usd, one.accuracy)
            for one in (self.small, self.large, *answerers)
            if one.cost_usd is not None
        ]
        low, high = self.small.cost_usd, self.large.cost_usd
        if low is None or high is None or not low < high:
            return None
        return average_quality(points, low, high)


def frontier(
    rows: StageRows,
    points: Sequence[OperatingPoint],
    setting: OperatingPoint,
    prices: Prices | None,
) -> Frontier:
    """Measure every answerer on labelled prompts."""
    scales = _Scales(rows, prices)
    shares = np.linspace(0.0, 1.0, _NUM_SHARES).tolist()
    by_share = sorted(points, key=lambda point: point.strong_share)
    return Frontier(
        small=scales.at(0.0),
        large=scales.at(ALWAYS_LARGE),
        oracle=scales.oracle(),
        random=tuple(scales.random(share) for share in shares),
        setting=scales.at(setting.threshold, setting.band),
        settings=tuple(scales.at(point.threshold, point.band) for point in by_share),
        singles=scales.singles(),
    )


def average_quality(points: Sequence[tuple[float, float]], low: float, high: float) -> float:
    """The mean height of the non-decreasing convex hull of (cost, quality) from `low` to `high`."""
    hull: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if hull and point[1] <= hull[-1][1]:
            continue  # dearer and no better
        while len(hull) > 1 and _bends_up(hull[-2], hull[-1], point):
            hull.pop()
        if hull and hull[-1][0] == point[0]:
            hull.pop()
        hull.append(point)
    costs, heights = np.array(hull).T
    inside = costs[(costs > low) & (costs < high)]
    places = np.concatenate(([low], inside, [high]))
    return float(np.trapezoid(np.interp(places, costs, heights), places) / (high - low))


def arena_score(accuracy: float, cost_usd: float) -> float:
    """RouterArena's score of an accuracy at a mean cost of a request.

    Costs beyond the range that it was made for count as its ends.
    """
    least, most = _ARENA_USD
    usd = min(max(1000.0 * cost_usd, least), most)
    cheapness = math.log(most / usd) / math.log(most / least)
    together = _ARENA_BETA * accuracy + cheapness
    return (1.0 + _ARENA_BETA) * accuracy * cheapness / together if together else 0.0


def _bends_up(
    first: tuple[float, float], second: tuple[float, float], third: tuple[float, float]
) -> bool:
    """Return whether the middle point lies on or below the line between the others."""
    run, rise = third[0] - first[0], third[1] - first[1]
    return (second[1] - first[1]) * run <= rise * (second[0] - first[0])


class _Scales:
    """The data's columns of cost and time, as far as they and the prices tell."""

    def __init__(self, rows: StageRows, prices: Prices | None) -> None:
        self._rows = rows
        tokens = (rows.num_prompt_tokens, rows.num_weak_tokens, rows.num_strong_tokens)
        is_counted = all(counts is not None for counts in tokens)
        self._prices = prices if is_counted else None
        if rows.tiers is not None:
            self._prices = {}  # the data know what each answer costs
        times = (rows.weak_s, rows.strong_s, rows.num_weak_tokens)
        self._has_times = all(values is not None for values in times)

    def at(self, threshold: float, band: tuple[float, float] | None = None) -> Answerer:
        """A setting."""
        point = measure(self._rows, threshold, band)
        costs = self._costs(point)
        return _answerer(point.accuracy, point.strong_share, costs, self._seconds(point))

    def singles(self) -> dict[str, Answerer]:
        """Every tier alone."""
        tiers = self._rows.tiers
        if tiers is None:
            return {"small": self.at(0.0), "large": self.at(ALWAYS_LARGE)}
        return {
            name: _answerer(float(scores.mean()), share, usd, None)
            for name, scores, usd, share in zip(
                tiers.ladder.names, tiers.scores, tiers.usd, tiers.ladder.cost_shares, strict=True
            )
        }

    def oracle(self) -> Answerer:
        """The large model exactly where it is better; of more tiers the cheapest of the best."""
        tiers = self._rows.tiers
        if tiers is not None:
            scores, shares = best_answers(self._rows)
            best = tiers.scores.argmax(axis=0)
            usd = tiers.usd[best, np.arange(len(best))]
            return _answerer(float(scores.mean()), float(shares.mean()), usd, None)
        is_strong = self._rows.strong > self._rows.weak
        return self._mixed(is_strong.astype(np.float64))

    def random(self, share: float) -> Answerer:
        """The large model for a share of the prompts, by chance."""
        return self._mixed(np.full(len(self._rows.weak), share))

    def _mixed(self, share: FloatRows) -> Answerer:
        """The large model for each prompt with a probability, [num_prompts]."""
        ends = [measure(self._rows, threshold) for threshold in (0.0, ALWAYS_LARGE)]

        def mean(columns: list[FloatRows | None]) -> FloatRows | None:
            small, large = columns
            if small is None or large is None:
                return None
            return small + share * (large - small)

        scores = mean([self._rows.weak, self._rows.strong])
        seconds = [self._seconds(end) for end in ends]
        quantiles: tuple[float | None, float | None] = (None, None)
        if seconds[0] is not None and seconds[1] is not None:
            both, weights = np.concatenate((seconds[0], seconds[1])), np.append(1 - share, share)
            quantiles = (_quantile(both, weights, 0.5), _quantile(both, weights, 0.95))
        costs = mean([self._costs(end) for end in ends])
        return Answerer(
            accuracy=0.0 if scores is None else float(scores.mean()),
            strong_share=float(share.mean()),
            cost_usd=None if costs is None else float(costs.mean()),
            p50_s=quantiles[0],
            p95_s=quantiles[1],
        )

    def _costs(self, point: OperatingPoint) -> FloatRows | None:
        return None if self._prices is None else request_costs(self._rows, point, self._prices)

    def _seconds(self, point: OperatingPoint) -> FloatRows | None:
        return request_seconds(self._rows, point) if self._has_times else None


def _answerer(
    accuracy: float, share: float, costs: FloatRows | None, seconds: FloatRows | None
) -> Answerer:
    p50_s, p95_s = (None, None) if seconds is None else np.quantile(seconds, (0.5, 0.95)).tolist()
    return Answerer(
        accuracy=accuracy,
        strong_share=share,
        cost_usd=None if costs is None else float(costs.mean()),
        p50_s=p50_s,
        p95_s=p95_s,
    )


def _quantile(values: FloatRows, weights: NDArray[np.float64], share: float) -> float:
    """The value below which this share of the weights lies."""
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    place = int(np.searchsorted(sums, share * sums[-1]))
    return float(values[order[min(place, len(order) - 1)]])
