"""How long a pass takes by its rows: measured at start-up, corrected while running."""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.runner import ForwardSlice, ModelRunner

_PROFILED_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_NUM_REPEATS = 5
# A model that is slow enough to need longer is timed with fewer repeats.
_ENOUGH_S = 4.0

# How fast a running correction learns, and how fast it forgets a size that is not used any more.
_SCALE_WEIGHT = 0.02
_RESIDUAL_WEIGHT = 0.1
_RESIDUAL_KEPT = 0.998
_MAX_SURPRISE = math.log(4.0)
_TABLE_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeCurve:
    """Seconds of a pass by its number of rows: measured points, straight lines between them.

    `num_rows` ascends and `seconds` never falls: a smaller pass cannot cost more than a larger
    one, whatever a noisy measurement says.
    """

    num_rows: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def from_points(cls, num_rows: Sequence[int], seconds: Sequence[float]) -> "StepTimeCurve":
        """Smooth measured points to a curve that never falls (running minimum from the right)."""
        smoothed = list(seconds)
        for index in range(len(smoothed) - 2, -1, -1):
            smoothed[index] = min(smoothed[index], smoothed[index + 1])
        return cls(num_rows=tuple(num_rows), seconds=tuple(smoothed))

    def __call__(self, num_rows: int) -> float:
        """Expected seconds; beyond the last point the last slope goes on."""
        index = min(max(bisect_left(self.num_rows, num_rows), 1), len(self.num_rows) - 1)
        left, right = self.num_rows[index - 1], self.num_rows[index]
        low, high = self.seconds[index - 1], self.seconds[index]
        return low + (high - low) * (max(num_rows, self.num_rows[0]) - left) / (right - left)


class RunningStepTimes:
    """A curve that follows what passes really take.

    One factor for all sizes follows the machine (its clock, its other work, longer contexts); one
    for each measured size corrects the shape, and fades while that size is not used, so that one
    bad moment does not rule a size out for ever.
    """

    def __init__(self, curve: StepTimeCurve) -> None:
        self._curve = curve
        self._log_scale = 0.0
        self._log_residuals = np.zeros(len(curve.num_rows))
        # A budget asks for thousands of row counts a step, so the answers stand in a table.
        self._base = np.array([curve(rows) for rows in range(_TABLE_ROWS)])
        self._nearest_of = np.array([self._nearest(rows) for rows in range(_TABLE_ROWS)])
        self._table: list[float] = self._base.tolist()
        self._table_is_stale = False

    def __call__(self, num_rows: int) -> float:
        """Expected seconds of a pass with so many rows."""
        if num_rows >= _TABLE_ROWS:
            residual = float(self._log_residuals[-1])
            return self._curve(num_rows) * math.exp(self._log_scale + residual)
        if self._table_is_stale:
            residuals = self._log_residuals[self._nearest_of]
            self._table = (self._base * np.exp(self._log_scale + residuals)).tolist()
            self._table_is_stale = False
        return self._table[num_rows]

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn from one pass; sizes beyond the curve (prompts) say nothing about it."""
        if num_rows > self._curve.num_rows[-1]:
            return
        surprise = math.log(max(seconds, 1e-9) / self(num_rows))
        surprise = min(max(surprise, -_MAX_SURPRISE), _MAX_SURPRISE)
        self._log_scale += _SCALE_WEIGHT * surprise
        self._log_residuals *= _RESIDUAL_KEPT
        self._log_residuals[self._nearest(num_rows)] += _RESIDUAL_WEIGHT * surprise
        self._table_is_stale = True

    def _nearest(self, num_rows: int) -> int:
        """The measured size that stands for `num_rows`: the smallest that is not below it."""
        return min(bisect_left(self._curve.num_rows, num_rows), len(self._curve.num_rows) - 1)


@torch.inference_mode()
def profile_step_times(
    runner: ModelRunner,
    *,
    num_context_tokens: int = 128,
    on_progress: Callable[[int, int], None] | None = None,
) -> StepTimeCurve:
    """Time passes of several sizes on an idle runner (`on_progress(done, total)`)."""
    assert runner.max_context is not None  # at most what the cache holds
    sizes = [rows for rows in _PROFILED_ROWS if rows <= max(runner.max_context // 2, 2)]
    context = min(num_context_tokens, runner.max_context - max(sizes))
    view = runner.new_view("step-times")
    samples: dict[int, list[float]] = {rows: [] for rows in sizes}
    try:
        view.reserve(context + max(sizes))
        # All sizes in turn, so that a busy moment of the machine does not fall on one of them; the
        # first round warms up (kernels are chosen and packed by size).
        begun_s = time.perf_counter()
        for turn in range(_NUM_REPEATS + 1):
            if turn > 1 and time.perf_counter() - begun_s > _ENOUGH_S:
                break
            for done, rows in enumerate(sizes):
                piece = ForwardSlice(
                    view=view, token_ids=[0] * rows, start_slot=context, num_logit_rows=rows
                )
                started_s = time.perf_counter()
                runner.forward([piece]).logits[0, 0].item()  # waits for the device
                if turn:
                    samples[rows].append(time.perf_counter() - started_s)
                if on_progress is not None:
                    on_progress(turn * len(sizes) + done + 1, (_NUM_REPEATS + 1) * len(sizes))
    finally:
        view.release()
    # Whatever disturbs a pass makes it longer, so the shortest one says most about its size.
    return StepTimeCurve.from_points(sizes, [min(samples[rows]) for rows in sizes])


def follow_step_times(
    runner: ModelRunner, *, on_progress: Callable[[int, int], None] | None = None
) -> RunningStepTimes:
    """Profile a runner and go on learning from every pass that it makes."""
    times = RunningStepTimes(profile_step_times(runner, on_progress=on_progress))
    runner.on_pass = times.observe
    return times
