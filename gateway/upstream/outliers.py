"""Outliers among the replicas of a tier: servers that work, but far slower than the others."""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

NUM_RECENT: Final = 20
_MAX_RATIO: Final = 3.0
_MIN_EXCESS_S: Final = 0.1
"""A replica that is slower by less than this is no outlier."""


class RecentTimes:
    """The last 20 first-token times of one server, and its load when they began.

    Both medians are None before there are 20: a few peaks do not move them. `per_load_s` divides
    each time by the requests in flight, its own included.
    """

    __slots__ = ("_per_load", "_seconds")

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=NUM_RECENT)
        self._per_load: deque[float] = deque(maxlen=NUM_RECENT)

    def add(self, seconds: float, load: int) -> None:
        """Add a time; `load` is at least 1."""
        self._seconds.append(seconds)
        self._per_load.append(seconds / load)

    def clear(self) -> None:
        """Drop all times."""
        self._seconds.clear()
        self._per_load.clear()

    @property
    def is_full(self) -> bool:
        """Return whether there are enough times to judge by."""
        return len(self._seconds) == NUM_RECENT

    @property
    def seconds(self) -> float | None:
        """Return the median time."""
        return median(self._seconds) if self.is_full else None

    @property
    def per_load_s(self) -> float | None:
        """Return the median time for each request that was in flight."""
        return median(self._per_load) if self.is_full else None


def outliers(times: Sequence[RecentTimes]) -> list[int]:
    """Return indices of servers over three times as slow as the others' median.

    The slowest is first. A server must be slow by its times and by its times per load. By its times
    alone, a server with a queue that we made ourselves would be slow. To leave it out only moves
    its queue to the others, which are outliers next. By its times per load alone, an idle server
    among servers that batch their requests would be slow.
    """
    judged = [
        (seconds, per_load_s, index)
        for index, recent in enumerate(times)
        if (seconds := recent.seconds) is not None and (per_load_s := recent.per_load_s) is not None
    ]
    found = []
    for seconds, per_load_s, index in judged:
        others = [other for other in judged if other[2] != index]
        if not others:
            continue
        usual_s = low_median([other[0] for other in others])
        usual_per_load_s = low_median([other[1] for other in others])
        if (
            seconds > _MAX_RATIO * usual_s
            and seconds - usual_s > _MIN_EXCESS_S
            and per_load_s > _MAX_RATIO * usual_per_load_s
        ):
            found.append((seconds, index))
    return [index for _, index in sorted(found, reverse=True)]


def low_median(values: Sequence[float]) -> float:
    """Return the median; of an even number the lower of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]
