"""Operating points of a router on labelled prompts, and the choice of one by a target.

All settings are one family with one threshold tau. A text quality of at least `band.high` gives the
prompt to the small model at once, one below `band.low` to the large model; in between the small
model begins, and its answer is kept if the last stage (the answer's, else the prompt's) predicts
a quality of at least tau. The band follows from tau: outside it the last stage would overrule the
text for fewer than 1 % of all prompts on each side, hence for fewer than 2 % in all. As tau rises,
prompts only ever move to the large model. A router that knows text alone has no band: tau decides.

Rows with expected costs (router/worth.py) are judged by gain per cost: their qualities are 1 minus
the gain divided by how much dearer than at the cheapest prompts the large model is. Then the band
is where beginning an answer is expected to pay, and empty where labels do not show that it does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.router.bands import ALWAYS_LARGE as ALWAYS_LARGE
from outrider.router.bands import Bands, OverruledBands, PaidBands, cuts_below
from outrider.router.costs import TokenPrices
from outrider.router.features import FloatRows
from outrider.router.rows import Stage as Stage
from outrider.router.rows import StageRows as StageRows
from outrider.router.rows import answered
from outrider.router.rows import split as split
from outrider.verifier.params import Tier

Prices = Mapping[Tier, TokenPrices]

_NUM_POINTS: Final = 101
_PRICE_UNIT: Final = 1e-6  # prices are for a million tokens


class CalibrationError(ValueError):
    """The target cannot be met or not be judged with these rows. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """One setting of the router and what it gave on prompts that it was not trained on."""

    threshold: float
    """From this quality on the small model's answer stands, in [0, ALWAYS_LARGE]."""
    band: tuple[float, float] | None
    """Text qualities (low, high) between which the small model begins under watch. None without a
    watch."""
    strong_share: float
    """Prompts that got the large model's answer, in [0, 1]. Among more than two tiers: how far the
    cost is from always-cheapest's to always-dearest's."""
    watched_share: float
    """Prompts that began under watch, in [0, 1]."""
    accuracy: float
    """The accuracy of the answers given, in [0, 1]."""
    relative_accuracy: float
    """The accuracy as a share of always-large's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The chosen operating point and the others, by falling strong share."""

    chosen: OperatingPoint
    points: tuple[OperatingPoint, ...]
    stage: Stage
    """What the quality compared with the threshold is made of."""
    quality_deciles: tuple[float, ...]
    """Deciles of the text qualities seen in calibration, [11] from lowest to highest: what drift is
    measured against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationTarget:
    """Target that selects a setting; exactly one of the first five fields is set."""

    recovered_gap: float | None = None
    """The share of what always-large adds to always-small, in (0, 1], at the least strong share."""
    strong_share: float | None = None
    """The share of prompts that the large model answers, in [0, 1], never more."""
    quality: float | None = None
    """Accuracy as a share of always-large's, above 0, at the least strong share."""
    max_cost_usd: float | None = None
    """Mean cost of a request, with the best accuracy that it buys; needs `prices`."""
    max_seconds: float | None = None
    """Mean seconds of a request, with the best accuracy that they buy."""
    prices: Prices | None = None

    def __post_init__(self) -> None:
        """Raise CalibrationError naming the field that is out of range or missing."""
        values = {
            "recovered_gap": (self.recovered_gap, 1.0),
            "strong_share": (self.strong_share, 1.0),
            "quality": (self.quality, 2.0),
            "max_cost_usd": (self.max_cost_usd, np.inf),
            "max_seconds": (self.max_seconds, np.inf),
        }
        given = [(name, value, most) for name, (value, most) in values.items() if value is not None]
        if len(given) != 1:
            names = ", ".join(name for name, _, _ in given) or "none"
            raise CalibrationError(f"a target is exactly one of {', '.join(values)}, not {names}")
        name, value, most = given[0]
        # A share of 0 is a wish; the others would say nothing.
        if not (0.0 < value <= most or (value == 0.0 and name == "strong_share")):
            raise CalibrationError(f"{name}={value} must be above 0 and at most {most:g}")
        if self.max_cost_usd is not None and self.prices is None:
            raise CalibrationError("a target of max_cost_usd needs the prices of both tiers")


