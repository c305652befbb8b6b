"""How many requests meet their latency objectives, by how the queue is kept?

Method: the first ten minutes of the Azure conversation trace of 2023; of its
requests a share, by a fixed seed (`--share 1`: all of them). Lengths
shrink by one factor, so that the longest request fits into `--context`; gaps shrink by another, to
the rates of `--loads`, which are multiples of what the engine carries with its places always full
(measured first). 70 % of the requests are short chats and 30 % batch, by a fixed seed. Short chats
ask for a time to first token and a mean time between tokens; batch asks to have ended some time
after arrival. The objectives are multiples of what one request alone takes, unless given in ms.
Cases, run in turn (A B A B), each with an engine of its own over the same models:

    arrival order      first come, first served
    fair queue         fairness between tenants; there is one, so by priority and arrival
    slo queue          by deadlines: least slack first, batch holds back and makes room

A request arrives when the trace says so, whether or not the engine had time for it: latency counts
from there.

Reading it: `goodput` is the requests a second that met all their objectives, over the whole run
until the last answer. `attained` is their share; `chat` and `batch` of each class. `over order`:
goodput by that of arrival order, with a 95 % interval (bootstrap over rounds). The last lines say
where the slo queue is good enough to be the default: 1.3 times the goodput where arrival order
attains less than 0.75, elsewhere a lower bound of 0.97. `rate at 90 %`: the highest rate at which
so many attain, between the measured rates by straight lines. `equal`: the share of answers that are
token for token what they were in arrival order (below 1 is a defect with float32).

    OUTRIDER_DATA=... python -m benchmarks.gateway.bench_slo --dtype float32
"""

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gateway.slo_plot import draw
from benchmarks.shared.driving import build_bench, drive, make_requests
from benchmarks.shared.harness import (
    Summary,
    argument_parser,
    console,
    measure_in_turn,
    milliseconds,
    prepare,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.intervals import ratio_of_rates
from benchmarks.shared.pair import Folders, Pair
from benchmarks.shared.prompts import Prompt
from benchmarks.shared.slo_trace import (
    DEFAULT_TRACE,
    Arrival,
    Objectives,
    Outcome,
    attainment,
    classed,
    find_trace,
    prompt_tokens,
    rate_at,
    read_trace,
    scaled,
    thinned,
)
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.events import EngineEvent, Finished, TokensEmitted
from outrider.engine.queue.fair_queue import FairQueue
from outrider.engine.queue.policy import ArrivalOrder, QueuePolicy
from outrider.engine.queue.slo_queue import SloQueue
from outrider.engine.request import LOW, NORMAL, EngineRequest, LatencyObjective

ORDER, FAIR, SLO = "arrival order", "fair queue", "slo queue"
MakePolicy = Callable[[], QueuePolicy]
CASES: Mapping[str, MakePolicy] = {ORDER: ArrivalOrder, FAIR: FairQueue, SLO: SloQueue}

TARGET_ATTAINMENT = 0.9
GOAL_RATIO = 1.3
# Below this share in arrival order the goal is `GOAL_RATIO`, else this least lower bound.
_FEW_ATTAINED = 0.75
_NO_LOSS = 0.97

_COLUMNS = (
    *("", "goodput/s", "over order", "attained %", "chat %", "batch %", "ttft ms", "p99"),
    *("token ms", "p99", "tok/s", "pre-empted", "equal"),
)


@dataclass(slots=True, kw_only=True)
class Run:
    """The result of one case at one rate in one round. Answers are in the trace's order."""

    outcomes: list[Outcome]
    answers: list[tuple[int, ...]]
    wall_s: float
    num_preemptions: int

    def of_class(self, name: str) -> list[Outcome]:
        """The outcomes of one class."""
        return [outcome for outcome in self.outcomes if outcome.trace_class == name]

    def num_met(self, wanted: Objectives) -> int:
        """Requests that met their objectives."""
        return sum(outcome.meets(wanted) for outcome in self.outcomes)

    def goodput(self, wanted: Objectives) -> float:
        """Requests a second that met their objectives."""
        return self.num_met(wanted) / self.wall_s


class Replay:
    """Submits requests when they are due, and books what comes."""

    def __init__(self, engine: Engine, requests: Sequence[tuple[Arrival, EngineRequest]]) -> None:
        self._engine = engine
        self._requests = requests
        self._answers: dict[str, list[int]] = {r.request_id: [] for _, r in requests}
        self._first_s: dict[str, float] = {}
        self._end_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}
        self._num_preemptions = 0

    def run(self) -> Run:
        """Replay to the end of the last answer."""
        engine, num_sent = self._engine, 0
        started_s = time.monotonic()
        while num_sent < len(self._requests) or engine.has_work:
            now_s = time.monotonic()
            while num_sent < len(self._requests):
                arrival, request = self._requests[num_sent]
                due_s = started_s + arrival.at_s
                if due_s > now_s:
                    break
                self._due_s[request.request_id] = due_s
                engine.submit(replace(request, arrival_s=due_s))
                num_sent += 1
            if engine.has_work:
                self._take(engine.step())
            else:
                time.sleep(1e-4)
        return Run(
            outcomes=[self._outcome(*each) for each in self._requests],
            answers=[tuple(self._answers[r.request_id]) for _, r in self._requests],
            wall_s=time.monotonic() - started_s,
            num_preemptions=self._num_preemptions,
        )

    def _take(self, events: list[EngineEvent]) -> None:
        now_s = time.monotonic()
        for event in events:
            if isinstance(event, TokensEmitted):
                self._answers[event.request_id] += event.token_ids
                self._first_s.setdefault(event.request_id, now_s)
            elif isinstance(event, Finished):
                self._end_s[event.request_id] = now_s
                self._num_preemptions += event.stats.num_preemptions

    def _outcome(self, arrival: Arrival, request: EngineRequest) -> Outcome:
        name = request.request_id
        due_s = self._due_s[name]
        return Outcome(
            trace_class=arrival.trace_class,
            ttft_s=self._first_s[name] - due_s,
            end_s=self._end_s[name] - due_s,
            num_tokens=len(self._answers[name]),
        )


