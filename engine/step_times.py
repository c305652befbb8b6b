"""How long a pass takes as a function of its rows: measured once, at start-up."""

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.runner import ForwardSlice, ModelRunner

_PROFILED_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_NUM_REPEATS = 3


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
    seconds = []
    try:
        view.reserve(context + max(sizes))
        for done, rows in enumerate(sizes):
            piece = ForwardSlice(
                view=view, token_ids=[0] * rows, start_slot=context, num_logit_rows=rows
            )
            runner.forward([piece])  # warm-up: kernels are chosen and packed by size
            samples = []
            for _ in range(_NUM_REPEATS):
                started_s = time.perf_counter()
                runner.forward([piece]).logits[0, 0].item()  # waits for the device
                samples.append(time.perf_counter() - started_s)
            seconds.append(statistics.median(samples))
            if on_progress is not None:
                on_progress(done + 1, len(sizes))
    finally:
        view.release()
    return StepTimeCurve.from_points(sizes, seconds)
