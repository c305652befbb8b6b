"""Slots: ten thousandths of all units, and the experiments that own them.

A unit's slot is a hash of it, so a share of the slots is that share of the units. An owner that
gets more slots keeps those it has, and one that gets fewer gives up the last of them: no unit moves
without need.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

NUM_SLOTS: Final = 10_000
Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of slots, in ascending order, apart from each other."""


class NoRoomError(ValueError):
    """Fewer slots are free than are wanted."""

    def __init__(self, *, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} of {NUM_SLOTS} slots are wanted, {free} are free")
        self.wanted = wanted
        self.free = free


def count_of(share: float) -> int:
    """Return the number of slots of a share in [0, 1]: at least one for any share above 0."""
    return 0 if share <= 0 else max(1, min(NUM_SLOTS, round(share * NUM_SLOTS)))


def size_of(ranges: Ranges) -> int:
    """Return the number of slots."""
    return sum(end - start for start, end in ranges)


def resized(own: Ranges, count: int, taken: Iterable[Ranges]) -> Ranges:
    """Return `count` slots, as many of them as possible from `own`, none from `taken`.

    Raises NoRoomError where there are not so many.
    """
    others = {slot for ranges in taken for slot in _slots_in(ranges)}
    mine = [slot for slot in _slots_in(own) if slot not in others]
    if count <= len(mine):
        return _ranges_of(mine[:count])
    kept = set(mine)
    free = [slot for slot in range(NUM_SLOTS) if slot not in others and slot not in kept]
    if count > len(mine) + len(free):
        raise NoRoomError(wanted=count, free=len(mine) + len(free))
    return _ranges_of(sorted([*mine, *free[: count - len(mine)]]))


def dealt(weights: Mapping[str, float], before: Mapping[str, Ranges]) -> dict[str, Ranges]:
    """Return all slots by arm, in proportion to positive weights, keeping slots of `before`.

    Every arm has one slot at least.
    """
    counts = _counts(weights)
    kept = {name: list(_slots_in(before.get(name, ())))[:count] for name, count in counts.items()}
    used = {slot for slots in kept.values() for slot in slots}
    free = (slot for slot in range(NUM_SLOTS) if slot not in used)
    for name, count in counts.items():
        kept[name].extend(islice(free, count - len(kept[name])))
    return {name: _ranges_of(sorted(slots)) for name, slots in kept.items()}


def shares_of(arm_slots: Mapping[str, Ranges]) -> dict[str, float]:
    """Return each arm's share of the slots."""
    return {name: size_of(ranges) / NUM_SLOTS for name, ranges in arm_slots.items()}


def _counts(weights: Mapping[str, float]) -> dict[str, int]:
    """Return slots by weight, by largest remainders (Hamilton's method), one at least."""
    total = math.fsum(weights.values())
    exact = {name: weight / total * NUM_SLOTS for name, weight in weights.items()}
    counts = {name: math.floor(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: NUM_SLOTS - sum(counts.values())]:
        counts[name] += 1
    for name in [name for name, count in counts.items() if count == 0]:
        counts[max(counts, key=counts.__getitem__)] -= 1
        counts[name] = 1
    return counts


def _slots_in(ranges: Ranges) -> Iterable[int]:
    for start, end in ranges:
        yield from range(start, end)


def _ranges_of(slots: Sequence[int]) -> Ranges:
    """Return ascending slots as ranges."""
    ranges: list[tuple[int, int]] = []
    for slot in slots:
        if ranges and ranges[-1][1] == slot:
            ranges[-1] = (ranges[-1][0], slot + 1)
        else:
            ranges.append((slot, slot + 1))
    return tuple(ranges)
