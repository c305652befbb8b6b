"""What a limit's counter does, sliding minutes, and UTC's days, weeks and months."""

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple, Protocol

WINDOW_S: Final = 60
_NUM_SLOTS: Final = WINDOW_S + 1
_DAY_S: Final = 86_400
_WEEK_DAYS: Final = 7
_MONDAY: Final = 3
"""Days of its week before 1970-01-01, a Thursday."""


class ClockTimes(NamedTuple):
    """One time on two clocks, in seconds: a monotonic one, and that of the calendar (UTC)."""

    clock_s: float
    wall_s: float


class Counter(Protocol):
    """The amount used or reserved under one limit, entered by slots of time.

    Not thread-safe.
    """

    def used(self, moment: ClockTimes) -> int:
        """Return the amount that counts now."""

    def add(self, amount: int, moment: ClockTimes) -> int:
        """Enter an amount now; returns its slot."""

    def give_back(self, slot: int, amount: int) -> None:
        """Take back a part of a slot's amount. Does nothing where the slot no longer counts."""

    def wait_s(self, amount: int, limit: int, moment: ClockTimes) -> float:
        """Return the seconds until `amount` (at most `limit`) fits if nothing else changes."""

    def reset_s(self, moment: ClockTimes) -> float:
        """Return the seconds until the counter is empty; 0 where it is."""


class MinuteWindow:
    """A sliding minute in slots of a second.

    An amount counts in its own second and in the 60 after it. So the amounts of any 60 seconds,
    wherever they begin, never exceed the limit.
    """

    __slots__ = ("_amounts", "_last", "_total")

    def __init__(self) -> None:
        self._amounts = [0] * _NUM_SLOTS  # of second s in s % 61
        self._last = -(2**62)  # before every clock
        self._total = 0

    def used(self, moment: ClockTimes) -> int:
        """Return the amount that counts now."""
        self._advance(math.floor(moment.clock_s))
        return self._total

    def add(self, amount: int, moment: ClockTimes) -> int:
        """Enter an amount now; returns its second."""
        self._advance(math.floor(moment.clock_s))
        self._amounts[self._last % _NUM_SLOTS] += amount
        self._total += amount
        return self._last

    def give_back(self, slot: int, amount: int) -> None:
        """Take back a part of a second's amount."""
        if slot > self._last - _NUM_SLOTS:
            self._amounts[slot % _NUM_SLOTS] -= amount
            self._total -= amount

    def wait_s(self, amount: int, limit: int, moment: ClockTimes) -> float:
        """Return the seconds until enough of the oldest amounts have expired."""
        over = self.used(moment) + amount - limit
        for second, entered in self._seconds():
            if over <= 0:
                break
            over -= entered
            if over <= 0:
                return second + _NUM_SLOTS - moment.clock_s
        return 0.0

    def reset_s(self, moment: ClockTimes) -> float:
        """Return the seconds until the newest amount has expired."""
        if not self.used(moment):
            return 0.0
        newest = self._last
        while not self._amounts[newest % _NUM_SLOTS]:
            newest -= 1
        return newest + _NUM_SLOTS - moment.clock_s

    def _seconds(self) -> Iterator[tuple[int, int]]:
        """Yield (second, its amount), oldest first."""
        for second in range(self._last - WINDOW_S, self._last + 1):
            yield second, self._amounts[second % _NUM_SLOTS]

    def _advance(self, second: int) -> None:
        """Drop past seconds. A clock that goes back stands still here."""
        behind = second - self._last
        if behind <= 0:
            return
        if behind >= _NUM_SLOTS or not self._total:
            self._amounts = [0] * _NUM_SLOTS
            self._total = 0
        else:
            for past in range(self._last + 1, second + 1):
                slot = past % _NUM_SLOTS
                self._total -= self._amounts[slot]
                self._amounts[slot] = 0
        self._last = second


class Days:
    """UTC's days, numbered from 1970 on."""

    @staticmethod
    def number(wall_s: float) -> int:
        """Return the day's number."""
        return math.floor(wall_s) // _DAY_S

    @staticmethod
    def end_s(number: int) -> float:
        """Return the end of the period, in seconds since 1970."""
        return float((number + 1) * _DAY_S)


class Weeks:
    """UTC's weeks, from Monday on (ISO 8601), numbered from that of 1970-01-01 on."""

    @staticmethod
    def number(wall_s: float) -> int:
        """Return the week's number."""
        return (Days.number(wall_s) + _MONDAY) // _WEEK_DAYS

    @staticmethod
    def end_s(number: int) -> float:
        """Return the end of the period, in seconds since 1970."""
        return Days.end_s((number + 1) * _WEEK_DAYS - _MONDAY - 1)


class Months:
    """UTC's months, numbered from year 0 on. Remembers the latest month's bounds."""

    __slots__ = ("_end_s", "_number", "_start_s")

    def __init__(self) -> None:
        self._start_s = self._end_s = 0.0
        self._number = -1

    def number(self, wall_s: float) -> int:
        """Return the month's number."""
        if not self._start_s <= wall_s < self._end_s:
            date = datetime.fromtimestamp(wall_s, UTC)
            self._number = date.year * 12 + date.month - 1
            self._start_s = datetime(date.year, date.month, 1, tzinfo=UTC).timestamp()
            self._end_s = self._after(self._number)
        return self._number

    def end_s(self, number: int) -> float:
        """Return the end of the period, in seconds since 1970."""
        return self._end_s if number == self._number else self._after(number)

    @staticmethod
    def _after(number: int) -> float:
        year, month = divmod(number + 1, 12)
        return datetime(year, month + 1, 1, tzinfo=UTC).timestamp()
