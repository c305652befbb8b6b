"""Is speculation ever slower than plain decoding, at any load, or after the load has changed?

Method: a closed loop of 1 to 64 clients on one engine, in this process; each client sends its next
request when its last one has ended (benchmarks/speculation/load.py). A run starts the clients,
waits until each has got a token, and then measures for a fixed time; first requests end at
staggered lengths, so that later prompts come in one by one, as they would under a steady load. Off
and on are run next to each other, in pairs, round by round over all points. Both are the same
engine: a request says whether it wants speculation, and one that does not is never shown to the
drafter (`--control` adds an engine that has none, to see that this is a fair "off").

The load step is one run: 1 client, then 64 for a while, then the first one again. `rush` is the
time from their arrival until each of the 64 has got a token. The steady points of 1 and 64 clients
are taken from it.

Reading it: ratios above 1 are in favour of speculation, with a 95 % interval (bootstrap over
pairs). `tok/s`: all clients together. `token`: a request's mean time per token, p50 and p99 over
requests. `gap p99`: what a reader waits between two chunks, speculation on over off: chunks with
more tokens come at longer intervals. `wasted`: verified nodes not accepted, per emitted token.

    python -m benchmarks.speculation.bench_load --dtype bfloat16 --expand-target 400M
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.shared.disagreeing import add_pair_option
from benchmarks.shared.driving import Bench, add_draft_options, build_bench, make_requests
from benchmarks.shared.harness import (
    argument_parser,
    console,
    measure_in_turn,
    milliseconds,
    percentile,
    prepare,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.intervals import Interval, ratio_of_percentiles, ratio_of_rates
from benchmarks.shared.pair import Folders, Pair, add_prompt_options
from benchmarks.shared.prompts import Prompt
from benchmarks.speculation.load import ClosedLoop, Window
from benchmarks.speculation.load_plot import draw
from outrider.engine.request import EngineRequest

ON, OFF, CONTROL = "on", "off", "no drafter"
PHASES = ("before", "rush", "full", "after")

_GOAL_RATIO = 0.98
_GOAL_GAP = 1.6
_NUM_PROMPTS = 128
_WARM_UP_S = 0.3
_LEAST_FIRST_TOKENS = 8
# Multiples of it, modulo 1, are spread evenly (any number of them).
_GOLDEN = 0.618034

Windows = dict[str, Window]
"""By phase; a steady load has one phase, named by its number of clients."""


def client_numbers(most: int) -> list[int]:
    """1, 2, 4 and so on, and `most` at the end."""
    powers = [1 << power for power in range(most.bit_length())]
    return sorted({*powers, most})


def new_request(
    client: int,
    number: int,
    *,
    pair: Pair,
    prompts: Sequence[Prompt],
    max_tokens: int,
    speculate: bool,
) -> EngineRequest:
    """The client's next request: the same on all sides, but for the speculation."""
    limit = max_tokens
    if number == 0 and client > 0:
        share = client * _GOLDEN % 1.0
        limit = min(max(_LEAST_FIRST_TOKENS, int(share * max_tokens)), max_tokens)
    (request,) = make_requests(
        [prompts[(7 * client + number) % len(prompts)]],
        tier="large",
        max_tokens=limit,
        speculate=speculate,
        stop=pair.stop,
    )
    return request


def steady(loop: ClosedLoop, num_clients: int, seconds: float) -> Windows:
    """One point: so many clients for so long."""
    loop.resize(num_clients)
    loop.settle()
    windows = {str(num_clients): loop.run(seconds)}
    loop.stop()
    return windows


def load_step(loop: ClosedLoop, most: int, seconds: float) -> Windows:
    """One client, then `most`, then one again; each phase for so long."""
    loop.resize(1)
    loop.settle()
    before = loop.run(seconds)
    loop.resize(most)
    rush = loop.settle()
    full = loop.run(seconds)
    loop.resize(1)
    loop.settle()
    after = loop.run(seconds)
    loop.stop()
    return dict(zip(PHASES, (before, rush, full, after), strict=True))


