"""Slots of time that amounts are counted by, and counters that pack them into few bytes."""

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from outrider.gateway.tenancy.limits.limit_rules import Period
from outrider.gateway.tenancy.limits.windows import (
    WINDOW_S,
    ClockTimes,
    Counter,
    Days,
    MinuteWindow,
    Months,
    Weeks,
)

_FIELDS: Final = 3
"""Numbers of a packed entry: the limit's code, the slot, the amount."""
_SPARE: Final = 3
"""Days, weeks or months that are kept beside those that count, for a clock that is set back."""
_OPEN_WAIT_S: Final = 1.0
"""The end of a running request is unknown; a retry once a second is cheap."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of one period."""

    number: Callable[[ClockTimes], int]
    """Return the slot of a moment."""
    left_s: Callable[[int, ClockTimes], float]
    """Return the seconds until a slot counts no more."""
    span: int = 1
    """Slots that count, the present one included."""
    spare: int = _SPARE
    """Further slots that are kept."""


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
            self._drop_others(moment)
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

    def _drop_others(self, moment: ClockTimes) -> None:
        """Forget the slots that do not count now, but for the latest ones that were entered."""
        counting = set(self._counting(moment))
        others = [at for at in self._own() if at not in counting]
        for at in reversed(others[: max(0, len(others) - self._slots.spare)]):
            del self._numbers[at : at + _FIELDS]


class Counters:
    """Makes counters. Those of months share what is known of the present one."""

    def __init__(self) -> None:
        days = Days()
        self.slots: dict[Period, Slots] = {
            "minute": Slots(
                number=lambda moment: math.floor(moment.clock_s),
                left_s=lambda second, moment: second + WINDOW_S + 1 - moment.clock_s,
                span=WINDOW_S + 1,
                spare=0,
            ),
            "day": _slots_of(days),
            "week": _slots_of(Weeks()),
            "month": _slots_of(Months()),
            "7_days": _slots_of(days, 7),
            "30_days": _slots_of(days, 30),
            "open": Slots(number=lambda moment: 0, left_s=lambda slot, moment: _OPEN_WAIT_S),
        }
        """The slots of each period."""

    def make(self, period: Period) -> Counter:
        """Make an empty counter. Most limits are of a minute, which has the most slots."""
        return MinuteWindow() if period == "minute" else PackedCounter(self.slots[period], packed())
