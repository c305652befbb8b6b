"""Evaluation of a router: accuracy over the share of prompts that the large model answers.

Definitions as in RouteLLM (Ong et al., 2024): the curve has 11 points, at the deciles of the score;
APGR is the area under it, above always-small, as a share of what always-large adds; CPT(x) is the
least share of large-model answers that recovers x of that gap, linearly interpolated. Equal scores
count as if they were ordered at random, so a router with one score for all prompts is a random
one. Everything here sorts by *gain*: the expected improvement by the large model.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.router.calibration import OperatingPoint, Stage, StageRows, measure
from outrider.router.features import FloatRows
from outrider.router.rows import answered, best_answers

_Ints = NDArray[np.intp]

NUM_POINTS: Final = 11
NUM_BINS: Final = 10
_CONFIDENCE: Final = (0.025, 0.975)


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapInterval:
    """A figure and its bootstrap interval (95 %)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationBin:
    """Prompts of like quality: what was estimated, what was found, of how many."""

    expected: float
    observed: float
    """1 - (large score - small score), the mean over the bin."""
    standard_error: float
    """The error of `observed`."""
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageReport:
    """One stage's figures: how well it orders prompts by gain, and whether its numbers are true.

    `ece` is the mean distance of expected and observed quality over ten bins of equally many
    prompts. A few hundredths of it are the bins' own noise where prompts are few.
    """

    stage: Stage
    apgr: BootstrapInterval
    cpt50: BootstrapInterval
    cpt80: BootstrapInterval
    curve: FloatRows
    """Accuracy at strong shares 0, 0.1, ..., 1, [11]."""
    curve_low: FloatRows
    """The lower end of its bootstrap interval."""
    curve_high: FloatRows
    """The upper end of its bootstrap interval."""
    bins: tuple[CalibrationBin, ...]

    @property
    def ece(self) -> float:
        """Expected calibration error of the quality."""
        total = sum(entry.num_prompts for entry in self.bins)
        gaps = (abs(entry.expected - entry.observed) * entry.num_prompts for entry in self.bins)
        return sum(gaps) / total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterReport:
    """A router's figures on labelled prompts, beside what bounds them.

    Accuracies and shares are in [0, 1]. `random_*` are expectations.
    """

    num_prompts: int
    weak_accuracy: float
    strong_accuracy: float
    stages: Mapping[Stage, StageReport]
    """Those that the data allow; the last judges best informed."""
    setting: OperatingPoint
    """The result of the router's own setting here."""
    setting_accuracy: BootstrapInterval
    """The accuracy of `setting`, with its interval."""
    setting_share: BootstrapInterval
    """The strong share of `setting`, with its interval."""
    oracle_apgr: float
    oracle_curve: FloatRows
    oracle_accuracy: float
    oracle_share: float
    """The share that an oracle needs for `oracle_accuracy`."""
    random_apgr: float = 0.5
    random_cpt50: float = 0.5
    random_cpt80: float = 0.8

    @property
    def best_single_accuracy(self) -> float:
        """The better of always-small and always-large."""
        return max(self.weak_accuracy, self.strong_accuracy)

    @property
    def best_stage(self) -> StageReport:
        """The last stage, which has seen most."""
        return list(self.stages.values())[-1]


class NoGapError(ValueError):
    """The large model is no better than the small one on these prompts: nothing to recover."""

    def __init__(self, *, weak_accuracy: float, strong_accuracy: float) -> None:
        super().__init__(
            f"the large model's accuracy ({strong_accuracy:.3f}) is not above the small one's "
            f"({weak_accuracy:.3f}): APGR and CPT are not defined"
        )


def cost_quality_curve(gain: FloatRows, weak: FloatRows, strong: FloatRows) -> FloatRows:
    """Accuracy at strong shares 0, 0.1, ..., 1, prompts with the highest gain first: [11]."""
    return _Order(gain, weak, strong).curve(np.ones(len(gain)))


def apgr(gain: FloatRows, weak: FloatRows, strong: FloatRows) -> float:
    """Average performance gap recovered; random is 0.5. Raises NoGapError."""
    return _apgr(cost_quality_curve(gain, weak, strong))


def calibration_bins(
    quality: FloatRows, weak: FloatRows, strong: FloatRows
) -> tuple[CalibrationBin, ...]:
    """Make up to ten bins of about as many prompts, by rising quality; equal ones stay together.

    Qualities are 1 - gain, as in StageRows.
    """
    edges = np.unique(np.quantile(quality, np.linspace(0.0, 1.0, NUM_BINS + 1)[1:-1]))
    places = np.searchsorted(edges, quality, side="left")
    observed = 1.0 - (strong - weak)
    bins = []
    for place in np.unique(places).tolist():
        inside = observed[places == place]
        bins.append(
            CalibrationBin(
                expected=float(quality[places == place].mean()),
                observed=float(inside.mean()),
                standard_error=float(inside.std() / len(inside) ** 0.5),
                num_prompts=len(inside),
            )
        )
    return tuple(bins)