def cases(
    pair: Pair, benches: Mapping[str, Bench], prompts: Sequence[Prompt], arguments: Any
) -> Callable[[float], dict[str, Callable[[], Windows]]]:
    """From the length of a window to all cases, off beside on."""

    def run(side: str, shape: Callable[[ClosedLoop], Windows]) -> Windows:
        request = partial(
            new_request,
            pair=pair,
            prompts=prompts,
            max_tokens=arguments.max_new,
            speculate=side == ON,
        )
        return shape(ClosedLoop(benches[side], request))

    def make(seconds: float) -> dict[str, Callable[[], Windows]]:
        shapes: dict[str, Callable[[ClosedLoop], Windows]] = {
            str(number): partial(steady, num_clients=number, seconds=seconds)
            for number in arguments.clients[1:-1]
        }
        shapes["step"] = partial(load_step, most=arguments.clients[-1], seconds=seconds)
        return {
            f"{name} {side}": partial(run, side, shape)
            for name, shape in shapes.items()
            for side in benches
        }

    return make


# ---- what is made of it -----------------------------------------------------------------------


def side_report(windows: Sequence[Window]) -> dict[str, Any]:
    """Figures of one side, over all pairs."""
    num_tokens = sum(window.num_tokens for window in windows)
    wasted = sum(window.num_drafted_tokens - window.num_accepted_tokens for window in windows)
    token_s = [sample for window in windows for sample in window.token_s]
    gap_s = [sample for window in windows for sample in window.gap_s]
    return {
        "tokens_per_s": num_tokens / sum(window.wall_s for window in windows),
        "num_tokens": num_tokens,
        "num_requests": len(token_s),
        "token_s": _percentiles(token_s),
        "gap_s": _percentiles(gap_s),
        "wasted_nodes_per_token": wasted / max(num_tokens, 1),
    }


def _percentiles(samples: Sequence[float]) -> dict[str, float | None]:
    return {
        f"p{percent}": percentile(samples, percent) if samples else None for percent in (50, 99)
    }


def comparison(on: Sequence[Window], off: Sequence[Window]) -> dict[str, Interval | None]:
    """On against off, pair by pair; above 1 speculation is faster (`gap_p99`: below 1)."""

    def percentiles(part: str, percent: float, *, on_over_off: bool) -> Interval | None:
        sides = [[getattr(window, part) for window in side] for side in (on, off)]
        if not all(any(side) for side in sides):  # answers too short for a pace
            return None
        above, below = sides if on_over_off else sides[::-1]
        return ratio_of_percentiles(above, below, percent)

    return {
        "tokens_per_s": ratio_of_rates(
            ([w.num_tokens for w in on], [w.num_tokens for w in off]),
            ([w.wall_s for w in on], [w.wall_s for w in off]),
        ),
        "token_p50": percentiles("token_s", 50, on_over_off=False),
        "token_p99": percentiles("token_s", 99, on_over_off=False),
        "gap_p99": percentiles("gap_s", 99, on_over_off=True),
    }


def by_phase(rounds: Mapping[str, Sequence[Windows]], name: str) -> dict[str, dict[str, Any]]:
    """Reports of a case's phases: both sides, and how they compare."""
    sides = {
        side: rounds[key] for side in (OFF, ON, CONTROL) if (key := f"{name} {side}") in rounds
    }
    reports = {}
    for phase in sides[ON][0]:
        windows = {side: [done[phase] for done in runs] for side, runs in sides.items()}
        report: dict[str, Any] = {side: side_report(done) for side, done in windows.items()}
        report["ratio"] = comparison(windows[ON], windows[OFF])
        if CONTROL in windows:
            report["off_over_control"] = comparison(windows[OFF], windows[CONTROL])
        reports[phase] = report
    return reports


def recovery(rounds: Mapping[str, Sequence[Windows]]) -> dict[str, Interval]:
    """For each side: the lone client's rate after the load over its rate before."""
    found = {}
    for side in (OFF, ON):
        runs = rounds[f"step {side}"]
        after, before = ([done[phase] for done in runs] for phase in (PHASES[-1], PHASES[0]))
        found[side] = ratio_of_rates(
            ([w.num_tokens for w in after], [w.num_tokens for w in before]),
            ([w.wall_s for w in after], [w.wall_s for w in before]),
        )
    return found


