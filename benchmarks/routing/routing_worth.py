"""Routers that weigh gains by cost beside those that count requests, on the same prompts.

Pure arithmetic, as in routing_policies: what is fitted or chosen on one half of the prompts is
judged on the other. Costs are tokens times parameters, or seconds of rates that were measured.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Final

import numpy as np

from benchmarks.routing.routing_policies import Places, known_by, mean_interval, taken
from benchmarks.shared.intervals import Interval
from outrider.router.calibration import (
    ALWAYS_LARGE,
    CalibrationError,
    CalibrationTarget,
    OperatingPoint,
    Prices,
    StageRows,
    calibrate,
    measure,
    request_costs,
    request_seconds,
    split,
)
from outrider.router.dataset import LabelledPrompts
from outrider.router.features import FeatureConfig, FloatRows, prompt_features
from outrider.router.worth import CostRates, CostUnit
from outrider.router.worth_fit import FittedWorth, fit_rates, fit_worth, with_costs

MARGIN: Final = 0.01
GOAL_COST: Final = 0.60
COST_GRID: Final = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
GAIN_PER: Final[Mapping[str, CostUnit | None]] = {
    "request": None,
    "token cost": "dollar",  # with parameters for prices
    "second": "second",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The cheapest setting within one point of always-large, chosen on the other half."""

    accuracy: Interval
    token_cost: float
    """As a share of always-large's."""
    seconds: float
    """Modelled, the mean as a share of always-large's."""
    strong_share: float
    watched_share: float
    minus_large: Interval
    """Accuracy minus always-large's, paired."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Half:
    """Prompts to be judged, as a router sees them that was calibrated on the other half."""

    places: Places
    judged: StageRows
    chosen_on: StageRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """What prompts cost and what each stage says of them."""

    data: LabelledPrompts
    rows: StageRows
    whole: StageRows
    """The same with answers that are judged when they are complete."""
    features: FeatureConfig
    prices: Prices

    @property
    def ways(self) -> dict[str, StageRows]:
        """The rows by what is looked at."""
        ways = {
            "text": known_by(self.rows, "text"),
            "16 held": self.rows,
            "whole answers": self.whole,
        }
        data = self.data
        return {
            name: replace(rows, weak_s=data.weak_s, strong_s=data.strong_s)
            for name, rows in ways.items()
        }


def measured_rates(
    rows: StageRows, places: Places, seconds: Mapping[str, FloatRows]
) -> dict[str, CostRates]:
    """The step-time model: rates of both tiers, from prompts that were timed one at a time."""
    prompt, weak, strong = _tokens(rows)
    return {
        tier: fit_rates(prompt[places], tokens[places], seconds[tier])
        for tier, tokens in (("small", weak), ("large", strong))
    }


def with_modelled_seconds(
    data: LabelledPrompts, rows: StageRows, rates: Mapping[str, CostRates]
) -> LabelledPrompts:
    """The data with the seconds that the rates give each prompt."""
    prompt, weak, strong = _tokens(rows)

    def seconds(tier: str, answer: FloatRows) -> FloatRows:
        rate = rates[tier]
        return np.array([rate.cost(one, other) for one, other in zip(prompt, answer, strict=True)])

    return replace(data, weak_s=seconds("small", weak), strong_s=seconds("large", strong))


class Costs:
    """Expected costs, fitted on one half for the other: once for all that is looked at."""

    def __init__(self, given: Given) -> None:
        self._given = given
        vectors = [prompt_features(text, given.features) for text in given.data.prompts]
        self._inputs = list(zip(vectors, map(len, given.data.prompts), strict=True))
        self._fitted: dict[tuple[CostUnit, int], FittedWorth] = {}

    def halves(self, rows: StageRows, unit: CostUnit | None) -> list[Half]:
        """Both halves; with a unit, each with costs that were fitted on the other one."""
        number = len(rows.text)
        places = [np.arange(first, number, 2) for first in (0, 1)]
        return [self._half(rows, unit, *pair) for pair in (places, places[::-1])]

    def _half(
        self, rows: StageRows, unit: CostUnit | None, judged: Places, chosen_on: Places
    ) -> Half:
        ours, others = taken(rows, judged), taken(rows, chosen_on)
        if unit is not None:
            fitted = self._fit(unit, chosen_on)
            tokens = [fitted.worth.tokens(*self._inputs[place]) for place in judged.tolist()]
            ours, others = with_costs(ours, fitted.worth, tokens), fitted.weighed(others)
        return Half(places=judged, judged=ours, chosen_on=others)

    def _fit(self, unit: CostUnit, places: Places) -> FittedWorth:
        key = unit, int(places[0])
        if key not in self._fitted:
            given = self._given
            part = _part(given.data, places)
            self._fitted[key] = fit_worth(part, given.features, unit, given.prices)
        return self._fitted[key]


def within_one_point(given: Given, costs: Costs) -> dict[str, dict[str, Chosen]]:
    """By what is looked at, and by what gains are counted per."""
    return {
        way: {name: _chosen(given, costs.halves(rows, unit)) for name, unit in GAIN_PER.items()}
        for way, rows in given.ways.items()
    }


def _chosen(given: Given, parts: Sequence[Half]) -> Chosen:
    points = [_within_margin(part.chosen_on) for part in parts]
    large = measure(given.rows, ALWAYS_LARGE)
    rows = given.ways["text"]
    costs = request_costs(rows, large, given.prices).mean()
    seconds = request_seconds(rows, large).mean()
    outcomes = list(zip(parts, points, strict=True))
    scores = joined(parts, [_scores(part.judged, point) for part, point in outcomes])
    watched = [split(part.judged, point.threshold, point.band) for part, point in outcomes]

    def mean(columns: Iterable[FloatRows]) -> float:
        return float(np.concatenate(list(columns)).mean())

    return Chosen(
        accuracy=mean_interval(scores),
        token_cost=mean(
            request_costs(part.judged, point, given.prices) / costs for part, point in outcomes
        ),
        seconds=mean(request_seconds(part.judged, point) / seconds for part, point in outcomes),
        strong_share=mean(is_strong.astype(np.float64) for is_strong, _ in watched),
        watched_share=mean(is_watched.astype(np.float64) for _, is_watched in watched),
        minus_large=mean_interval(scores - given.rows.strong),
    )


def _within_margin(rows: StageRows) -> OperatingPoint:
    """The cheapest setting within the margin, always-large where there is none."""
    wanted = 1.0 - MARGIN / float(rows.strong.mean())
    try:
        return calibrate(rows, CalibrationTarget(quality=wanted)).chosen
    except CalibrationError:  # another setting is always-large, which keeps all
        return measure(rows, ALWAYS_LARGE)


def at_equal_cost(given: Given, costs: Costs) -> dict[str, dict[str, dict[str, Interval | float]]]:
    """By what gains are counted per, and by token cost: accuracies, and 16 held minus text."""
    found: dict[str, dict[str, dict[str, Interval | float]]] = {}
    for name, unit in GAIN_PER.items():
        parts = {way: costs.halves(rows, unit) for way, rows in given.ways.items()}
        found[name] = {}
        for cost in COST_GRID:
            scores = {way: _scores_at(given, each, cost) for way, each in parts.items()}
            entry: dict[str, Interval | float] = {
                way: float(each.mean()) for way, each in scores.items()
            }
            entry["16 held minus text"] = mean_interval(scores["16 held"] - scores["text"])
            found[name][f"{cost:g}"] = entry
    return found


def _scores_at(given: Given, parts: Sequence[Half], cost: float) -> FloatRows:
    """Scores of all prompts where the settings' mean token cost is this share of always-large's.

    The two settings around it are taken, each for a share of the prompts.
    """
    return joined(parts, [_half_scores(given, part, cost) for part in parts])


def _half_scores(given: Given, part: Half, cost: float) -> FloatRows:
    points = calibrate(part.chosen_on, CalibrationTarget(recovered_gap=1.0)).points
    costs = partial(request_costs, part.judged, prices=given.prices)
    always_large = costs(measure(part.judged, ALWAYS_LARGE)).mean()
    measured = sorted(
        (float(costs(point).mean() / always_large), n) for n, point in enumerate(points)
    )
    means = np.array([mean for mean, _ in measured])
    above = int(np.clip(np.searchsorted(means, cost), 1, len(means) - 1))
    span = means[above] - means[above - 1]
    share = float(np.clip((cost - means[above - 1]) / span if span > 0 else 1.0, 0.0, 1.0))
    low, high = (_scores(part.judged, points[measured[place][1]]) for place in (above - 1, above))
    mixed: FloatRows = share * high + (1.0 - share) * low
    return mixed


def joined(parts: Sequence[Half], values: Sequence[FloatRows]) -> FloatRows:
    """Put the halves' values in the order of the prompts."""
    whole = np.zeros(sum(len(one) for one in values))
    for part, each in zip(parts, values, strict=True):
        whole[part.places] = each
    return whole


def _scores(rows: StageRows, point: OperatingPoint) -> FloatRows:
    is_strong, _ = split(rows, point.threshold, point.band)
    scores: FloatRows = np.where(is_strong, rows.strong, rows.weak)
    return scores


def _tokens(rows: StageRows) -> tuple[FloatRows, FloatRows, FloatRows]:
    columns = (rows.num_prompt_tokens, rows.num_weak_tokens, rows.num_strong_tokens)
    prompt, weak, strong = (one for one in columns if one is not None)
    return prompt, weak, strong


def _part(data: LabelledPrompts, places: Places) -> LabelledPrompts:
    columns = {
        field.name: getattr(data, field.name)[places]
        for field in fields(data)
        if isinstance(getattr(data, field.name), np.ndarray)
    }
    prompts = [data.prompts[place] for place in places.tolist()]
    return replace(data, prompts=prompts, logprobs=None, **columns)