def evaluate(
    rows: StageRows,
    *,
    threshold: float,
    band: tuple[float, float] | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
    track: Callable[[range], Iterable[int]] = iter,
) -> RouterReport:
    """Compute all figures of a router on rows that it was not trained on; raises NoGapError.

    `threshold`, `band`: its setting, as in OperatingPoint. All stages and the setting are seen on
    the same resamples of the prompts; those without a gap are left out. `track` may show how far
    the resamples are.
    """
    weak, strong = rows.weak, rows.strong
    oracle_curve = cost_quality_curve(strong - weak, weak, strong)
    point_gap = _gap(oracle_curve)
    orders = {stage: _Order(1.0 - rows.quality(stage), weak, strong) for stage in rows.stages}
    setting = measure(rows, threshold, band)
    given, shares = answered(rows, threshold, band)
    best, best_shares = best_answers(rows)

    rng = np.random.default_rng(seed)
    curves: dict[Stage, list[FloatRows]] = {stage: [] for stage in orders}
    settings: list[tuple[float, float]] = []
    for _ in track(range(num_resamples)):
        counts = np.bincount(rng.integers(0, len(weak), size=len(weak)), minlength=len(weak))
        if counts @ (strong - weak) <= 0.0:
            continue
        for stage, order in orders.items():
            curves[stage].append(order.curve(counts))
        settings.append((float(counts @ given), float(counts @ shares)))
    samples = np.array(settings).reshape(-1, 2) / len(weak)
    return RouterReport(
        num_prompts=len(weak),
        weak_accuracy=point_gap[0],
        strong_accuracy=float(strong.mean()),
        stages={
            stage: _stage_report(stage, rows, order.curve(np.ones(len(weak))), curves[stage])
            for stage, order in orders.items()
        },
        setting=setting,
        setting_accuracy=_interval(setting.accuracy, samples[:, 0]),
        setting_share=_interval(setting.strong_share, samples[:, 1]),
        oracle_apgr=_apgr(oracle_curve),
        oracle_curve=oracle_curve,
        oracle_accuracy=float(best.mean()),
        oracle_share=float(best_shares.mean()),
    )


class _Order:
    """Prompts by falling gain, and the curves of weighted copies of them without sorting again."""

    def __init__(self, gain: FloatRows, weak: FloatRows, strong: FloatRows) -> None:
        if not len(gain):
            raise ValueError("no prompts to evaluate")
        self._rows = np.argsort(-gain, kind="stable")
        ordered = gain[self._rows]
        # Of its group of equal gains: in between the curve is straight, as at random.
        self._ends = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
        self._added = strong - weak
        self._weak = weak

    def curve(self, counts: FloatRows | _Ints) -> FloatRows:
        """Accuracy at the strong shares, each prompt taken `counts` times: [NUM_POINTS]."""
        ordered = counts[self._rows]
        num_prompts = ordered.sum()
        shares = np.append(0.0, np.cumsum(ordered)[self._ends]) / num_prompts
        added = np.cumsum(ordered * self._added[self._rows])[self._ends]
        heights = (counts @ self._weak + np.append(0.0, added)) / num_prompts
        curve: FloatRows = np.interp(np.linspace(0.0, 1.0, NUM_POINTS), shares, heights)
        return curve


def _stage_report(
    stage: Stage, rows: StageRows, curve: FloatRows, samples: list[FloatRows]
) -> StageReport:
    def figure(measured: Callable[[FloatRows], float]) -> BootstrapInterval:
        return _interval(measured(curve), np.array([measured(sample) for sample in samples]))

    spread = np.quantile(np.array(samples or [curve]), _CONFIDENCE, axis=0)
    return StageReport(
        stage=stage,
        apgr=figure(_apgr),
        cpt50=figure(lambda sample: _cpt(sample, 0.5)),
        cpt80=figure(lambda sample: _cpt(sample, 0.8)),
        curve=curve,
        curve_low=spread[0],
        curve_high=spread[1],
        bins=calibration_bins(rows.quality(stage), rows.weak, rows.strong),
    )


def _interval(value: float, samples: FloatRows) -> BootstrapInterval:
    if not len(samples):
        return BootstrapInterval(value=value, low=value, high=value)
    low, high = np.quantile(samples, _CONFIDENCE).tolist()
    return BootstrapInterval(value=value, low=low, high=high)


def _gap(curve: FloatRows) -> tuple[float, float]:
    """Always-small's accuracy and what always-large adds to it: a curve's two ends."""
    low, high = float(curve[0]), float(curve[-1])
    if high <= low:
        raise NoGapError(weak_accuracy=low, strong_accuracy=high)
    return low, high - low


def _apgr(curve: FloatRows) -> float:
    low, gap = _gap(curve)
    area = float((curve[1:] + curve[:-1]).mean() / 2)  # trapezoids of equal width
    return (area - low) / gap


def _cpt(curve: FloatRows, fraction: float) -> float:
    low, gap = _gap(curve)
    return _first_crossing(curve, low + fraction * gap)


def _first_crossing(curve: FloatRows, level: float) -> float:
    """Return where a curve over [0, 1] first reaches a level, interpolated; 1.0 if never."""
    reached = np.flatnonzero(curve >= level - 1e-12)
    if not len(reached):
        return 1.0
    index = int(reached[0])
    if index == 0:
        return 0.0
    below, above = float(curve[index - 1]), float(curve[index])
    step = 1.0 if above <= below else min(1.0, (level - below) / (above - below))
    return (index - 1 + step) / (len(curve) - 1)
