"""Pass times by number of rows: measured at start-up, corrected while running."""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.runner import ForwardSlice, ModelRunner

_PROFILED_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_NUM_REPEATS = 5
_TOKENS_SEED = 17
_CPU_WARM_UP_ROWS = 16
# A model that is slow enough to need longer is timed with fewer repeats.
_ENOUGH_S = 4.0
# A measurement is quiet if this thread had a core for so much of it: what other programs took is no
# property of the machine.
_QUIET_SHARE = 0.85
# Saved times are measured anew where a pass takes less than this share of them.
_BEATEN_SHARE = 0.8

# How far a pass is believed. Whatever disturbs makes it longer, so one that is faster by more than
# noise proves its time. What took next to none was measured by a clock that jumped.
_FASTER_WEIGHT = 0.5
_SLOWER_WEIGHT = 0.1
_MAX_SURPRISE = math.log(2.0)
_MUCH_FASTER = -math.log(1.25)
_IMPOSSIBLE = -math.log(8.0)
# What a pass says of other sizes: so much of all of them, the rest fades by octaves. That a
# measurement was wrong, which is so many passes old, says nothing of sizes that were used since.
_COMMON = 0.5
_OLD = 100
# A size may cost so much less than is known (a logarithm), the more passes it was not used in.
_MORE_DOUBT = 0.001
_MOST_DOUBT = 0.1
_FIRST_DOUBT = math.log(4.0)  # of a size that was never used
_BUSY_DOUBT = math.log(2.0)  # of one whose measurement was not quiet, from the start on
_TABLE_ROWS = 8192
_LEAST_TABLE_ROWS = 256

# The price of context is measured with so many rows, between the usual context and a long one.
_CONTEXT_ROWS = 16
_LONG_CONTEXT = 1024
_LEAST_CONTEXT_RATIO = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeCurve:
    """Seconds of a pass by its number of rows: measured points, straight lines between them."""

    num_rows: tuple[int, ...]
    """Ascends."""
    seconds: tuple[float, ...]
    """Never falls: a smaller pass cannot cost more than a larger one, whatever a noisy measurement
    says."""
    context: float = 0.0
    """The tokens that the points' rows see."""
    row_context_s: float = 0.0
    """Seconds that every row costs more for each token beyond `context`."""
    is_quiet: bool = True
    """False where other programs took the processor meanwhile: passes may be faster."""

    @classmethod
    def from_points(
        cls,
        num_rows: Sequence[int],
        seconds: Sequence[float],
        *,
        context: float = 0.0,
        row_context_s: float = 0.0,
        is_quiet: bool = True,
    ) -> "StepTimeCurve":
        """Smooth measured points to a curve that never falls (running minimum from the right)."""
        smoothed = list(seconds)
        for index in range(len(smoothed) - 2, -1, -1):
            smoothed[index] = min(smoothed[index], smoothed[index + 1])
        return cls(
            num_rows=tuple(num_rows),
            seconds=tuple(smoothed),
            context=context,
            row_context_s=row_context_s,
            is_quiet=is_quiet,
        )

    def fastest(self, other: "StepTimeCurve") -> "StepTimeCurve":
        """Return the lower of this and a later measurement at each size: what disturbs adds time.

        Of other sizes or contexts, the later one is the answer. Whether it was quiet counts: had
        this one been, it would not have been measured again.
        """
        if (other.num_rows, other.context) != (self.num_rows, self.context):
            return other
        return StepTimeCurve(
            num_rows=self.num_rows,
            seconds=tuple(map(min, self.seconds, other.seconds)),
            context=self.context,
            row_context_s=min(self.row_context_s, other.row_context_s),
            is_quiet=other.is_quiet,
        )

    def __call__(self, num_rows: int, context: float | None = None) -> float:
        """Expected seconds; beyond the last point the last slope goes on."""
        beyond = 0.0 if context is None else (context - self.context) * self.row_context_s
        index = min(max(bisect_left(self.num_rows, num_rows), 1), len(self.num_rows) - 1)
        left, right = self.num_rows[index - 1], self.num_rows[index]
        low, high = self.seconds[index - 1], self.seconds[index]
        shown = max(num_rows, self.num_rows[0])
        return low + (high - low) * (shown - left) / (right - left) + num_rows * beyond


