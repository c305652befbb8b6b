"""What do objectives gain in virtual time, on machines of several kinds and at many loads?

Method: the engine's own scheduler and queues run against a clock that a model of step times moves:
a step takes `base + answers x row + prompt rows x prompt row`, times noise, and now and then a
stall. Trace, classes and objectives are those of `bench_slo`. Loads are multiples of what the
machine carries with its places always full; loads above 1 are also what a machine looks like that
has become slower since the objectives were set.

Reading it: `over order` is goodput by that of order of arrival, over all seeds its mean and, in
brackets, its least. `attained`, `chat` and `batch` are shares of the requests in percent; `ttft
p99`, of the chats, is a multiple of the objective. The last case has the same objectives, but
assumed, as those of a built-in class are: they order the queue, and hold no request back.

    OUTRIDER_DATA=... python -m benchmarks.simulate.simulate_slo
"""

import argparse
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

import numpy as np

from benchmarks.shared.harness import console, show_table, write_results
from benchmarks.shared.record import RESULTS
from benchmarks.shared.slo_trace import (
    DEFAULT_TRACE,
    Arrival,
    Objectives,
    Outcome,
    attainment,
    classed,
    find_trace,
    read_trace,
    scaled,
    thinned,
)
from outrider.engine.cache.block_pool import BlockPool, root_hash
from outrider.engine.cache.kv_view import KVView
from outrider.engine.config import EngineConfig
from outrider.engine.queue.deadlines import SloQueueConfig
from outrider.engine.queue.fair_queue import FairQueue
from outrider.engine.queue.policy import ArrivalOrder, QueuePolicy
from outrider.engine.queue.scheduler import PassPlan, Scheduler
from outrider.engine.queue.slo_queue import SloQueue
from outrider.engine.request import LOW, NORMAL, EngineRequest, LatencyObjective
from outrider.engine.sequences.sequence import Sequence as EngineSequence
from outrider.verifier.params import SamplingParams

