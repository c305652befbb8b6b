"""Measures passes, levels and answers on a device, and profiles them, for gpu_first.

The acceptance of all answers is that of a pair whose agreement is constructed (gpu_paired_models),
so it is reported beside each speed: `tokens_per_step`.
"""

import cProfile
import io
import pstats
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from benchmarks.gpu.gpu_engine_cases import Context, Mode, PairSizes, ServedPair, answer
from benchmarks.gpu.gpu_models import bytes_per_step
from benchmarks.gpu.gpu_sections import Facts, Sections
from benchmarks.gpu.gpu_timing import measure, measure_ceilings, synchronize
from outrider.engine.core import Engine

COSINES = (0.97, 0.985, 0.993, 0.998)
_COSINE = 0.99  # of what is not a point of the curve
_PASS_ROUNDS = 15
_LEVEL_TREES = (1, 4)
_PROFILED_RUNS = 5
_SHOWN_KERNELS = 24
_SHOWN_PAUSES = 16
_SHORT_PAUSE_US = 5.0  # between kernels of a recorded pass
_POINT_S = 12.0  # that a point of the curve may take

PROFILED = ("level", "large 1", "large 64", "small 4")


class Figures:
    """The figures of one pair on one device; `folder` gets what is too long for a line."""

    def __init__(
        self, sections: Sections, sizes: PairSizes, device: torch.device, folder: Path
    ) -> None:
        self._sections = sections
        self._sizes = sizes
        self._device = device
        self._folder = folder
        self._loaded: ServedPair | None = None

    @property
    def _pair(self) -> ServedPair:
        assert self._loaded is not None, "load() comes first"
        return self._loaded

    def load(self) -> Facts:
        """Make both models and record their passes and levels."""
        started_s = time.monotonic()
        self._loaded = ServedPair.load(self._sizes, self._device, cosine=_COSINE)
        synchronize(self._device)
        facts: dict[str, Any] = {
            "loaded_and_captured_s": time.monotonic() - started_s,
            "levels": self._pair.num_levels,
            "cosine": _COSINE,
        }
        if self._device.type == "cuda":
            facts["memory_gb"] = torch.cuda.memory_allocated() / 1e9
        return facts

    # ---- passes

    def passes(self) -> Facts:
        """Passes and levels in turn, beside the time in which their weights can be read."""
        ceilings = measure_ceilings(self._device)
        found: dict[str, Any] = {
            "copy_tb_s": ceilings.copy_bytes_per_s / 1e12,
            "read_tb_s": ceilings.read_bytes_per_s / 1e12,
        }
        configs = {"large": self._sizes.large, "small": self._sizes.small}
        for name, seconds in self._times(self._passes()).items():
            num_bytes = bytes_per_step(configs[name.split("_")[0]], self._sizes.dtype)
            found[f"{name}_us"] = round(seconds * 1e6, 1)
            found[f"{name}_of_floor"] = round(num_bytes / ceilings.read_bytes_per_s / seconds, 3)
        for name, seconds in self._times(self._levels()).items():
            found[f"{name}_us"] = round(seconds * 1e6, 1)
        return found

    def _times(self, works: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Median seconds between events; these replay graphs, so no other graph can hold them."""
        calls = {name: [work] for name, work in works.items()}
        for work in works.values():
            work()
        samples = measure(calls, device=self._device, rounds=_PASS_ROUNDS, uncaptured=calls)
        return {name: statistics.median(seconds) for name, seconds in samples.items()}

    def _passes(self) -> dict[str, Callable[[], object]]:
        pair = self._pair
        tiers = (
            ("large", pair.large, self._sizes.verified),
            ("small", pair.small, self._sizes.drafted),
        )
        works: dict[str, Callable[[], object]] = {}
        for tier, runner, sizes in tiers:
            context = Context.filled(runner, self._sizes.context, random.Random(2))
            for rows in sizes:
                piece = context.tree(rows, random.Random(rows))
                works[f"{tier}_{rows}"] = partial(runner.forward, [piece])
        return works

    def _levels(self) -> dict[str, Callable[[], object]]:
        """Recorded levels of one tree and of several; none without a GPU."""
        levels = self._pair.small._levels
        if levels is None:
            return {}
        return {
            f"level_{count}_trees": levels._captured[count, False].replay for count in _LEVEL_TREES
        }

    # ---- answers

    def answers(self, mode: Mode, temperature: float = 0.0) -> Facts:
        """Answers to random prompts, one at a time; medians."""
        engine = self._pair.engine(mode)
        speeds = [
            answer(
                engine,
                self._pair.request(
                    mode, seed=turn, tokens=self._sizes.answer_tokens, temperature=temperature
                ),
                self._device,
            )
            for turn in range(self._sizes.turns)
        ]
        warm = speeds[1:] or speeds
        return {
            "mode": mode,
            "temperature": temperature,
            "tokens_per_s": statistics.median(one.tokens_per_s for one in warm),
            "step_ms": statistics.median(one.step_s for one in warm) * 1e3,
            "tokens_per_step": statistics.median(one.tokens_per_step for one in warm),
        }

    def curve(self) -> Facts:
        """Tokens per second by how alike the models are: each point is a line of its own."""
        points = 0
        for cosine in COSINES:
            if self._sections.left_s < _POINT_S:
                break
            self._pair.turn(cosine)
            self._sections.note("point", cosine=cosine, **self.answers("budgeted"))
            points += 1
        return {"points": points}

    # ---- where the time goes

    def profile(self, what: str) -> Facts:
        """Kernel by kernel: where the microseconds of a pass or a level go."""
        if what == "level":
            work = self._levels()["level_1_trees"]
        else:
            tier, rows = what.split()
            runner = self._pair.large if tier == "large" else self._pair.small
            context = Context.filled(runner, self._sizes.context, random.Random(2))
            piece = context.tree(int(rows), random.Random(1))
            work = partial(runner.forward, [piece])
        for _ in range(3):
            work()
        return self._kernels(work, _PROFILED_RUNS)

    def _kernels(self, work: Callable[[], object], runs: int) -> dict[str, Any]:
        """Kernels of a run and their microseconds, the longest first, and the device's pauses."""
        synchronize(self._device)
        with profiler(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
            for _ in range(runs):
                work()
            synchronize(self._device)
        kernels = [event for event in found.events() or () if event.device_type.name == "CUDA"]
        counts: Counter[str] = Counter()
        times: Counter[str] = Counter()
        for event in kernels:
            counts[event.name[:60]] += 1
            times[event.name[:60]] += event.device_time
        return {
            "kernels": counts.total() / runs,
            "busy_us": round(times.total() / runs, 1),
            **pauses(kernels, runs),
            "top": [
                (name, counts[name] / runs, round(total / runs, 1))
                for name, total in times.most_common(_SHOWN_KERNELS)
            ],
        }

    def host(self, mode: Mode) -> Facts:
        """A step's wall time, the device's part of it, and the host's functions in a file."""
        engine, count = self._pair.engine(mode), self._sizes.profiled_steps
        tokens = 60 * count  # more than all these steps emit
        request = self._pair.request(mode, seed=77, tokens=tokens, temperature=0.0)
        engine.submit(request)
        try:
            for _ in range(count // 2 + 2):
                engine.step()
            seconds = self._steps(engine, count)
            facts = {"mode": mode, "step_ms": seconds * 1e3}
            if self._device.type == "cuda":
                facts |= self._kernels(engine.step, count)
            self._write_functions(engine, count, mode)
        finally:
            engine.abort(request.request_id)
            for _ in range(3):  # a step that is under way ends in the next one
                engine.step()
        return facts

    def _steps(self, engine: Engine, count: int) -> float:
        """Seconds of a step, in the mean."""
        synchronize(self._device)
        started_s = time.perf_counter()
        for _ in range(count):
            engine.step()
        synchronize(self._device)
        return (time.perf_counter() - started_s) / count

    def _write_functions(self, engine: Engine, count: int, mode: Mode) -> None:
        """Write where the host's time goes, by own and by cumulative time."""
        own = cProfile.Profile()
        own.enable()
        for _ in range(count):
            engine.step()
        own.disable()
        text = io.StringIO()
        stats = pstats.Stats(own, stream=text)
        stats.sort_stats("tottime").print_stats(45)
        stats.sort_stats("cumulative").print_stats(70)
        (self._folder / f"host-{mode}.txt").write_text(text.getvalue(), encoding="utf-8")


def pauses(kernels: Sequence[Any], runs: int) -> dict[str, Any]:
    """Microseconds of a run in which the device waits for the host, by the kernels around."""
    counts: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    ordered = sorted(kernels, key=lambda event: event.time_range.start)
    for before, behind in pairwise(ordered):
        pause_us = behind.time_range.start - before.time_range.end
        if pause_us > _SHORT_PAUSE_US:
            where = before.name[:40], behind.name[:40]
            counts[where] += 1
            times[where] += pause_us
    return {
        "pauses_us": round(times.total() / runs, 1),
        "longest_pauses": [
            (*where, counts[where] / runs, round(total / runs, 1))
            for where, total in times.most_common(_SHOWN_PAUSES)
        ],
    }
