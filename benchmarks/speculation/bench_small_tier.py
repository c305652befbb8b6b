"""Does a small-tier answer run at the small model's pace, also beside answers of the large model?

Method: small-tier answers one after the other, beside 0, 1 and 4 large-tier streams that never end
(a new one starts when one is finished), with speculation and without. The cases are run in turn,
round by round. Events count when the engine hands them over: small passes beside a large one do so
at once. A gap is the time between two deliveries, and the time per token is the gap divided by the
tokens that it brought; its p99 shows the wait for the large pass.

Reading it: `token` is the time per token (median, p99 over all deliveries), `gap` what a reader
waits between two deliveries, `tok/s` the small answer's rate after its first token, `slowdown` its
time per token over that beside no large stream in the same round. `large tok/s` is the rate of all
large streams together. Only a large model that is really slow makes a test of this:

    python -m benchmarks.speculation.bench_small_tier --dtype bfloat16 --expand-target 400M
"""

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.shared.driving import (
    Bench,
    add_draft_options,
    blocks_for,
    build_bench,
    draft_config,
    load_runner,
    make_requests,
    tree_budget,
)
from benchmarks.shared.grown import grown_large, grown_small
from benchmarks.shared.harness import (
    Summary,
    argument_parser,
    choose_threads,
    console,
    measure_in_turn,
    milliseconds,
    paired_ratio,
    prepare,
    show_table,
    start,
    variant_name,
    write_results,
)
from benchmarks.shared.prompts import Prompt, load_prompts, load_tokenizer
from outrider.engine.events import EngineEvent, Finished, TokensEmitted
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import EngineRequest
from outrider.verifier.params import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """So many large streams beside the small one."""

    num_large: int
    speculate: bool

    @property
    def name(self) -> str:
        """For tables and results."""
        if self.num_large == 0:
            return "alone"
        return f"beside {self.num_large} large, {'speculative' if self.speculate else 'plain'}"