@dataclass(frozen=True, kw_only=True)
class World:
    """The models, the text for the prompts, and how the engine is run."""

    pair: Pair
    corpus: Sequence[int]
    config: EngineConfig

    def engine(self, policy: MakePolicy) -> Any:
        """A bench of its own over the same models."""
        return build_bench(
            self.pair.runners,
            draft_config=self.pair.config,
            budget=self.pair.budget,
            config=self.config,
            policy=policy(),
        )

    def requests(
        self, arrivals: Sequence[Arrival], wanted: Objectives | None
    ) -> list[tuple[Arrival, EngineRequest]]:
        """The trace's requests; batch asks for low priority as well, as its class does."""
        prompts = [
            Prompt(messages=(), token_ids=tokens, kind=arrival.trace_class)
            for arrival, tokens in zip(arrivals, prompt_tokens(arrivals, self.corpus), strict=True)
        ]
        made = make_requests(prompts, tier="large", max_tokens=1)
        return [
            (arrival, _shaped(request, arrival, wanted))
            for arrival, request in zip(arrivals, made, strict=True)
        ]


def _shaped(request: EngineRequest, arrival: Arrival, wanted: Objectives | None) -> EngineRequest:
    is_batch = arrival.trace_class == "batch"
    objective = LatencyObjective(is_batch=is_batch)
    if wanted is not None and not is_batch:
        objective = LatencyObjective(ttft_s=wanted.ttft_s, inter_token_s=wanted.inter_token_s)
    return replace(
        request,
        sampling=replace(request.sampling, max_tokens=arrival.num_answer),
        objective=objective,
        priority=LOW if is_batch else NORMAL,
    )


def run_case(
    world: World, policy: MakePolicy, arrivals: Sequence[Arrival], wanted: Objectives
) -> Run:
    """One replay under one policy."""
    bench = world.engine(policy)
    return Replay(bench.engine, world.requests(arrivals, wanted)).run()


# ---- what the machine carries ------------------------------------------------------------------


def alone(world: World, arrivals: Sequence[Arrival]) -> tuple[float, float]:
    """Median seconds to the first token and between tokens, of one request at a time."""
    bench = world.engine(ArrivalOrder)
    requests = [request for _, request in world.requests(arrivals, None)]
    streams = drive(bench, requests, concurrency=1).streams
    ttft_s = median(stream.arrivals[0][0] - stream.submitted_s for stream in streams)
    gaps = [s.decode_s / s.num_decoded_tokens for s in streams if s.num_decoded_tokens]
    return ttft_s, median(gaps)


def capacity(world: World, arrivals: Sequence[Arrival]) -> float:
    """Requests a second with all places full, in arrival order."""
    bench = world.engine(ArrivalOrder)
    requests = [request for _, request in world.requests(arrivals, None)]
    return len(requests) / drive(bench, requests, concurrency=world.config.max_sequences).wall_s


def objectives(arguments: argparse.Namespace, ttft_s: float, token_s: float) -> Objectives:
    """As the arguments say: in ms, or as multiples of what a request alone takes."""
    return Objectives(
        ttft_s=ttft_s * arguments.ttft_scale if not arguments.ttft_ms else arguments.ttft_ms / 1e3,
        inter_token_s=token_s * arguments.inter_token_scale
        if not arguments.inter_token_ms
        else arguments.inter_token_ms / 1e3,
        batch_end_s=arguments.batch_end_s,
    )