def _show(title: str, reports: Mapping[str, Mapping[str, Any]]) -> None:
    rows = []
    for name, report in reports.items():
        ratio, on, off = report["ratio"], report[ON], report[OFF]
        rows.append(
            [
                name,
                f"{off['tokens_per_s']:.0f}",
                f"{on['tokens_per_s']:.0f}",
                str(ratio["tokens_per_s"]),
                _ms(off["token_s"]["p50"]),
                _ms(on["token_s"]["p50"]),
                str(ratio["token_p50"] or "-"),
                str(ratio["token_p99"] or "-"),
                str(ratio["gap_p99"] or "-"),
                f"{on['wasted_nodes_per_token']:.2f}",
            ]
        )
    columns = ["clients", "off tok/s", "on", "x", "off token ms", "on", "x p50", "x p99"]
    show_table(title, [*columns, "gap p99", "wasted"], rows)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else milliseconds(seconds)


def _show_goals(reports: Mapping[str, Mapping[str, Any]]) -> None:
    ratios = [
        (report["ratio"][part].estimate, f"{name}, {part}")
        for name, report in reports.items()
        for part in ("tokens_per_s", "token_p50", "token_p99")
        if report["ratio"][part] is not None
    ]
    gaps = [
        (report["ratio"]["gap_p99"].estimate, name)
        for name, report in reports.items()
        if report["ratio"]["gap_p99"] is not None
    ]
    worst, where = min(ratios)
    never = verdict(worst >= _GOAL_RATIO)
    console.print(f"never below {_GOAL_RATIO}: {never} ({worst:.3f}, {where})")
    if gaps:
        longest, where = max(gaps)
        console.print(
            f"p99 gap at most {_GOAL_GAP} x: {verdict(longest <= _GOAL_GAP)} "
            f"({longest:.2f}, {where})"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run all points, write the results and the plot."""
    parser = argument_parser(__doc__)
    add_prompt_options(parser, num_prompts=_NUM_PROMPTS, max_new=64)
    parser.add_argument("--most", type=int, default=64, help="clients: 1, 2, 4 ... to this many")
    parser.add_argument("--pairs", type=int, default=20, help="off-on pairs at each point")
    parser.add_argument("--window-s", type=float, default=1.5, help="measured seconds of a run")
    parser.add_argument("--control", action="store_true", help="also an engine without a drafter")
    add_draft_options(parser)
    add_pair_option(parser)
    arguments = parser.parse_args(argv)
    if arguments.most < 2:
        parser.error("--most must be at least 2")
    arguments.clients = client_numbers(arguments.most)
    prepare(arguments)
    folders = Folders.of(arguments)
    prompts = folders.task_prompts(arguments, arguments.num_prompts)
    pair = folders.load(arguments, prompts, num_sequences=max(arguments.clients))
    bench = pair.bench()
    benches = {OFF: bench, ON: bench}
    if arguments.control:
        benches[CONTROL] = build_bench(
            {"large": pair.runners["large"]}, forward_cpu=bench.forward_cpu
        )
    make = cases(pair, benches, prompts, arguments)
    rounds = measure_in_turn(
        make(arguments.window_s),
        repeats=arguments.pairs,
        warm_up=make(_WARM_UP_S),
        description="load",
    )
    step = by_phase(rounds, "step")
    first, *between, last = map(str, arguments.clients)
    points: dict[str, Any] = {first: step["before"]}
    for name in between:
        points |= by_phase(rounds, name)
    points[last] = step["full"]
    results: dict[str, Any] = {
        **pair.describe(),
        "points": points,
        "step": step,
        "recovery": recovery(rounds),
    }
    _show(f"steady load, {arguments.pairs} pairs", points)
    _show(f"load step 1 → {last} → 1", step)
    sides = ", ".join(f"{side} {interval}" for side, interval in results["recovery"].items())
    console.print(f"rate of the lone client after the load over before: {sides}")
    _show_goals(points | {f"step, {phase}": report for phase, report in step.items()})
    path = write_results("bench_load", variant_name(arguments), results, arguments)
    draw(results, Path(path).with_suffix(".png"))


if __name__ == "__main__":
    start(main)
