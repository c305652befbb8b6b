"""Slots of time that amounts are counted by, and counters that pack them into few bytes."""

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from outrider.gateway.tenancy.limits.limit_rules import Period
from outrider.gateway.tenancy.limits.windows import (
    MAX_PERIODS,
    OPEN_WAIT_S,
    WINDOW_S,
    CalendarCounter,
    ClockTimes,
    Counter,
    Days,
    MinuteWindow,
    Months,
    OpenCount,
    Weeks,
)

_FIELDS: Final = 3
"""Numbers of a packed entry: the limit's code, the slot, the amount."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of one period."""

    number: Callable[[ClockTimes], int]
    """Return the slot of a moment."""
    left_s: Callable[[int, ClockTimes], float]
    """Return the seconds until a slot counts no more."""
    span: int = 1
    """Slots that count, the present one included."""
    spare: int = MAX_PERIODS - 1
    """Older slots that are kept, for a clock that is set back."""


def _slots_of(calendar: Days | Weeks | Months, span: int = 1) -> Slots:
    return Slots(
        number=lambda moment: calendar.number(moment.wall_s),
        left_s=lambda slot, moment: calendar.end_s(slot + span - 1) - moment.wall_s,
        span=span,
    )


def packed() -> "array[int]":
    """Return room for the amounts of one owner's limits: nothing yet."""
    return array("q")


class PackedCounter:
    """The counter of one limit, in numbers that several counters may share. Implements `Counter`.

    For few entries: each call reads all of them.
    """

    __slots__ = ("_code", "_numbers", "_slots")

    def __init__(self, slots: Slots, numbers: "array[int]", code: int = 0) -> None:
        """Count in `numbers`, where `code` names this counter's own."""
        self._slots = slots
        self._numbers = numbers
        self._code = code

    def used(self, moment: ClockTimes) -> int:
        """Return the amount that counts now."""
        numbers = self._numbers
        return sum(numbers[at + 2] for at in self._counting(moment))

    def add(self, amount: int, moment: ClockTimes) -> int:
        """Enter an amount now; returns its slot."""
        slot = self._slots.number(moment)
        at = self._place(slot)
        if at is None:
            self._drop(slot - self._slots.span - self._slots.spare)
            self._numbers.extend((self._code, slot, amount))
        else:
            self._numbers[at + 2] += amount
        return slot

    def give_back(self, slot: int, amount: int) -> None:
        """Take back a part of a slot's amount; an empty slot takes no room."""
        at = self._place(slot)
        if at is not None:
            self._numbers[at + 2] -= amount
            if not self._numbers[at + 2]:
                del self._numbers[at : at + _FIELDS]

    def wait_s(self, amount: int, limit: int, moment: ClockTimes) -> float:
        """Return the seconds until enough of the oldest amounts count no more."""
        numbers = self._numbers
        entries = sorted((numbers[at + 1], numbers[at + 2]) for at in self._counting(moment))
        over = amount - limit + sum(entered for _, entered in entries)
        for slot, entered in entries:
            if over <= 0:
                break
            over -= entered
            if over <= 0:
                return self._slots.left_s(slot, moment)
        return 0.0

    def reset_s(self, moment: ClockTimes) -> float:
        """Return the seconds until the newest amount counts no more."""
        slots = [self._numbers[at + 1] for at in self._counting(moment) if self._numbers[at + 2]]
        return self._slots.left_s(max(slots), moment) if slots else 0.0

    def _own(self) -> Iterator[int]:
        """Return where this counter's entries begin."""
        numbers, code = self._numbers, self._code
        return (at for at in range(0, len(numbers), _FIELDS) if numbers[at] == code)

    def _counting(self, moment: ClockTimes) -> Iterator[int]:
        now, numbers = self._slots.number(moment), self._numbers
        first = now - self._slots.span + 1
        return (at for at in self._own() if first <= numbers[at + 1] <= now)

    def _place(self, slot: int) -> int | None:
        return next((at for at in self._own() if self._numbers[at + 1] == slot), None)

    def _drop(self, last: int) -> None:
        """Forget the slots up to this one."""
        for at in reversed([at for at in self._own() if self._numbers[at + 1] <= last]):
            del self._numbers[at : at + _FIELDS]


class Counters:
    """Makes counters; those of one calendar share it."""

    def __init__(self) -> None:
        self._days, self._weeks, self._months = Days(), Weeks(), Months()
        self.slots: dict[Period, Slots] = {
            "minute": Slots(
                number=lambda moment: math.floor(moment.clock_s),
                left_s=lambda second, moment: second + WINDOW_S + 1 - moment.clock_s,
                span=WINDOW_S + 1,
                spare=0,
            ),
            "day": _slots_of(self._days),
            "week": _slots_of(self._weeks),
            "month": _slots_of(self._months),
            "7_days": _slots_of(self._days, 7),
            "30_days": _slots_of(self._days, 30),
            "open": Slots(number=lambda moment: 0, left_s=lambda slot, moment: OPEN_WAIT_S),
        }
        """The slots of each period."""

    def make(self, period: Period) -> Counter:
        """Make an empty counter."""
        match period:
            case "minute":
                return MinuteWindow()
            case "day":
                return CalendarCounter(self._days)
            case "week":
                return CalendarCounter(self._weeks)
            case "month":
                return CalendarCounter(self._months)
            case "7_days" | "30_days":
                return PackedCounter(self.slots[period], packed())
            case "open":
                return OpenCount()
