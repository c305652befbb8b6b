"""Does the router still do what its calibration promised? Numbers over a window, and an autopilot.

Three things are watched without any label: the share of answers that the large model gave against
the calibrated one; how far the prompts' qualities moved from those of the calibration (population
stability index: sum of (o - e) * ln(o / e) over the deciles, above 0.25 a shift by convention);
and for escalated answers, what the watch believed of them against how much of them the large model
wrote again.
"""

import logging
import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from outrider.router.calibration import ALWAYS_LARGE
from outrider.router.dial import Dial, Setting, quantile

logger = logging.getLogger(__name__)

WINDOW: Final = 1024
_MIN_REQUESTS: Final = 128  # with fewer, shares are mostly noise
_CHECK_EVERY: Final = 32
MAX_SHIFT: Final = 0.25
"""Of the stability index: above it the qualities have shifted, by convention."""
_SHARE_SLACK: Final = 0.1
_LEAST_SHARE: Final = 1e-3  # of an empty decile: the logarithm wants something
_LOG_EVERY_S: Final = 600.0
_BISECTIONS: Final = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardOutcome:
    """Routing of one answer. `confidence`: the watch's last estimate, None without one."""

    quality: float
    is_strong: bool
    confidence: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardNumbers:
    """A summary of the window; None where there is nothing to say yet.

    The escalated figures are means over escalated answers.
    """

    num_outcomes: int = 0
    strong_share: float | None = None
    """The share of answers that the large model gave."""
    expected_share: float | None = None
    """The strong share that the calibration predicts."""
    quality_shift: float | None = None
    """The stability index."""
    escalated_confidence: float | None = None
    """The confidence that the watch had."""
    escalated_agreement: float | None = None
    """The share of the answers' tokens that the large model wrote too."""
    threshold: float | None = None
    is_drifting: bool = False
    """A share or the shift passed its limit."""


class Autopilot:
    """Keeps the large model's share of the answers: a quantile of what came lately.

    Which setting would have sent `target_share` of the window's requests to the large model? Where
    requests were watched their confidence is known; else the text's quality stands for it.
    """

    def __init__(self, target_share: float, start: Setting, dial: Dial | None = None) -> None:
        """Raises ValueError for a share outside [0, 1]."""
        if not 0.0 <= target_share <= 1.0:
            raise ValueError(f"target_share={target_share} must be in [0, 1]")
        self.target_share = target_share
        self.setting = start
        self._dial = dial

    def turn(self, outcomes: Sequence[GuardOutcome]) -> None:
        """Choose the setting anew; cheap enough to be done between two requests."""
        if self._dial is None or self.setting.band is None:
            threshold = quantile(sorted(map(_last_word, outcomes)), self.target_share)
            self.setting = Setting(threshold=threshold, strong_share=self.target_share)
            return
        low, high = 0.0, ALWAYS_LARGE
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if _share_at(self._dial.at_threshold(middle), outcomes) < self.target_share:
                low = middle
            else:
                high = middle
        found = self._dial.at_threshold(high)
        self.setting = Setting(
            threshold=found.threshold, band=found.band, strong_share=self.target_share
        )


def _share_at(setting: Setting, outcomes: Sequence[GuardOutcome]) -> float:
    """Return the large model's share of these requests under another setting."""
    low, high = setting.band or (setting.threshold, setting.threshold)
    num_strong = 0
    for outcome in outcomes:
        is_watched = low <= outcome.quality < high
        is_weak = is_watched and _last_word(outcome) < setting.threshold
        num_strong += outcome.quality < low or is_weak
    return num_strong / len(outcomes)


def _last_word(outcome: GuardOutcome) -> float:
    return outcome.quality if outcome.confidence is None else outcome.confidence