def calibrate(rows: StageRows, target: CalibrationTarget) -> Calibration:
    """Measure the family of settings and choose one; raises CalibrationError.

    The rows must be ones that no stage was fitted on (held-out folds or other data), else every
    figure is too good. A target of recovered_gap chooses always-small where there is no gap.
    """
    stage = rows.stages[-1]
    points = _family(rows, stage)
    return Calibration(
        chosen=_choose(rows, points, target),
        points=tuple(reversed(points)),
        stage=stage,
        quality_deciles=tuple(
            np.quantile(np.clip(rows.text, 0.0, 1.0), np.linspace(0.0, 1.0, 11)).tolist()
        ),
    )


def measure(
    rows: StageRows, threshold: float, band: tuple[float, float] | None = None
) -> OperatingPoint:
    """Return the operating point of a setting on these rows."""
    _, is_watched = split(rows, threshold, band)
    scores, shares = answered(rows, threshold, band)
    accuracy = float(scores.mean())
    always_large = float(rows.strong.mean())
    return OperatingPoint(
        threshold=threshold,
        band=band,
        strong_share=float(shares.mean()),
        watched_share=float(is_watched.mean()),
        accuracy=accuracy,
        # Nothing is worse than a large model that is never right.
        relative_accuracy=accuracy / always_large if always_large > 0.0 else 1.0,
    )


def request_costs(rows: StageRows, point: OperatingPoint, prices: Prices) -> FloatRows:
    """USD of each request under a setting, [num_prompts]; raises CalibrationError.

    An escalated answer is paid twice: the small model's prompt and held tokens, then the large
    model's whole answer (tokens that it takes over are still its own). Cached prompts are not
    known here and count in full. Among more than two tiers the data know what each answer costs.
    """
    if rows.tiers is not None:
        return rows.tiers.answered(rows.tiers.usd, point.threshold)
    prompt = needed(rows.num_prompt_tokens, "prompt_tokens")
    weak = needed(rows.num_weak_tokens, "weak_tokens")
    strong = needed(rows.num_strong_tokens, "strong_tokens")
    is_strong, is_watched = split(rows, point.threshold, point.band)
    written = np.where(is_strong, np.minimum(weak, rows.hold_back_tokens), weak)
    small = prices["small"].prompt * prompt + prices["small"].completion * written
    large = prices["large"].prompt * prompt + prices["large"].completion * strong
    costs: FloatRows = _PRICE_UNIT * (
        np.where(~is_strong | is_watched, small, 0.0) + np.where(is_strong, large, 0.0)
    )
    return costs


def request_seconds(rows: StageRows, point: OperatingPoint) -> FloatRows:
    """Seconds to the last token of each request under a setting, [num_prompts].

    An escalated answer waits for the share of the small answer that was held and then takes as
    long as the large model alone: an upper bound, for what is held is proposed to it. Raises
    CalibrationError where the data lack seconds or the small answers' tokens.
    """
    weak_s = needed(rows.weak_s, "weak_s")
    strong_s = needed(rows.strong_s, "strong_s")
    num_weak = needed(rows.num_weak_tokens, "weak_tokens")
    is_strong, is_watched = split(rows, point.threshold, point.band)
    held = np.minimum(1.0, rows.hold_back_tokens / np.maximum(num_weak, 1.0))
    seconds: FloatRows = np.where(is_strong, strong_s + is_watched * held * weak_s, weak_s)
    return seconds


def expected_costs(rows: StageRows, point: OperatingPoint) -> FloatRows:
    """Expected cost of each request under a setting, [num_prompts]; rows must have costs."""
    is_strong, is_watched = split(rows, point.threshold, point.band)
    small, begun, large = (
        needed(costs, "expected costs")
        for costs in (rows.small_cost, rows.begun_cost, rows.large_cost)
    )
    costs: FloatRows = np.where(is_strong, large + is_watched * begun, small)
    return costs


def needed(values: FloatRows | None, column: str) -> FloatRows:
    """Return a column. Raises CalibrationError where the data lack it."""
    if values is None:
        raise CalibrationError(
            f"the data have no {column}: `outrider router collect` writes them with the labels"
        )
    return values


