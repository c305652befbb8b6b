"""Times an engine's steps: in the models' passes, and beside them."""

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.shared.instructions import count_instructions
from outrider.engine.core import Engine
from outrider.engine.events import TokensEmitted
from outrider.engine.model.protocol import ForwardOutput
from outrider.engine.passes.runner import ModelRunner, PassTime
from outrider.verifier.params import Tier


class ForwardCpu:
    """Work of this thread in the passes of the models that it was put around.

    total_s: processor time. instructions: those in user space, 0 where they are not counted. What
    the library takes for passes within a draft's call is known by the clock only.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self.instructions = 0
        self._counter = count_instructions()

    def put_around(self, runner: ModelRunner) -> None:
        """Count the passes of the runner's model from now on."""
        model, note_pass = runner.model, runner.note_pass
        forward = model.forward

        @functools.wraps(forward)
        def counted(*args: Any, **kwargs: Any) -> ForwardOutput:
            started, started_s = self.count(), time.thread_time()
            output = forward(*args, **kwargs)
            self.total_s += time.thread_time() - started_s
            self.instructions += self.count() - started
            return output

        def noted(done: PassTime, whole_s: float) -> None:
            self.total_s += done.seconds
            note_pass(done, whole_s)

        model.forward = counted  # type: ignore[method-assign]
        runner.note_pass = noted  # type: ignore[method-assign]

    def count(self) -> int:
        """Return this thread's instructions so far; 0 where they are not counted."""
        return 0 if self._counter is None else self._counter.read()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One engine step: seconds in all and in each model's passes.

    `host_cpu_s`: processor time of this thread outside the passes. What other programs take from
    the machine is not in it, nor is waiting. `host_instructions`: likewise, 0 where they are not
    counted; they do not depend on the machine's other work at all.
    """

    wall_s: float
    large_s: float
    small_s: float
    host_cpu_s: float
    host_instructions: int
    num_small_passes: int
    num_in_flight: int
    num_emitted: int
    had_prefill: bool

    @property
    def host_s(self) -> float:
        """Everything but the forward passes."""
        return self.wall_s - self.large_s - self.small_s


class Timed(Protocol):
    """As much of a `Bench` as is looked at."""

    @property
    def engine(self) -> Engine:
        """Return the engine."""

    @property
    def runners(self) -> Mapping[Tier, ModelRunner]:
        """Return its models' runners."""

    @property
    def forward_cpu(self) -> ForwardCpu:
        """Return what counts their passes."""


class StepTimer:
    """Steps a bench and records where the time went."""

    def __init__(self, bench: Timed) -> None:
        self._bench = bench

    def step(self, num_in_flight: int) -> tuple[list[Any], StepRecord]:
        """One engine step and its record."""
        forward = self._bench.forward_cpu
        before, had_prefill = self._read(), self._has_prompts()
        forward_cpu_s, in_passes = forward.total_s, forward.instructions
        started, started_cpu_s, started_s = forward.count(), time.thread_time(), time.perf_counter()
        events = self._bench.engine.step()
        wall_s, cpu_s = time.perf_counter() - started_s, time.thread_time() - started_cpu_s
        instructions = forward.count() - started
        after = self._read()
        emitted = sum(len(e.token_ids) for e in events if isinstance(e, TokensEmitted))
        return events, StepRecord(
            wall_s=wall_s,
            large_s=after["large"][0] - before["large"][0],
            small_s=after["small"][0] - before["small"][0],
            host_cpu_s=max(cpu_s - (forward.total_s - forward_cpu_s), 0.0),
            host_instructions=instructions - (forward.instructions - in_passes),
            num_small_passes=after["small"][1] - before["small"][1],
            num_in_flight=num_in_flight,
            num_emitted=emitted,
            had_prefill=had_prefill,
        )

    def _read(self) -> dict[str, tuple[float, int]]:
        read = {"large": (0.0, 0), "small": (0.0, 0)}
        for tier, runner in self._bench.runners.items():
            read[tier] = (runner.times.total_s, runner.times.num_passes)
        return read

    def _has_prompts(self) -> bool:
        """Return whether a prompt is uncomputed, so that the step is not purely decoding."""
        scheduler = self._bench.engine.scheduler
        running = (sequence for tier in scheduler.running.values() for sequence in tier)
        return bool(scheduler.waiting) or any(not sequence.is_decoding for sequence in running)