# ---- figures -----------------------------------------------------------------------------------


def report(rounds: Sequence[Run], order: Sequence[Run], wanted: Objectives) -> dict[str, Any]:
    """Figures of one case at one rate."""
    chats = [outcome for run in rounds for outcome in run.of_class("short-chat")]
    batch = [outcome for run in rounds for outcome in run.of_class("batch")]
    goodput = [run.goodput(wanted) for run in rounds]
    known = order[0].answers
    equal = [
        answer == right for run in rounds for answer, right in zip(run.answers, known, strict=True)
    ]
    return {
        "goodput_per_s": Summary.of(goodput),
        "attainment": attainment(chats + batch, wanted),
        "chat_attainment": attainment(chats, wanted),
        "batch_attainment": attainment(batch, wanted),
        "goodput_over_order": ratio_of_rates(
            (_met(rounds, wanted), _met(order, wanted)),
            ([run.wall_s for run in rounds], [run.wall_s for run in order]),
        ),
        "chat_ttft_s": Summary.of([o.ttft_s for o in chats if o.ttft_s is not None]),
        "chat_inter_token_s": Summary.of([o.inter_token_s for o in chats]),
        "batch_end_s": Summary.of([o.end_s for o in batch if o.end_s is not None]),
        "wall_s": Summary.of([run.wall_s for run in rounds]),
        "tokens_per_s": Summary.of(
            [sum(o.num_tokens for o in run.outcomes) / run.wall_s for run in rounds]
        ),
        "preemptions": Summary.of([float(run.num_preemptions) for run in rounds]),
        "equal_share": sum(equal) / len(equal),
    }


def _met(rounds: Sequence[Run], wanted: Objectives) -> list[float]:
    """Requests of each round that met their objectives; hardly any where none did."""
    return [max(float(run.num_met(wanted)), 1e-3) for run in rounds]


def by_rate(points: Mapping[str, Mapping[str, Any]], rates: Sequence[float]) -> dict[str, Any]:
    """For each case the highest rate with the target attainment, and its ratio to arrival order."""
    found: dict[str, Any] = {}
    for name in CASES:
        line = [(rate, points[_point(rate)][name]["attainment"]) for rate in rates]
        found[name] = {"rate_per_s": rate_at(line, TARGET_ATTAINMENT)}
    base = found[ORDER]["rate_per_s"]
    for entry in found.values():
        rate = entry["rate_per_s"]
        entry["over_order"] = None if base is None or rate is None else rate / base
    return found


def _point(rate: float) -> str:
    return f"{rate:.4g}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases at all rates, write the results and the plot."""
    arguments = _parser().parse_args(argv)
    trace = find_trace(arguments.trace)
    prepare(arguments)
    arrivals = classed(
        read_trace(trace, first_s=arguments.minutes * 60),
        batch_share=arguments.batch_share,
        seed=arguments.seed,
    )
    if arguments.share < 1.0:
        arrivals = thinned(arrivals, share=arguments.share, seed=arguments.seed)
    world = _world(arguments)
    sample = scaled(arrivals, context=arguments.context, rate=1.0)[: arguments.sample]
    capacity(world, sample[:32])  # warm
    ttft_s, token_s = alone(world, sample[:24])
    wanted = objectives(arguments, ttft_s, token_s)
    carried = arguments.rate or capacity(world, sample)
    rates = [load * carried for load in arguments.loads]
    console.print(
        f"{len(arrivals)} requests; alone {milliseconds(ttft_s)} ms to the first token and "
        f"{milliseconds(token_s)} ms a token; full: {carried:.1f} requests/s; wanted "
        f"{milliseconds(wanted.ttft_s)} and {milliseconds(wanted.inter_token_s)} ms"
    )
    replays = {
        (rate, name): partial(
            run_case, world, policy, scaled(arrivals, context=arguments.context, rate=rate), wanted
        )
        for rate in rates
        for name, policy in CASES.items()
    }
    warm_up = {
        key: partial(run_case, world, CASES[key[1]], _brief(arrivals, arguments, key[0]), wanted)
        for key in replays
    }
    rounds = measure_in_turn(
        {f"{name} at {_point(rate)}/s": case for (rate, name), case in replays.items()},
        repeats=arguments.repeats,
        warm_up={f"{name} at {_point(rate)}/s": case for (rate, name), case in warm_up.items()},
        description="slo",
    )
    points = {
        _point(rate): {
            name: report(
                rounds[f"{name} at {_point(rate)}/s"],
                rounds[f"{ORDER} at {_point(rate)}/s"],
                wanted,
            )
            for name in CASES
        }
        for rate in rates
    }
    results = {
        "alone": {"ttft_s": ttft_s, "inter_token_s": token_s},
        "carried_per_s": carried,
        "objectives": wanted,
        "num_requests": len(arrivals),
        "loads": dict(zip(map(_point, rates), arguments.loads, strict=True)),
        "points": points,
        "at_target": by_rate(points, rates),
    }
    _show(results, rates, arguments)
    path = write_results("bench_slo", variant_name(arguments), results, arguments)
    draw(results, Path(path).with_suffix(".png"))


