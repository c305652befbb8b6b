"""Policies that choose the answering tier, judged on the same prompts: accuracy, share, cost, time.

Pure arithmetic on what `outrider router collect` recorded and a router estimated. An operating
point that is judged on some prompts was chosen on the others (two folds), so nothing is too good.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.shared.intervals import Interval, bootstrap
from outrider.router.calibration import (
    CalibrationTarget,
    OperatingPoint,
    Prices,
    Stage,
    StageRows,
    calibrate,
    request_costs,
    split,
)
from outrider.router.features import FloatRows

Places = NDArray[np.int64]

# What an answer was made by, and so how long it took.
SMALL, LARGE, ESCALATED = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """Results of a policy for each prompt, all [num_prompts]."""

    scores: FloatRows
    """Quality of the answers that were given, in [0, 1]."""
    costs: FloatRows
    """In any unit."""
    ways: Places
    """SMALL, LARGE or ESCALATED (the small model began)."""

    @property
    def strong_share(self) -> float:
        """Share of the prompts that got the large model's answer."""
        return float((self.ways != SMALL).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFigures:
    """For the table and the plot. `cost`: mean, as a share of always-large's."""

    accuracy: Interval
    strong_share: float
    cost: float
    p50_s: float | None = None
    p95_s: float | None = None


def known_by(rows: StageRows, stage: Stage) -> StageRows:
    """The rows as a router sees them that has no stage behind `stage`."""
    match stage:
        case "text":
            return replace(rows, prompt=rows.text, answer=None)
        case "prompt":
            # The probe decides when the prompt is read: one token has been written by then.
            return replace(rows, answer=None, hold_back_tokens=1)
        case "answer":
            return rows


def at_point(rows: StageRows, point: OperatingPoint, prices: Prices) -> Outcome:
    """Return what an operating point gives on these rows."""
    is_strong, is_watched = split(rows, point.threshold, point.band)
    ways = np.where(is_strong, np.where(is_watched, ESCALATED, LARGE), SMALL)
    return Outcome(
        scores=np.where(is_strong, rows.strong, rows.weak),
        costs=request_costs(rows, point, prices),
        ways=ways.astype(np.int64),
    )


def cross_fitted(rows: StageRows, target: CalibrationTarget, prices: Prices) -> Outcome:
    """Each half of the prompts under the operating point that the target chose on the other."""
    number = len(rows.text)
    halves = [np.arange(first, number, 2) for first in (0, 1)]
    scores, costs = np.zeros(number), np.zeros(number)
    ways = np.zeros(number, dtype=np.int64)
    for judged, chosen_on in (halves, halves[::-1]):
        point = calibrate(taken(rows, chosen_on), target).chosen
        outcome = at_point(taken(rows, judged), point, prices)
        scores[judged], costs[judged] = outcome.scores, outcome.costs
        ways[judged] = outcome.ways
    return Outcome(scores=scores, costs=costs, ways=ways)


def taken(rows: StageRows, places: Places) -> StageRows:
    """Some of the rows."""
    columns = {
        name: getattr(rows, name)[places]
        for name in rows.__dataclass_fields__
        if isinstance(getattr(rows, name), np.ndarray)
    }
    return replace(rows, **columns)


def one_tier(rows: StageRows, way: int, prices: Prices) -> Outcome:
    """Always the same tier: SMALL or LARGE."""
    number = len(rows.text)
    return chosen_by(rows, np.full(number, way, dtype=np.int64), prices)


def oracle(rows: StageRows, prices: Prices) -> Outcome:
    """The large tier exactly where it is better."""
    return chosen_by(rows, np.where(rows.strong > rows.weak, LARGE, SMALL), prices)


def chosen_by(rows: StageRows, ways: Places, prices: Prices) -> Outcome:
    """SMALL or LARGE for each prompt; nothing is begun in vain."""
    assert rows.num_prompt_tokens is not None
    assert rows.num_weak_tokens is not None
    assert rows.num_strong_tokens is not None
    tokens = {"small": rows.num_weak_tokens, "large": rows.num_strong_tokens}
    costs = {
        tier: price.prompt * rows.num_prompt_tokens + price.completion * tokens[tier]
        for tier, price in prices.items()
    }
    is_strong = ways == LARGE
    return Outcome(
        scores=np.where(is_strong, rows.strong, rows.weak),
        # As request_costs has it: prices are for a million tokens.
        costs=1e-6 * np.where(is_strong, costs["large"], costs["small"]),
        ways=ways.astype(np.int64),
    )


def curve(rows: StageRows, prices: Prices) -> list[tuple[float, float, float]]:
    """(cost, accuracy, strong share) of every setting of the router, by rising cost.

    The cost is the mean as a share of always-large's.
    """
    points = calibrate(rows, CalibrationTarget(recovered_gap=1.0)).points
    outcomes = [at_point(rows, point, prices) for point in points]
    always_large = one_tier(rows, LARGE, prices).costs.mean()
    return sorted(
        (float(o.costs.mean() / always_large), float(o.scores.mean()), o.strong_share)
        for o in outcomes
    )


def least_share(rows: StageRows, margin: float) -> float | None:
    """The least strong share within `margin` of always-large's accuracy; None if there is none."""
    points = calibrate(rows, CalibrationTarget(recovered_gap=1.0)).points
    wanted = float(rows.strong.mean()) - margin
    shares = [p.strong_share for p in points if p.accuracy >= wanted - 1e-9]
    return min(shares, default=None)


def gain_at_equal_cost(
    outcome: Outcome, rows: StageRows, prices: Prices, *, seed: int = 0
) -> Interval:
    """Accuracy of an outcome minus that of a router alone (`rows`) that costs as much.

    The router takes the two settings around that cost, each for a share of the prompts.
    """
    points = calibrate(rows, CalibrationTarget(recovered_gap=1.0)).points
    settings = sorted(
        (at_point(rows, point, prices) for point in points), key=lambda one: one.costs.mean()
    )
    means = np.array([one.costs.mean() for one in settings])
    above = int(np.clip(np.searchsorted(means, outcome.costs.mean()), 1, len(means) - 1))
    below = above - 1
    span = means[above] - means[below]
    part = 1.0 if span <= 0 else (outcome.costs.mean() - means[below]) / span
    part = float(np.clip(part, 0.0, 1.0))
    alone = part * settings[above].scores + (1.0 - part) * settings[below].scores
    return mean_interval(outcome.scores - alone, seed=seed)


def mean_interval(values: FloatRows, *, seed: int = 0) -> Interval:
    """The mean with a bootstrap interval over prompts."""
    return bootstrap(lambda units: float(values[units].mean()), len(values), seed=seed)


def seconds_of(outcome: Outcome, by_way: Mapping[int, FloatRows], places: Places) -> FloatRows:
    """Seconds of the prompts that were measured, [num_measured].

    `by_way`: measured seconds of each way, [num_measured]; `places`: which prompts these are.
    """
    ways = outcome.ways[places]
    seconds = np.full(len(places), np.nan)
    for way, measured in by_way.items():
        seconds = np.where(ways == way, measured, seconds)
    return seconds


def figures(outcome: Outcome, always_large: Outcome, seconds: FloatRows | None) -> PolicyFigures:
    """The figures of one policy."""
    p50_s, p95_s = (None, None) if seconds is None else np.quantile(seconds, (0.5, 0.95)).tolist()
    return PolicyFigures(
        accuracy=mean_interval(outcome.scores),
        strong_share=outcome.strong_share,
        cost=float(outcome.costs.mean() / always_large.costs.mean()),
        p50_s=p50_s,
        p95_s=p95_s,
    )


def names_of(stages: Sequence[Stage]) -> dict[Stage, str]:
    """Return how tables and plots call a router that knows no more than a stage."""
    names: dict[Stage, str] = {
        "text": "router",
        "prompt": "router + probe",
        "answer": "cascade, 16 held",
    }
    return {stage: names[stage] for stage in stages}