class RunningStepTimes:
    """A curve that follows what passes really take.

    Each measured size has a factor. A pass corrects its own most, near sizes less, and all of them
    a little: they share the machine (its clock, its other work). A size that is not used is doubted
    more and more, and so tried again: nothing else could tell that its measurement was disturbed.
    """

    def __init__(self, curve: StepTimeCurve) -> None:
        self._curve = curve
        octaves = np.log2(curve.num_rows)
        near = np.exp(-np.abs(octaves[:, None] - octaves))
        # This is done for every pass, and lists so short are faster than arrays.
        self._shares = (_COMMON + (1.0 - _COMMON) * near).tolist()  # [sizes][sizes]
        self._log_factors = [0.0] * len(octaves)
        self._num_passes = 0
        self._last_used = [0.0 if curve.is_quiet else -inf] * len(octaves)  # of `_num_passes`
        self._most_doubts = [_FIRST_DOUBT if curve.is_quiet else _BUSY_DOUBT] * len(octaves)
        # A budget asks for thousands of row counts a step, so the answers stand in a table.
        self._rows = np.arange(_TABLE_ROWS, dtype=np.float64)
        self._seconds = [curve(rows) for rows in range(_TABLE_ROWS)]
        self._base = np.array(self._seconds)
        self._nearest_of = np.searchsorted(curve.num_rows, self._rows).clip(
            max=len(curve.num_rows) - 1
        )
        self._table: npt.NDArray[np.float64] | None = None  # of what was compared last
        self._table_of = 0, 0.0  # the fewest rows, and the context

    def __call__(self, num_rows: int, context: float = 0.0) -> float:
        """Expected seconds of a pass with so many rows that see `context` tokens on average.

        A context of 0 stands for the one at which the curve was measured.
        """
        return self._measured(num_rows, context) * math.exp(
            self._log_factors[self._nearest(num_rows)]
        )

    def _measured(self, num_rows: int, context: float) -> float:
        """Return the seconds that the curve says."""
        seconds = self._seconds[num_rows] if num_rows < _TABLE_ROWS else self._curve(num_rows)
        if context:
            seconds += num_rows * ((context - self._curve.context) * self._curve.row_context_s)
        return max(seconds, self._curve.seconds[0] / 2)

    def compared(
        self, least_rows: int, num_rows: int, context: float = 0.0
    ) -> npt.NDArray[np.float64]:
        """Return the seconds of passes with `least_rows` to `num_rows` rows; not to be changed.

        They are compared to choose one, so a size that was not used for long is doubted. A step
        asks for the same again and again: what was asked for last is kept.
        """
        if num_rows >= _TABLE_ROWS:
            return np.array([self(rows, context) for rows in range(least_rows, num_rows + 1)])
        wanted, num_wanted = (least_rows, context), num_rows - least_rows + 1
        table = self._table
        if table is None or wanted != self._table_of or len(table) < num_wanted:
            most_rows = min(max(num_rows, least_rows + _LEAST_TABLE_ROWS), _TABLE_ROWS - 1)
            table = self.each(most_rows, context)[least_rows:]
            table *= self._trust(least_rows, most_rows)
            table.flags.writeable = False
            self._table, self._table_of = table, wanted
        return table[:num_wanted]

    def _trust(self, least_rows: int, most_rows: int) -> npt.NDArray[np.float64]:
        """Return how much is believed of what passes take with so many rows.

        The fewest are of the step itself. What one more takes can hardly be less: it is doubted as
        they are, and the more the nearer the next size comes.
        """
        trusts = np.array(
            [
                math.exp(-min(_MORE_DOUBT * (self._num_passes - last_used), most))
                for last_used, most in zip(self._last_used, self._most_doubts, strict=True)
            ]
        )
        found: npt.NDArray[np.float64] = trusts[self._nearest_of[least_rows : most_rows + 1]]
        next_size = self._curve.num_rows[self._nearest(least_rows + 1)]
        near = found[: max(next_size - least_rows, 0) + 1]
        near[:] = np.linspace(near[0], near[-1], len(near))
        return found

    def each(self, num_rows: int, context: float = 0.0) -> npt.NDArray[np.float64]:
        """Return what a call gives for 0 to `num_rows` rows, [num_rows + 1]."""
        if num_rows >= _TABLE_ROWS:
            return np.array([self(rows, context) for rows in range(num_rows + 1)])
        size = num_rows + 1
        seconds = self._base[:size]
        if context and self._curve.row_context_s:
            price_s = (context - self._curve.context) * self._curve.row_context_s
            seconds = np.maximum(seconds + self._rows[:size] * price_s, self._curve.seconds[0] / 2)
        factors = np.array([math.exp(factor) for factor in self._log_factors])
        return np.asarray(seconds * factors[self._nearest_of[:size]])

    def observe(self, num_rows: int, seconds: float, context: float = 0.0) -> None:
        """Learn from one pass; sizes beyond the curve (prompts) say nothing about it."""
        if num_rows > self._curve.num_rows[-1]:
            return
        size = self._nearest(num_rows)
        ratio = max(seconds, 1e-9) / self._measured(num_rows, context)
        surprise = math.log(ratio) - self._log_factors[size]
        if surprise > 0 or surprise < _IMPOSSIBLE:
            learnt = _SLOWER_WEIGHT * min(max(surprise, -_MAX_SURPRISE), _MAX_SURPRISE)
        else:
            learnt = surprise if surprise < _MUCH_FASTER else _FASTER_WEIGHT * surprise
        last_used = self._last_used[size]
        is_old = -inf < last_used <= self._num_passes - _OLD
        if not is_old or surprise >= _MUCH_FASTER:
            last_used = inf
        self._log_factors = [
            factor if other_used > last_used else factor + learnt * share
            for factor, share, other_used in zip(
                self._log_factors, self._shares[size], self._last_used, strict=True
            )
        ]
        self._num_passes += 1
        self._last_used[size], self._most_doubts[size] = self._num_passes, _MOST_DOUBT
        self._table = None

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
    sizes = _sizes(runner.max_context)
    context = min(num_context_tokens, runner.max_context - max(sizes))
    long_context = min(_LONG_CONTEXT, runner.max_context - max(sizes))
    # (rows, context) of every timed pass; the last one tells the price of context
    kinds = [(rows, context) for rows in sizes]
    if long_context >= _LEAST_CONTEXT_RATIO * context and _CONTEXT_ROWS in sizes:
        kinds.append((_CONTEXT_ROWS, long_context))
    tokens = _distinct_tokens(runner.vocab_size, max(sizes))
    view = runner.new_view("step-times")
    samples: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
    try:
        view.reserve(kinds[-1][1] + max(sizes))
        # All sizes in turn, so that a busy moment of the machine does not fall on one of them; the
        # first round warms up (kernels are chosen and packed by size).
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        for turn in range(_NUM_REPEATS + 1):
            if turn > 1 and time.perf_counter() - begun_s > _ENOUGH_S:
                break
            for done, (rows, start) in enumerate(kinds):
                elapsed_s = _time_pass(runner, view, tokens[:rows], start)
                if turn:
                    samples[rows, start].append(elapsed_s)
                if on_progress is not None:
                    on_progress(turn * len(kinds) + done + 1, (_NUM_REPEATS + 1) * len(kinds))
        wall_s, cpu_s = time.perf_counter() - begun_s, time.thread_time() - begun_cpu_s
    finally:
        view.release()
    # Whatever disturbs a pass makes it longer, so the shortest one says most about its size.
    best = {kind: min(found) for kind, found in samples.items()}
    row_context_s = 0.0
    if kinds[-1][1] > context:
        dearer_s = best[kinds[-1]] - best[_CONTEXT_ROWS, context]
        row_context_s = max(dearer_s, 0.0) / (_CONTEXT_ROWS * (long_context - context))
    return StepTimeCurve.from_points(
        sizes,
        [best[rows, context] for rows in sizes],
        context=context,
        row_context_s=row_context_s,
        is_quiet=runner.device.type != "cpu" or cpu_s >= _QUIET_SHARE * wall_s,
    )


