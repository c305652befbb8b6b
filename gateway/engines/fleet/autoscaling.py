"""How many replicas a fleet needs so that first tokens come in time. No clock and no Ray in it."""

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFigures:
    """Measurements since the last decision."""

    interval_s: float
    """Seconds since then."""
    work_s: float
    """Seconds that one replica would need for the requests that came."""
    wait_s: float
    """The longest queue of a replica, in seconds of work."""
    num_open: int
    """Requests that are not answered."""
    num_ready: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits:
    """Bounds of `ScaleToLatency`."""

    least: int = 1
    most: int = 16
    ttft_s: float = 2.0
    """The objective."""
    start_s: float = 30.0
    """Until a replica serves."""
    utilisation: float = 0.7
    """The share of its time that a replica is to work."""
    wait_share: float = 0.5
    """A queue may be as long as this share of the objective."""
    down_after_s: float = 120.0
    """Replicas go when they were not needed for so long."""

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        if not 0 <= self.least <= self.most or self.most < 1:
            raise ValueError(f"least={self.least} and most={self.most}: 0 <= least <= most >= 1")
        if not 0.0 < self.utilisation <= 1.0:
            raise ValueError(f"utilisation={self.utilisation} must be in (0, 1]")


class ScaleToLatency:
    """Follows the work that comes, and adds what it takes to clear a queue that is too long.

    Up at once, down by the most that was wanted of late: a replica that goes takes its cache along.
    """

    def __init__(self, limits: ScalingLimits) -> None:
        self.limits = limits
        self._now_s = 0.0
        self._load: float | None = None
        self._wanted: deque[tuple[float, int]] = deque()

    def decide(self, figures: FleetFigures) -> int:
        """Return how many replicas there should be, those that start included."""
        limits = self.limits
        self._now_s += figures.interval_s
        load = figures.work_s / figures.interval_s
        # Rises are believed at once, falls after some intervals: bursts come in groups.
        self._load = load if self._load is None else max(load, 0.8 * self._load + 0.2 * load)
        wanted = math.ceil(self._load / limits.utilisation - 1e-9)
        if figures.wait_s > limits.wait_share * limits.ttft_s:
            backlog_s = figures.wait_s * max(figures.num_ready, 1)
            wanted += math.ceil(backlog_s / max(limits.start_s, limits.ttft_s))
        if figures.num_open:
            wanted = max(wanted, 1)
        elif self._load < 1e-3 or (wanted <= 1 and not figures.work_s):
            wanted = 0
        wanted = min(max(wanted, limits.least), limits.most)
        self._wanted.append((self._now_s, wanted))
        while self._wanted[0][0] < self._now_s - limits.down_after_s:
            self._wanted.popleft()
        return max(number for _, number in self._wanted)
