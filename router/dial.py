"""Conversion of a target into a setting, interpolated in a router's calibration table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.router.calibration import ALWAYS_LARGE, Calibration, OperatingPoint

ScoreBand = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Thresholds that the policy compares qualities with, as in `OperatingPoint`."""

    threshold: float
    band: ScoreBand | None = None
    strong_share: float | None = None
    """Expected share of answers from the large tier; None if not measured."""
    relative_accuracy: float | None = None
    """Expected, as in `OperatingPoint`; None if not measured."""

    def __post_init__(self) -> None:
        """Raise ValueError for a threshold out of range."""
        if not 0.0 <= self.threshold <= ALWAYS_LARGE:
            raise ValueError(f"threshold={self.threshold} must be in [0, {ALWAYS_LARGE}]")

    def for_gain_factor(self, factor: float) -> "Setting":
        """Return the setting for `factor` times the required gain of the large model."""

        def moved(quality: float) -> float:
            # A quality is 1 - gain; nothing below 0 or above "always large" means anything.
            return min(max(1.0 - factor * (1.0 - quality), 0.0), ALWAYS_LARGE)

        band = None if self.band is None else (moved(self.band[0]), moved(self.band[1]))
        return Setting(threshold=moved(self.threshold), band=band)


class Dial:
    """The settings of one calibration, from always-small to always-large."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        points = sorted(calibration.points or (calibration.chosen,), key=lambda p: p.strong_share)
        self._points: Sequence[OperatingPoint] = points

    @property
    def chosen(self) -> Setting:
        """The calibration's own choice."""
        return _setting(self.calibration.chosen)

    def at_share(self, share: float) -> Setting:
        """The setting by which this share of the prompts gets the large model's answer."""
        return self._where(lambda point: point.strong_share, share)

    def at_quality(self, relative_accuracy: float) -> Setting:
        """The least strong share that keeps this much of the large model's accuracy."""
        return self._where(lambda point: point.relative_accuracy, relative_accuracy)

    def at_threshold(self, threshold: float) -> Setting:
        """The setting with this threshold; a band and shares that go with it."""
        found = self._where(lambda point: point.threshold, threshold)
        return replace(found, threshold=threshold)

    def at_cost(self, max_cost_usd: float, cost_usd: Callable[[Setting], float]) -> Setting:
        """Return the largest strong share with a mean cost of at most this; else always-small."""
        settings = [_setting(point) for point in self._points]
        costs = [cost_usd(setting) for setting in settings]
        within = [index for index, cost in enumerate(costs) if cost <= max_cost_usd]
        if not within:
            return settings[0]
        last = within[-1]
        if last + 1 == len(settings) or costs[last + 1] <= costs[last]:
            return settings[last]
        weight = (max_cost_usd - costs[last]) / (costs[last + 1] - costs[last])
        return _between(self._points[last], self._points[last + 1], weight)

    def by_text(self, setting: Setting) -> Setting:
        """Return a setting without a watch: about the same strong share, from the text alone."""
        share = setting.strong_share
        if self.calibration.stage == "text" or share is None:
            return replace(setting, band=None)
        deciles = self.calibration.quality_deciles
        if share >= 1.0:
            return Setting(threshold=ALWAYS_LARGE, strong_share=1.0)
        steps = len(deciles) - 1
        place = min(int(share * steps), steps - 1)
        weight = share * steps - place
        threshold = deciles[place] + weight * (deciles[place + 1] - deciles[place])
        return Setting(threshold=threshold, strong_share=share)

    def _where(self, value: Callable[[OperatingPoint], float], wanted: float) -> Setting:
        """The first place, from always-small on, where the value reaches what is wanted."""
        previous: OperatingPoint | None = None
        for point in self._points:
            reached = value(point)
            if reached >= wanted:
                if previous is None or reached == wanted:
                    return _setting(point)
                before = value(previous)
                return _between(previous, point, (wanted - before) / (reached - before))
            previous = point
        return _setting(self._points[-1])


def _between(low: OperatingPoint, high: OperatingPoint, weight: float) -> Setting:
    """Weight 0 is `low`, 1 is `high`."""

    def mixed(one: float, other: float) -> float:
        return one + weight * (other - one)

    band = None
    if low.band is not None and high.band is not None:
        band = (mixed(low.band[0], high.band[0]), mixed(low.band[1], high.band[1]))
    return Setting(
        threshold=mixed(low.threshold, high.threshold),
        band=band,
        strong_share=mixed(low.strong_share, high.strong_share),
        relative_accuracy=mixed(low.relative_accuracy, high.relative_accuracy),
    )


def _setting(point: OperatingPoint) -> Setting:
    return Setting(
        threshold=point.threshold,
        band=point.band,
        strong_share=point.strong_share,
        relative_accuracy=point.relative_accuracy,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which about this share of sorted `values` lies; ALWAYS_LARGE beyond all."""
    if share >= 1.0 or not values:
        return ALWAYS_LARGE
    return values[min(int(share * len(values)), len(values) - 1)]