@torch.inference_mode()
def warm_up_passes(runner: ModelRunner) -> dict[int, float]:
    """Run a pass of each profiled size, so that kernels are chosen and packed before a request.

    Returns the seconds of a second pass by its size.

    On a CPU only of the small ones: computing is most of a large pass there, the first time too.
    """
    assert runner.max_context is not None
    sizes = _sizes(runner.max_context)
    if runner.device.type == "cpu":
        sizes = [rows for rows in sizes if rows <= _CPU_WARM_UP_ROWS]
    tokens = _distinct_tokens(runner.vocab_size, max(sizes))
    view = runner.new_view("step-times")
    try:
        view.reserve(max(sizes))
        for rows in sizes:
            _time_pass(runner, view, tokens[:rows], 0)
        return {rows: _time_pass(runner, view, tokens[:rows], 0) for rows in sizes}
    finally:
        view.release()


def _sizes(max_context: int) -> list[int]:
    return [rows for rows in _PROFILED_ROWS if rows <= max(max_context // 2, 2)]


def _distinct_tokens(vocab_size: int, count: int) -> list[int]:
    """Return `count` tokens in random order, the same in every call.

    They differ as long as the vocabulary lasts, as the nodes of a tree do: a mixture of experts
    sends copies of one token to the same experts, and reads fewer weights for them.
    """
    order = np.random.default_rng(_TOKENS_SEED).permutation(vocab_size)
    return [int(token) for token in np.resize(order, count)]


def _time_pass(runner: ModelRunner, view: KVView, token_ids: list[int], start: int) -> float:
    """Seconds of one pass over rows that see `start` tokens and each other.

    The same time that `on_pass` is told of later passes: on a device, the device's own.
    """
    piece = ForwardSlice(
        view=view, token_ids=token_ids, start_slot=start, num_logit_rows=len(token_ids)
    )
    if view.line is not None:  # only the time counts, not what its state is of
        view.line.pretend(start)
    features = None
    if (width := runner.model.feature_size) > 0:  # of a head: only the time counts
        features = torch.zeros((len(token_ids), width), dtype=runner.model.dtype).to(runner.device)
    started_s = time.perf_counter()
    runner.forward([piece], None, features)
    if runner.device.type != "cpu":
        return runner.wait()
    return time.perf_counter() - started_s


def _is_beaten(curve: StepTimeCurve, seconds: Mapping[int, float]) -> bool:
    """Return whether passes of some size took much less time than a curve says.

    `seconds`: of passes whose rows see none but each other, by their number.
    """
    return any(found_s < _BEATEN_SHARE * curve(rows, rows / 2) for rows, found_s in seconds.items())


class CurveStore(Protocol):
    """Curves of earlier starts (engine/passes/saved_times.py)."""

    def load(self, runner: ModelRunner) -> StepTimeCurve | None:
        """Return the curve that holds for this runner, if there is one."""

    def save(self, runner: ModelRunner, curve: StepTimeCurve) -> None:
        """Keep a curve for later starts."""


def follow_step_times(
    runner: ModelRunner,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    saved: CurveStore | None = None,
) -> RunningStepTimes:
    """Profile a runner, or take what was `saved`, and go on learning from every pass.

    What was measured while the processor was busy, or is beaten by a few passes now, is measured
    anew. The faster times are kept. Those passes also tell of a machine that is slower today.
    """
    curve = saved.load(runner) if saved is not None else None
    passes = warm_up_passes(runner) if curve is not None and curve.is_quiet else {}
    if curve is None or not curve.is_quiet or _is_beaten(curve, passes):
        measured = profile_step_times(runner, on_progress=on_progress)
        curve = measured if curve is None else curve.fastest(measured)
        if saved is not None:
            saved.save(runner, curve)
    times = RunningStepTimes(curve)
    for rows, seconds in passes.items():
        times.observe(rows, seconds, rows / 2)
    runner.on_pass = times.observe
    return times
