"""Operating points of a router on labelled prompts, and the choice of one by a target.

All settings are one family with one threshold tau. A text quality of at least `band.high` gives the
prompt to the small model at once, one below `band.low` to the large model; in between the small
model begins, and its answer is kept if the last stage (the answer's, else the prompt's) predicts
a quality of at least tau. The band follows from tau: outside it the last stage would overrule the
text for fewer than 1 % of all prompts on each side, hence for fewer than 2 % in all. As tau rises,
prompts only ever move to the large model. A router that knows text alone has no band: tau decides.

Rows with expected costs (router/worth.py) are judged by gain per cost: their qualities are 1 minus
the gain divided by how much dearer than at the cheapest prompts the large model is. Then the band
is where beginning an answer is expected to pay.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from outrider.router.bands import ALWAYS_LARGE as ALWAYS_LARGE
from outrider.router.bands import Bands, OverruledBands, PaidBands, cuts_below
from outrider.router.costs import TokenPrices
from outrider.router.features import FloatRows
from outrider.verifier.params import Tier

Stage = Literal["text", "prompt", "answer"]
Prices = Mapping[Tier, TokenPrices]
Bools = NDArray[np.bool_]

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
    """Prompts that got the large model's answer, in [0, 1]."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageRows:
    """Labelled prompts as each stage judges them; every array is [num_prompts].

    Qualities are 1 - gain, in [0, 2]. The policy clips them at 1; the order beyond it still counts
    for APGR. Tokens and seconds are None where the data lack them.
    """

    text: FloatRows
    prompt: FloatRows
    """Equals `text` where there is no probe."""
    answer: FloatRows | None
    """None where nothing is known of the small model's answers. It has seen their first
    `hold_back_tokens`."""
    weak: FloatRows
    """The small tier's score, in [0, 1]."""
    strong: FloatRows
    """The large tier's score, in [0, 1]."""
    text_right: FloatRows | None = None
    """The text's estimate of the small tier's score; None: not known."""
    last_right: FloatRows | None = None
    """The last stage's."""
    hold_back_tokens: int = 16
    num_prompt_tokens: FloatRows | None = None
    num_weak_tokens: FloatRows | None = None
    num_strong_tokens: FloatRows | None = None
    weak_s: FloatRows | None = None
    """To the answer's last token."""
    strong_s: FloatRows | None = None
    """To the answer's last token."""
    small_cost: FloatRows | None = None
    """Expected cost of the small model's answer. With the two below: gains are weighed by costs."""
    begun_cost: FloatRows | None = None
    """Expected cost of an answer that the small model begins and hands over."""
    large_cost: FloatRows | None = None
    """Expected cost of the large model's answer."""
    reference_cost: float = 1.0
    """Extra cost of the large model for which a gain counts in full, as `CostModel.reference`."""

    def __post_init__(self) -> None:
        """Raise ValueError if there are no rows, lengths differ or a value is not finite."""
        num_rows = len(self.text)
        if not num_rows:
            raise ValueError("no prompts to judge a router by")
        for name in self.__dataclass_fields__:
            values = getattr(self, name)
            if isinstance(values, np.ndarray):
                if values.shape != (num_rows,):
                    raise ValueError(f"{name} has shape {list(values.shape)}, not [{num_rows}]")
                if not np.isfinite(values).all():
                    raise ValueError(f"{name} holds values that are not finite")

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages with qualities of their own, from the first to the last."""
        stages: list[Stage] = ["text"]
        if not np.array_equal(self.text, self.prompt):
            stages.append("prompt")
        if self.answer is not None:
            stages.append("answer")
        return tuple(stages)

    def quality(self, stage: Stage) -> FloatRows:
        """A stage's qualities; the prompt's if the answers are not known."""
        if stage == "answer" and self.answer is not None:
            return self.answer
        return self.text if stage == "text" else self.prompt

    def judged(self, stage: Stage) -> FloatRows:
        """A stage's qualities as thresholds see them: for the cost, and clipped to [0, 1]."""
        quality = self.quality(stage)
        if self.large_cost is not None and self.small_cost is not None:
            extra = (self.large_cost - self.small_cost) / self.reference_cost
            quality = 1.0 - (1.0 - quality) / np.maximum(extra, 1.0)
        clipped: FloatRows = np.clip(quality, 0.0, 1.0)
        return clipped


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


def split(
    rows: StageRows, threshold: float, band: tuple[float, float] | None
) -> tuple[Bools, Bools]:
    """Return the prompts that the large model answers, and those that begin watched: [num_prompts].

    Without a band all prompts are compared with the threshold, by the last stage that the rows
    have.
    """
    text = rows.judged("text")
    last = rows.judged(rows.stages[-1])
    if band is None:
        return last < threshold, np.zeros(len(text), dtype=np.bool_)
    low, high = band
    is_watched = (text >= low) & (text < high)
    return (text < low) | (is_watched & (last < threshold)), is_watched


def measure(
    rows: StageRows, threshold: float, band: tuple[float, float] | None = None
) -> OperatingPoint:
    """Return the operating point of a setting on these rows."""
    is_strong, is_watched = split(rows, threshold, band)
    accuracy = float(np.where(is_strong, rows.strong, rows.weak).mean())
    always_large = float(rows.strong.mean())
    return OperatingPoint(
        threshold=threshold,
        band=band,
        strong_share=float(is_strong.mean()),
        watched_share=float(is_watched.mean()),
        accuracy=accuracy,
        # Nothing is worse than a large model that is never right.
        relative_accuracy=accuracy / always_large if always_large > 0.0 else 1.0,
    )


def request_costs(rows: StageRows, point: OperatingPoint, prices: Prices) -> FloatRows:
    """USD of each request under a setting, [num_prompts]; raises CalibrationError.

    An escalated answer is paid twice: the small model's prompt and held tokens, then the large
    model's whole answer (tokens that it takes over are still its own). Cached prompts are not
    known here and count in full.
    """
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
    quality = rows.judged(stage)
    values = np.unique(quality)
    levels = np.quantile(quality, np.linspace(0.0, 1.0, _NUM_POINTS), method="higher")
    cuts = cuts_below(values)[np.searchsorted(values, np.unique(levels))]
    thresholds = [*cuts.tolist(), ALWAYS_LARGE]
    bands = None if stage == "text" else _bands(rows, stage)
    points: list[OperatingPoint] = []
    for threshold in thresholds:
        point = measure(rows, threshold, bands.around(threshold) if bands else None)
        if not points or point.strong_share > points[-1].strong_share:
            points.append(point)
    return points


def _bands(rows: StageRows, stage: Stage) -> Bands:
    text, last = rows.judged("text"), rows.judged(stage)
    small, begun, large = rows.small_cost, rows.begun_cost, rows.large_cost
    if small is None or begun is None or large is None:
        return OverruledBands(text, last)
    return PaidBands(
        text,
        last,
        gains=1.0 - rows.quality(stage),
        small=small,
        large=large,
        begun=begun,
        reference=rows.reference_cost,
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
