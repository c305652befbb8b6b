"""Measures a step's time beside its passes where trees grow on the device.

A pass's own time begins where its inputs are there and ends with its logits. Ranking, the kernels
that grow trees and the gaps in which the device waits for the host come on top, for every level;
verdicts, the copy back and the planning of the next step for every step.
"""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch

from outrider.draft.budget.level_host_times import LevelHostTimes


class DeviceMark(Protocol):
    """A place in the device's queue, as `torch.cuda.Event` with times is."""

    def record(self) -> None:
        """Put it behind everything that was launched."""

    def query(self) -> bool:
        """True if the device has come to it."""

    def elapsed_time(self, end: "DeviceMark") -> float:
        """Return the milliseconds from this one to another; the device has come to both."""


@dataclass(slots=True)
class HostMark:
    """A mark where work is over when it was called for."""

    clock: Callable[[], float] = time.perf_counter
    at_s: float = 0.0

    def record(self) -> None:
        """Now."""
        self.at_s = self.clock()

    def query(self) -> bool:
        """Return True: the host's time has passed."""
        return True

    def elapsed_time(self, end: DeviceMark) -> float:
        """Return milliseconds."""
        return (cast("HostMark", end).at_s - self.at_s) * 1e3


def mark_maker(device: torch.device, clock: Callable[[], float]) -> Callable[[], DeviceMark]:
    """Return what makes marks in the queue of a device; the clock is for a CPU."""
    if device.type == "cpu":
        return lambda: HostMark(clock)
    return lambda: cast("DeviceMark", torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """A level on its way. `pass_s`: what its pass should take."""

    num_trees: int
    pass_s: float
    begin: DeviceMark


class LevelClock:
    """Times the levels of drafts on the device without waiting for it; `times` learns from them."""

    def __init__(self, times: LevelHostTimes, make_mark: Callable[[], DeviceMark]) -> None:
        self._times = times
        self._make_mark = make_mark
        self._open: _Level | None = None
        self._pending: deque[tuple[_Level, DeviceMark]] = deque()

    def begin_level(self, *, num_trees: int, pass_s: float) -> None:
        """A level's pass is launched next; the level before it is over."""
        mark = self._end_level()
        self._open = _Level(num_trees=num_trees, pass_s=pass_s, begin=mark)

    def end(self) -> None:
        """Note that all levels of a step are launched."""
        if self._open is not None:
            self._end_level()

    def poll(self) -> None:
        """Learn from the levels that are over."""
        while self._pending and self._pending[0][1].query():
            level, end = self._pending.popleft()
            seconds = level.begin.elapsed_time(end) / 1000  # of milliseconds
            beside_s = seconds - level.pass_s
            self._times.observe(level.num_trees, beside_s, expected_s=level.pass_s)

    def _end_level(self) -> DeviceMark:
        mark = self._make_mark()
        mark.record()
        if self._open is not None:
            self._pending.append((self._open, mark))
            self._open = None
        return mark


@dataclass(slots=True)
class StepClock:
    """Learns what a step takes beside its levels and its large pass, from step to step.

    Every step waits for its verdicts, so the host's clock says when it is over.
    """

    clock: Callable[[], float]
    times: LevelHostTimes = field(default_factory=LevelHostTimes)
    _request_ids: tuple[str, ...] = ()
    _begun_s: float = 0.0
    _expected_s: float | None = None

    def begin(self, request_ids: SequenceOf[str]) -> None:
        """A step of these sequences begins. One of the same sequences before it is over by now."""
        ids, now_s = tuple(request_ids), self.clock()
        if self._expected_s is not None and ids == self._request_ids:
            beside_s = now_s - self._begun_s - self._expected_s
            self.times.observe(len(ids), beside_s, expected_s=self._expected_s)
        self._request_ids, self._begun_s, self._expected_s = ids, now_s, None

    def expect(self, seconds: float) -> None:
        """Say how long the levels and the large pass of the step that has begun should take."""
        self._expected_s = seconds

    def break_off(self) -> None:
        """Learn nothing from the step that has begun: others came behind it."""
        self._expected_s = None