ORDER, FAIR, SLO = "arrival order", "fair queue", "slo queue"
ASSUMED = "slo queue, assumed"
Cases = Mapping[str, Callable[[], QueuePolicy]]
CASES: Cases = {
    ORDER: ArrivalOrder,
    FAIR: FairQueue,
    SLO: SloQueue,
    ASSUMED: SloQueue,
}
_BLOCK = 16
_SHORTEST_S = 1e-4
_ANY = Objectives(ttft_s=math.inf, inter_token_s=math.inf, batch_end_s=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A model of step times, in seconds.

    `tokens`: what a lone answer gets from a step (1: no speculation); guesses are fewer from four
    answers on. `noise`: standard deviation of the logarithm of a step's time. `stalls`: a second.
    """

    base_s: float
    row_s: float
    prompt_row_s: float
    tokens: float = 1.0
    noise: float = 0.0
    stalls: float = 0.0
    stall_s: float = 0.2

    def step_s(self, rng: random.Random, *, num_answers: int, num_prompt_rows: int) -> float:
        """Draw how long a step takes."""
        seconds = self.base_s + num_answers * self.row_s + num_prompt_rows * self.prompt_row_s
        seconds *= math.exp(rng.gauss(0.0, self.noise))
        return seconds + self.stall_s * (rng.random() < self.stalls * seconds)

    def num_tokens(self, rng: random.Random, num_answers: int) -> int:
        """Draw how many tokens a step writes for one answer."""
        mean = 1.0 + (self.tokens - 1.0) / max(1.0, num_answers / 4.0)
        number = 1
        while rng.random() < 1.0 - 1.0 / mean:
            number += 1
        return number


# The first is fitted to bench_slo's demo pair on two cores; the others are of the sizes named.
MACHINES: Mapping[str, Machine] = {
    "demo pair, 2 cores": Machine(
        base_s=3.1e-3, row_s=3.5e-3, prompt_row_s=2e-4, noise=0.3, stalls=0.1
    ),
    "400 M, 2 cores": Machine(
        base_s=2.2e-2, row_s=1.4e-3, prompt_row_s=1.2e-3, tokens=2.2, noise=0.3, stalls=0.1
    ),
    "8 B, a GPU": Machine(base_s=8e-3, row_s=2e-4, prompt_row_s=2e-5, tokens=3.5),
}


@dataclass(slots=True)
class _Cache:
    """Blocks without keys and values."""

    pool: BlockPool

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], /) -> None:
        """Nothing is in them."""


@dataclass(slots=True, kw_only=True)
class VirtualEngine:
    """The engine's scheduler with a machine that only takes time."""

    machine: Machine
    policy: QueuePolicy
    num_places: int
    wanted: Objectives
    rng: random.Random
    is_assumed: bool = False
    now_s: float = 0.0
    scheduler: Scheduler = field(init=False)
    _cache: _Cache = field(init=False)
    _sequences: dict[EngineSequence, Arrival] = field(default_factory=dict)
    _outcomes: list[Outcome] = field(default_factory=list)

    def run(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """Serve all arrivals to the end of the last answer."""
        most = max(arrival.num_prompt + arrival.num_answer for arrival in arrivals)
        blocks = self.num_places * (most // _BLOCK + 2)
        self._cache = _Cache(BlockPool(num_blocks=blocks, block_size=_BLOCK))
        config = EngineConfig(max_sequences=self.num_places, max_waiting=len(arrivals))
        self.scheduler = Scheduler(
            caches={"large": self._cache}, config=config, policy=self.policy, drafts=None
        )
        waiting = list(reversed(arrivals))
        while waiting or self._sequences:
            while waiting and waiting[-1].at_s <= self.now_s:
                self._submit(waiting.pop(), len(waiting))
            if self._sequences:
                self._step()
            else:
                self.now_s = waiting[-1].at_s
        return self._outcomes

    def _submit(self, arrival: Arrival, number: int) -> None:
        is_batch = arrival.trace_class == "batch"
        objective = LatencyObjective(is_batch=is_batch)
        if not is_batch and math.isfinite(self.wanted.ttft_s):
            objective = LatencyObjective(
                ttft_s=self.wanted.ttft_s,
                inter_token_s=self.wanted.inter_token_s,
                is_assumed=self.is_assumed,
            )
        request = EngineRequest(
            request_id=str(number),
            prompt_token_ids=(number,) * arrival.num_prompt,
            tier="large",
            sampling=SamplingParams(max_tokens=arrival.num_answer),
            objective=objective,
            priority=LOW if is_batch else NORMAL,
            arrival_s=arrival.at_s,
        )
        view = KVView(self._cache.pool, root=root_hash(str(number)), prefix_caching=False)
        sequence = EngineSequence(
            request=request,
            tier="large",
            view=view,
            noise=cast("Any", None),  # no token is chosen
            submitted_s=self.now_s,
            token_ids=list(request.prompt_token_ids),
        )
        self._sequences[sequence] = arrival
        self.scheduler.add(sequence)

    def _step(self) -> None:
        plan = self.scheduler.plan_step(self.now_s)
        num_answers = len(plan.decodes)
        num_prompt_rows = sum(count for _, count in plan.prefills)
        if plan.is_empty:
            self.now_s += _SHORTEST_S
            return
        seconds = self.machine.step_s(
            self.rng, num_answers=num_answers, num_prompt_rows=num_prompt_rows
        )
        self.now_s += seconds
        num_tokens = self._write(plan)
        times = self.scheduler.times
        if plan.prefills:
            num_rows = num_answers + num_prompt_rows
            times.note_pass("large", num_rows=num_rows, elapsed_s=seconds)
        else:
            times.note_step(seconds)
            times.pace.note(num_answers=num_answers, num_tokens=num_tokens, elapsed_s=seconds)

    def _write(self, plan: PassPlan) -> int:
        """Compute the plan's rows and write its tokens; returns how many."""
        total = 0
        for sequence, count in plan.prefills:
            view = sequence.view
            view.advance(view.num_computed_tokens + count, sequence.token_ids)
            if not sequence.num_uncomputed_tokens:
                total += self._emit(sequence, 1)
        for sequence in plan.decodes:
            view = sequence.view
            view.advance(view.num_computed_tokens + 1, sequence.token_ids)
            total += self._emit(sequence, self.machine.num_tokens(self.rng, len(plan.decodes)))
        return total

    def _emit(self, sequence: EngineSequence, num_tokens: int) -> int:
        num_tokens = min(num_tokens, sequence.num_remaining_tokens)
        view = sequence.view
        sequence.token_ids.extend([0] * num_tokens)
        if num_tokens > 1:
            view.reserve(len(sequence.token_ids))
            view.advance(len(sequence.token_ids) - 1, sequence.token_ids)
        if sequence.first_token_s is None:
            sequence.first_token_s = self.now_s
        if not sequence.num_remaining_tokens:
            self.scheduler.times.note_answer(sequence, self.now_s)
            self.scheduler.remove(sequence)
            arrival = self._sequences.pop(sequence)
            self._outcomes.append(
                Outcome(
                    trace_class=arrival.trace_class,
                    ttft_s=sequence.first_token_s - arrival.at_s,
                    end_s=self.now_s - arrival.at_s,
                    num_tokens=arrival.num_answer,
                )
            )
        return num_tokens


# ---- what a machine carries --------------------------------------------------------------------


def objectives(
    machine: Machine, sample: Sequence[Arrival], scales: tuple[float, float]
) -> Objectives:
    """Multiples of what a request takes alone: of its first token, and between two tokens."""
    rng = random.Random(0)
    ttft_s = median(machine.base_s + one.num_prompt * machine.prompt_row_s for one in sample)
    tokens = fmean(machine.num_tokens(rng, 1) for _ in range(2000))
    token_s = (machine.base_s + machine.row_s) / tokens
    longest_s = max(one.num_answer for one in sample) * token_s
    return Objectives(
        ttft_s=ttft_s * scales[0],
        inter_token_s=token_s * scales[1],
        batch_end_s=max(30.0, 2.0 * scales[1] * longest_s),
    )


def carried(machine: Machine, sample: Sequence[Arrival], num_places: int) -> float:
    """Requests a second with all places full."""
    engine = VirtualEngine(
        machine=machine,
        policy=CASES[ORDER](),
        num_places=num_places,
        wanted=_ANY,
        rng=random.Random(0),
    )
    engine.run([replace(arrival, at_s=0.0) for arrival in sample])
    return len(sample) / engine.now_s


def simulate(
    machine: Machine,
    arrivals: Sequence[Arrival],
    wanted: Objectives,
    num_places: int,
    seed: int,
    cases: Cases = CASES,
) -> dict[str, dict[str, float]]:
    """Figures of all queues for the same arrivals and the same luck."""
    found = {}
    for name, policy in cases.items():
        engine = VirtualEngine(
            machine=machine,
            policy=policy(),
            num_places=num_places,
            wanted=wanted,
            rng=random.Random(seed),
            is_assumed=name == ASSUMED,
        )
        outcomes = engine.run(arrivals)
        parts = {
            part: [one for one in outcomes if one.trace_class == part]
            for part in ("short-chat", "batch")
        }
        found[name] = {
            "goodput_per_s": sum(one.meets(wanted) for one in outcomes) / engine.now_s,
            "attainment": attainment(outcomes, wanted),
            "chat_attainment": attainment(parts["short-chat"], wanted),
            "batch_attainment": attainment(parts["batch"], wanted),
            "chat_ttft_p99": _p99(
                [one.ttft_s for one in parts["short-chat"] if one.ttft_s is not None]
            )
            / wanted.ttft_s,
            "tokens_per_s": sum(one.num_tokens for one in outcomes) / engine.now_s,
        }
    for figures in found.values():
        figures["over_order"] = figures["goodput_per_s"] / max(found[ORDER]["goodput_per_s"], 1e-9)
    return found


def _p99(seconds: Sequence[float]) -> float:
    return float(np.percentile(seconds, 99))


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate all machines at all loads with all seeds; write and show the results."""
    arguments = _parser().parse_args(argv)
    trace = read_trace(find_trace(arguments.trace), first_s=arguments.minutes * 60)
    slo = partial(SloQueue, SloQueueConfig(late_aging_s=arguments.late_aging_s))
    cases: Cases = {**CASES, SLO: slo, ASSUMED: slo}
    results: dict[str, Any] = {}
    for name, machine in MACHINES.items():
        runs: dict[float, list[dict[str, dict[str, float]]]] = {one: [] for one in arguments.loads}
        for seed in range(arguments.seeds):
            arrivals = classed(trace, batch_share=arguments.batch_share, seed=seed)
            arrivals = thinned(arrivals, share=arguments.share, seed=seed)
            sample = scaled(arrivals, context=arguments.context, rate=1.0)[:256]
            wanted = objectives(
                machine, sample, (arguments.ttft_scale, arguments.inter_token_scale)
            )
            rate = carried(machine, sample, places := arguments.max_sequences)
            for load in arguments.loads:
                paced = scaled(arrivals, context=arguments.context, rate=rate * load)
                runs[load].append(simulate(machine, paced, wanted, places, seed, cases))
            console.print(f"[dim]{name}: seed {seed}[/dim]")
        results[name] = {str(load): _summary(all_of) for load, all_of in runs.items()}
    _show(results)
    write_results("simulate_slo", arguments.variant, results, arguments)


def _summary(runs: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The means over the seeds, and the least gain."""
    return {
        name: {
            **{key: fmean(run[name][key] for run in runs) for key in runs[0][name]},
            "least_over_order": min(run[name]["over_order"] for run in runs),
        }
        for name in CASES
    }


def _show(results: Mapping[str, Any]) -> None:
    rows = [
        [
            f"{machine}, load {load}: {name}",
            f"{one['over_order']:.2f} ({one['least_over_order']:.2f})",
            *(f"{100 * one[key]:.0f}" for key in ("attainment", "chat_attainment")),
            f"{100 * one['batch_attainment']:.0f}",
            f"{one['chat_ttft_p99']:.2f}",
            f"{one['tokens_per_s']:.0f}",
        ]
        for machine, loads in results.items()
        for load, cases in loads.items()
        for name, one in cases.items()
    ]
    columns = ("", "over order", "attained %", "chat %", "batch %", "ttft p99", "tok/s")
    show_table("objectives in virtual time", columns, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE, help="also in $OUTRIDER_DATA")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the trace")
    parser.add_argument("--share", type=float, default=0.08, help="of its requests, by the seed")
    parser.add_argument("--context", type=int, default=1024, help="the longest request, in tokens")
    parser.add_argument("--batch-share", type=float, default=0.3)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.4, 0.6, 0.8, 1.0, 1.5, 3.0])
    parser.add_argument("--max-sequences", type=int, default=16, help="that run at once")
    parser.add_argument("--ttft-scale", type=float, default=10.0)
    parser.add_argument("--inter-token-scale", type=float, default=5.0)
    parser.add_argument("--late-aging-s", type=float, default=20.0, help="SloQueueConfig's")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--variant", default="azure-conversation")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the file goes")
    return parser


if __name__ == "__main__":
    main()