@dataclass(slots=True, kw_only=True)
class Deliveries:
    """Deliveries of all small answers: gaps in seconds with the tokens that each brought."""

    gaps: list[tuple[float, int]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    num_large_tokens: int = 0
    wall_s: float = 0.0

    @property
    def token_s(self) -> list[float]:
        """Time per token, one sample a token."""
        return [gap / number for gap, number in self.gaps for _ in range(number)]

    @property
    def tokens_per_s(self) -> float:
        """After the first delivery of each answer."""
        return sum(number for _, number in self.gaps) / sum(gap for gap, _ in self.gaps)


class LargeStreams:
    """Keeps so many large-tier requests in the engine."""

    def __init__(self, bench: Bench, requests: Iterator[EngineRequest], number: int) -> None:
        self._engine = bench.engine
        self._requests = requests
        self._running: set[str] = set()
        self._number = number

    def fill(self) -> None:
        """Start as many as are missing."""
        while len(self._running) < self._number:
            request = next(self._requests)
            self._engine.submit(request)
            self._running.add(request.request_id)

    def take(self, event: object) -> int:
        """Note an event; returns how many large tokens it brought."""
        if isinstance(event, Finished):
            self._running.discard(event.request_id)
        if isinstance(event, TokensEmitted) and event.request_id in self._running:
            return len(event.token_ids)
        return 0

    def end(self) -> None:
        """Abort what still runs, and empty the engine."""
        for request_id in self._running:
            self._engine.abort(request_id)
        while self._engine.has_work:
            self._engine.step()


class _Reader:
    """Books what arrives for one small answer, when the gateway would send it on."""

    def __init__(self, request_id: str, streams: LargeStreams, deliveries: Deliveries) -> None:
        self.has_ended = False
        self._request_id = request_id
        self._streams = streams
        self._deliveries = deliveries
        self._submitted_s = time.perf_counter()
        self._last_s: float | None = None

    def take(self, events: list[EngineEvent]) -> None:
        """One delivery."""
        now_s = time.perf_counter()
        number = 0
        for event in events:
            self._deliveries.num_large_tokens += self._streams.take(event)
            if event.request_id == self._request_id:
                number += len(event.token_ids) if isinstance(event, TokensEmitted) else 0
                self.has_ended |= isinstance(event, Finished)
        if number and self._last_s is None:
            self._deliveries.ttft_s.append(now_s - self._submitted_s)
        elif number and self._last_s is not None:
            self._deliveries.gaps.append((now_s - self._last_s, number))
        self._last_s = now_s if number else self._last_s


def run_case(
    bench: Bench,
    prompts: Sequence[Prompt],
    case: Case,
    *,
    num_answers: int,
    max_small: int,
    max_large: int,
) -> Deliveries:
    """Small answers one after the other; the first step of all starts the large streams."""
    engine = bench.engine
    requests = itertools.chain.from_iterable(
        make_requests(prompts, tier="large", max_tokens=max_large, speculate=case.speculate)
        for _ in itertools.count()
    )
    streams = LargeStreams(bench, requests, case.num_large)
    deliveries = Deliveries()
    streams.fill()
    while engine.scheduler.waiting or not all(
        sequence.is_decoding for sequence in engine.scheduler.running["large"]
    ):
        engine.step()  # the large prompts: not what is asked here
    started_s = time.perf_counter()
    small = make_requests(prompts[:num_answers], tier="small", max_tokens=max_small)
    for request in small:
        engine.submit(request)
        reader = _Reader(request.request_id, streams, deliveries)
        while not reader.has_ended:
            streams.fill()
            reader.take(engine.step(reader.take))
    deliveries.wall_s = time.perf_counter() - started_s
    streams.end()
    if not deliveries.gaps:
        raise SystemExit(f"{case.name}: each answer came in one delivery; raise --max-new.")
    return deliveries


def report(rounds: Sequence[Deliveries], alone: Sequence[Deliveries]) -> dict[str, Any]:
    """Figures of one case."""
    token_s = [sample for done in rounds for sample in done.token_s]
    mean_s = [1.0 / done.tokens_per_s for done in rounds]
    return {
        "token_s": Summary.of(token_s),
        "gap_s": Summary.of([gap for done in rounds for gap, _ in done.gaps]),
        "ttft_s": Summary.of([sample for done in rounds for sample in done.ttft_s]),
        "tokens_per_s": Summary.of([done.tokens_per_s for done in rounds]),
        "slowdown": paired_ratio(mean_s, [1.0 / done.tokens_per_s for done in alone]),
        "large_tokens_per_s": Summary.of([d.num_large_tokens / d.wall_s for d in rounds]),
    }


def build(arguments: argparse.Namespace) -> tuple[Bench, list[Prompt]]:
    """An engine that holds the largest case, and its prompts."""
    large_folder = grown_large(arguments)
    choose_threads(arguments, large_folder)
    most = max(arguments.streams)
    prompts = load_prompts(
        "tasks",
        load_tokenizer(large_folder),
        num_prompts=max(arguments.num_prompts, most),
        seed=arguments.seed,
    )
    longest = max(len(prompt.token_ids) for prompt in prompts)
    num_tokens = longest + max(arguments.max_new, arguments.max_large)
    load = partial(
        load_runner,
        dtype=arguments.dtype,
        device=arguments.device,
        num_blocks=blocks_for(num_sequences=most + 1, num_tokens=num_tokens),
    )
    with console.status("loading, and profiling step times"):
        runners: dict[Tier, ModelRunner] = {
            "large": load(large_folder),
            "small": load(grown_small(arguments)),
        }
        bench = build_bench(
            runners, draft_config=draft_config(arguments), budget=tree_budget(runners)
        )
    return bench, prompts


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases and write the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[0, 1, 4], help="large streams")
    parser.add_argument("--num-prompts", type=int, default=4, help="small answers a round")
    parser.add_argument("--max-new", type=int, default=64, help="tokens of a small answer")
    parser.add_argument("--max-large", type=int, default=512, help="tokens of a large answer")
    add_draft_options(parser)
    arguments = parser.parse_args(argv)
    prepare(arguments)
    bench, prompts = build(arguments)
    alone = Case(num_large=0, speculate=True)
    cases = [alone] + [
        Case(num_large=number, speculate=speculate)
        for number in sorted(set(arguments.streams) - {0})
        for speculate in (False, True)
    ]
    run = partial(run_case, bench, prompts, max_large=arguments.max_large)
    whole = {"num_answers": arguments.num_prompts, "max_small": arguments.max_new}
    short = {"num_answers": 1, "max_small": min(32, arguments.max_new)}
    rounds = measure_in_turn(
        {case.name: partial(run, case, **whole) for case in cases},
        repeats=arguments.repeats,
        warm_up={case.name: partial(run, case, **short) for case in cases},
        description="small tier",
    )
    results = {case.name: report(rounds[case.name], rounds[alone.name]) for case in cases}
    show_table(
        "small-tier answers",
        ["", "token ms", "p99", "gap ms", "p99", "ttft ms", "tok/s", "slowdown", "large tok/s"],
        [
            [
                name,
                milliseconds(entry["token_s"].median),
                milliseconds(entry["token_s"].p99),
                milliseconds(entry["gap_s"].median),
                milliseconds(entry["gap_s"].p99),
                milliseconds(entry["ttft_s"].median),
                f"{entry['tokens_per_s'].median:.1f}",
                f"{entry['slowdown'].median:.2f}",
                f"{entry['large_tokens_per_s'].median:.1f}",
            ]
            for name, entry in results.items()
        ],
        caption=f"{arguments.repeats} rounds of {arguments.num_prompts} answers",
    )
    write_results("bench_small_tier", variant_name(arguments), results, arguments)


if __name__ == "__main__":
    start(main)