def _family(rows: StageRows, stage: Stage) -> list[OperatingPoint]:
    """Settings from always-small to always-large, by rising strong share, no two of one share."""
    cuts_of = rows.cuts(stage)
    values = np.unique(cuts_of)
    cuts = cuts_below(values)[np.searchsorted(values, np.unique(_levels(rows, cuts_of)))]
    thresholds = [*cuts.tolist(), ALWAYS_LARGE]
    bands = None if stage == "text" else _bands(rows, stage)
    points: list[OperatingPoint] = []
    for threshold in thresholds:
        point = measure(rows, threshold, bands.around(threshold) if bands else None)
        if not points or point.strong_share > points[-1].strong_share:
            points.append(point)
    return points


def _levels(rows: StageRows, quality: FloatRows) -> FloatRows:
    """Return qualities at even steps of the prompts; with costs, half of them at even ones of cost.

    Else one step near the end would take many of the longest prompts at once.
    """
    if rows.large_cost is None or rows.small_cost is None:
        return np.quantile(quality, np.linspace(0.0, 1.0, _NUM_POINTS), method="higher")
    half = np.linspace(0.0, 1.0, _NUM_POINTS // 2 + 1)
    order = np.argsort(quality, kind="stable")
    spent = np.cumsum(np.maximum(rows.large_cost - rows.small_cost, 0.0)[order])
    places = np.searchsorted(spent, half * spent[-1]).clip(max=len(order) - 1)
    by_cost: FloatRows = quality[order[places]]
    return np.append(np.quantile(quality, half, method="higher"), by_cost)


def _bands(rows: StageRows, stage: Stage) -> Bands:
    text, last = rows.judged("text"), rows.judged(stage)
    small, begun, large = rows.small_cost, rows.begun_cost, rows.large_cost
    if small is None or begun is None or large is None:
        return OverruledBands(text, last)
    return PaidBands(
        text,
        last,
        gains=1.0 - rows.quality(stage),
        labels=rows.strong - rows.weak,
        small=small / rows.reference_cost,
        large=large / rows.reference_cost,
        begun=begun / rows.reference_cost,
    )


def _choose(
    rows: StageRows, points: list[OperatingPoint], target: CalibrationTarget
) -> OperatingPoint:
    """`points`: by rising strong share; the first is always-small."""
    if target.max_cost_usd is not None or target.max_seconds is not None:
        return _best_for(rows, points, target)
    if target.strong_share is not None:
        allowed = [p for p in points if p.strong_share <= target.strong_share + 1e-9]
        return allowed[-1]
    if target.recovered_gap is not None:
        low, high = float(rows.weak.mean()), float(rows.strong.mean())
        if high <= low:
            return points[0]
        level = low + target.recovered_gap * (high - low)
        # The last point is always-large: it recovers the whole gap.
        return _cheapest(rows, [p for p in points if p.accuracy >= level - 1e-9])
    assert target.quality is not None
    reaching = [p for p in points if p.relative_accuracy >= target.quality - 1e-9]
    if reaching:
        return _cheapest(rows, reaching)
    best = max(point.relative_accuracy for point in points)
    raise CalibrationError(
        f"no setting reaches {target.quality:.3f} of the large model's accuracy on these prompts; "
        f"the best one reaches {best:.3f}"
    )


def _cheapest(rows: StageRows, points: list[OperatingPoint]) -> OperatingPoint:
    """Return the point of the least expected cost; without costs, of the least strong share."""
    if rows.large_cost is None:
        return points[0]
    return min(points, key=lambda point: float(expected_costs(rows, point).mean()))


def _best_for(
    rows: StageRows, points: list[OperatingPoint], target: CalibrationTarget
) -> OperatingPoint:
    """The most accurate setting within the cost, the cheapest of equals."""
    prices, unit, most = target.prices, "USD", target.max_cost_usd
    if most is not None and prices is not None:
        costs = [float(request_costs(rows, point, prices).mean()) for point in points]
    else:
        unit, most = "seconds", target.max_seconds or 0.0
        costs = [float(request_seconds(rows, point).mean()) for point in points]
    within = [
        (-point.accuracy, cost, place)
        for place, (point, cost) in enumerate(zip(points, costs, strict=True))
        if cost <= most
    ]
    if not within:
        raise CalibrationError(
            f"no setting costs at most {most:g} {unit} a request on these prompts; the "
            f"cheapest costs {min(costs):.3g} {unit}"
        )
    return points[min(within)[-1]]