class RouteGuard:
    """Takes in what was decided, gives numbers, says so when they drift. For one event loop."""

    def __init__(
        self,
        *,
        current_setting: Callable[[], Setting],
        deciles: Sequence[float] | None = None,
        autopilot: Autopilot | None = None,
        clock: Callable[[], float] = time.monotonic,
        window: int = WINDOW,
    ) -> None:
        """`deciles`: of the calibration's text qualities, [11]; None for a router without them."""
        self._current_setting = current_setting
        self._autopilot = autopilot
        self._clock = clock
        self._outcomes: deque[GuardOutcome] = deque(maxlen=window)
        self._agreements: deque[tuple[float, float]] = deque(maxlen=window)
        self._num_seen = 0
        self._last_log_s = -math.inf
        self._edges: list[float] = []
        self._expected: list[float] = []
        if deciles is not None:
            # Equal deciles are one bin: a tenth of the prompts for each that lies in it.
            self._edges = sorted(set(deciles[1:-1]))
            counts = [0] * (len(self._edges) + 1)
            for start in deciles[:-1]:
                counts[bisect_right(self._edges, start)] += 1
            self._expected = [count / (len(deciles) - 1) for count in counts]

    def saw(self, outcome: GuardOutcome) -> None:
        """An answer was routed by the server's own setting."""
        self._outcomes.append(outcome)
        self._num_seen += 1
        if self._num_seen % _CHECK_EVERY or len(self._outcomes) < _MIN_REQUESTS:
            return
        if self._autopilot is not None:
            self._autopilot.turn(self._outcomes)
        self._log_drift()

    def saw_all(self, outcomes: Iterable[GuardOutcome]) -> None:
        """Take in what was decided before; nothing is turned and nothing logged."""
        self._outcomes.extend(outcomes)

    def saw_escalated(self, confidence: float, agreement: float) -> None:
        """An escalated answer has ended: the watch's belief, the share that was written again."""
        self._agreements.append((confidence, agreement))

    def numbers(self) -> GuardNumbers:
        """The window as it is now."""
        setting = self._current_setting()
        num_outcomes = len(self._outcomes)
        num_escalated = len(self._agreements)
        is_known = num_outcomes > 0
        observed = sum(o.is_strong for o in self._outcomes) / num_outcomes if is_known else None
        shift = self._shift() if is_known else None
        return GuardNumbers(
            num_outcomes=num_outcomes,
            strong_share=observed,
            expected_share=setting.strong_share,
            quality_shift=shift,
            escalated_confidence=(
                sum(c for c, _ in self._agreements) / num_escalated if num_escalated else None
            ),
            escalated_agreement=(
                sum(a for _, a in self._agreements) / num_escalated if num_escalated else None
            ),
            threshold=setting.threshold,
            is_drifting=num_outcomes >= _MIN_REQUESTS
            and (
                _is_off(observed, setting.strong_share, num_outcomes) or (shift or 0.0) > MAX_SHIFT
            ),
        )

    def _shift(self) -> float | None:
        """The population stability index; None without deciles to compare with."""
        if not self._expected:
            return None
        counts = [0] * len(self._expected)
        for outcome in self._outcomes:
            counts[bisect_right(self._edges, outcome.quality)] += 1
        total = 0.0
        for count, expected in zip(counts, self._expected, strict=True):
            observed = max(count / len(self._outcomes), _LEAST_SHARE)
            expected = max(expected, _LEAST_SHARE)
            total += (observed - expected) * math.log(observed / expected)
        return total

    def _log_drift(self) -> None:
        now_s = self._clock()
        if now_s - self._last_log_s < _LOG_EVERY_S:
            return
        numbers = self.numbers()
        if not numbers.is_drifting:
            return
        self._last_log_s = now_s
        logger.warning(
            "routing drifts from its calibration requests=%d strong_share=%s expected_share=%s "
            "quality_shift=%s threshold=%s advice=collect labels and calibrate again",
            numbers.num_outcomes,
            _figure(numbers.strong_share),
            _figure(numbers.expected_share),
            _figure(numbers.quality_shift),
            _figure(numbers.threshold),
        )


def _is_off(observed: float | None, expected: float | None, num_outcomes: int) -> bool:
    """Return whether a share deviates from the expected one by more than chance and some slack."""
    if observed is None or expected is None:
        return False
    deviation = math.sqrt(expected * (1.0 - expected) / num_outcomes)
    return abs(observed - expected) > _SHARE_SLACK + 3.0 * deviation


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
