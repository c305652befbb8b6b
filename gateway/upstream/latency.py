"""A server's time to its first token: an average that shows peaks, and quantiles."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from typing import Final

_TAU_S: Final = 10.0
"""A figure that was not renewed has 1/e of its weight after this time."""
_MAX_RISE: Final = 4.0
"""One sample multiplies the average by no more than this: one hiccup must not exile a server."""
_NUM_WINDOW: Final = 256
_MAX_AGE_S: Final = 1800.0
_MIN_SAMPLES: Final = 20
_MIN_S: Final = 1e-6


class LatencyEstimate:
    """Learns from times in seconds, of one replica or of a whole tier.

    `ewma_s` follows peaks at once and forgets them in about ten seconds (peak EWMA, as in Twitter's
    Finagle). `quantile` is exact over the last 256 samples of the last half hour. Not thread-safe.
    """

    __slots__ = ("_clock", "_ewma_s", "_renewed_s", "_samples", "_sorted", "num_samples")

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ewma_s: float | None = None
        self._renewed_s = -math.inf
        self._samples: deque[tuple[float, float]] = deque()  # (when, seconds), oldest first
        self._sorted: list[float] = []  # the seconds of `_samples`
        self.num_samples = 0

    def add(self, seconds: float) -> None:
        """Add a measured time."""
        seconds = max(seconds, _MIN_S)
        now = self._clock()
        self._ewma_s = self._blend(seconds, now)
        self._renewed_s = now
        self._keep(seconds, now)

    def add_at_least(self, seconds: float) -> bool:
        """Learn from a wait that was given up after `seconds`; return whether it was counted.

        It counts only where it is informative, that is from the median on, and never lowers the
        average. Without it a server that always loses against its hedges would look as fast as its
        few answers.
        """
        if self._ewma_s is None or not self._sorted:
            return False
        if seconds < self._sorted[(len(self._sorted) - 1) // 2]:
            return False
        if seconds > self._ewma_s:
            self.add(seconds)
        else:
            self._keep(seconds, self._clock())
        return True

    @property
    def ewma_s(self) -> float | None:
        """Return the average that follows peaks; None before the first sample."""
        return self._ewma_s

    def quantile(self, share: float) -> float | None:
        """Return the time that this share of samples does not exceed; None below 20 samples."""
        self._expire(self._clock())
        count = len(self._sorted)
        if count < _MIN_SAMPLES:
            return None
        return self._sorted[min(count - 1, max(0, math.ceil(share * count) - 1))]

    def expected_s(self, typical_s: float, now_s: float) -> float:
        """Return the time to expect at `now_s`: an average that ages towards `typical_s`.

        So a server that was slow once is tried again, and an old figure is not held against it.
        """
        if self._ewma_s is None:
            return typical_s
        trust = math.exp((self._renewed_s - now_s) / _TAU_S)
        return typical_s + trust * (self._ewma_s - typical_s)

    def _blend(self, seconds: float, now: float) -> float:
        """Move the average: up at once, within a limit; down by the time since the last sample."""
        before = self._ewma_s
        if before is None:
            return seconds
        if seconds >= before:
            return min(seconds, _MAX_RISE * before)
        keep = math.exp((self._renewed_s - now) / _TAU_S)
        return seconds + keep * (before - seconds)

    def _keep(self, seconds: float, now: float) -> None:
        """Add it to the window of the quantiles."""
        self._samples.append((now, seconds))
        insort(self._sorted, seconds)
        self.num_samples += 1
        if len(self._samples) > _NUM_WINDOW:
            self._drop_oldest()
        self._expire(now)

    def _expire(self, now: float) -> None:
        while self._samples and now - self._samples[0][0] > _MAX_AGE_S:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, seconds = self._samples.popleft()
        del self._sorted[bisect_left(self._sorted, seconds)]