def _brief(
    arrivals: Sequence[Arrival], arguments: argparse.Namespace, rate: float
) -> list[Arrival]:
    """For the warm-up: the first few."""
    return scaled(arrivals, context=arguments.context, rate=rate)[:24]


def _world(arguments: argparse.Namespace) -> World:
    folders = Folders.of(arguments)
    arguments.prompts, arguments.max_prompt, arguments.max_new = "tasks", 512, arguments.context
    prompts = folders.task_prompts(arguments, 256)
    pair = folders.load(arguments, prompts, num_sequences=arguments.max_sequences)
    corpus = [token for prompt in prompts for token in prompt.token_ids]
    config = EngineConfig(max_sequences=arguments.max_sequences, max_waiting=100_000)
    return World(pair=pair, corpus=corpus, config=config)


def _show(
    results: Mapping[str, Any], rates: Sequence[float], arguments: argparse.Namespace
) -> None:
    rows = []
    for rate in rates:
        for name in CASES:
            entry = results["points"][_point(rate)][name]
            rows.append(
                [
                    f"{_point(rate)}/s {name}",
                    f"{entry['goodput_per_s'].median:.2f}",
                    str(entry["goodput_over_order"]),
                    *(
                        f"{100 * entry[f'{part}attainment']:.1f}"
                        for part in ("", "chat_", "batch_")
                    ),
                    milliseconds(entry["chat_ttft_s"].median),
                    milliseconds(entry["chat_ttft_s"].p99),
                    milliseconds(entry["chat_inter_token_s"].median),
                    milliseconds(entry["chat_inter_token_s"].p99),
                    f"{entry['tokens_per_s'].median:.0f}",
                    f"{entry['preemptions'].median:.0f}",
                    f"{entry['equal_share']:.3f}",
                ]
            )
    show_table(
        "latency objectives by queue",
        _COLUMNS,
        rows,
        caption=f"{arguments.repeats} rounds, {arguments.max_sequences} places",
    )
    for name, entry in results["at_target"].items():
        rate = entry["rate_per_s"]
        told = "none of these rates" if rate is None else f"{rate:.2f} requests/s"
        console.print(f"{100 * TARGET_ATTAINMENT:.0f} % attained up to: {name}: {told}")
    ratio = results["at_target"][SLO]["over_order"]
    ratio = math.nan if ratio is None else ratio
    goal = f"goal: {GOAL_RATIO} of arrival order at the same attainment: {ratio:.2f}"
    console.print(f"{goal} {verdict(ratio >= GOAL_RATIO)}")
    for rate in rates:
        point = results["points"][_point(rate)]
        found, attained = point[SLO]["goodput_over_order"], point[ORDER]["attainment"]
        load = results["loads"][_point(rate)]
        if attained < _FEW_ATTAINED:
            told, is_met = f"at least {GOAL_RATIO}", found.estimate >= GOAL_RATIO
        else:
            told, is_met = f"lower bound at least {_NO_LOSS}", found.low >= _NO_LOSS
        console.print(
            f"load {load}, arrival order {attained:.2f}: {found}, {told}: {verdict(is_met)}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__)
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE, help="also in $OUTRIDER_DATA")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the trace")
    parser.add_argument("--share", type=float, default=0.2, help="of its requests, by the seed")
    parser.add_argument("--context", type=int, default=1024, help="the longest request, in tokens")
    parser.add_argument("--batch-share", type=float, default=0.3)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.6, 0.8, 1.0])
    parser.add_argument("--rate", type=float, help="what a load of 1 is; default: measured")
    parser.add_argument("--sample", type=int, default=256, help="requests to measure that with")
    parser.add_argument("--max-sequences", type=int, default=16, help="that run at once")
    parser.add_argument("--ttft-scale", type=float, default=10.0)
    parser.add_argument("--inter-token-scale", type=float, default=5.0)
    parser.add_argument("--ttft-ms", type=float, help="instead of the scale")
    parser.add_argument("--inter-token-ms", type=float, help="instead of the scale")
    parser.add_argument("--batch-end-s", type=float, default=30.0)
    parser.set_defaults(repeats=2)
    return parser


if __name__ == "__main__":
    start(main)
