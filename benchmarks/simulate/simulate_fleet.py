"""What does placement by an index of caches gain, on how many replicas, and what does it cost?

Method: the real index, placement and autoscaling policy, in virtual time. A replica is a model of
step times (`simulate_slo`: of the size of 8 B on a GPU) with a prefix cache of as many tokens as
fp8 keys of such a model have beside it on a GPU of 141 GB. Its news come 50 ms late. Requests are
those of Mooncake's conversation trace (without the file: texts with about the same statistics), at
several rates; an answer is good if its first token came within 2 s and its tokens within 50 ms.
`oracle`: the same placement, which looks into the caches themselves. For more replicas, copies of
the trace with other texts. In the run with failures, of four, each replica loses everything once
and is back after 30 s; its requests begin anew at others. Scaling follows the same trace with a
day's rise and fall, and Azure's. Prompts apart: some of four replicas compute prompts for the
others where the gateway's own rule says that it pays, over two kinds of line.

Reading it: everything is in virtual time but `place us` and `update us`, the index's own time on
this machine, which depend on what else runs. `over` is goodput by that of round robin.

    OUTRIDER_DATA=... python -m benchmarks.simulate.simulate_fleet
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.shared.harness import console, progress_bar, show_table, write_results
from benchmarks.shared.record import RESULTS
from benchmarks.shared.slo_trace import DEFAULT_TRACE, read_trace
from benchmarks.simulate.fleet_plot import draw
from benchmarks.simulate.fleet_trace import (
    MOONCAKE,
    Call,
    Row,
    offered,
    read_mooncake,
    span_of,
    synthetic,
)
from benchmarks.simulate.simulate_slo import MACHINES
from benchmarks.simulate.virtual_apart import LINES, ApartFleet, apart_figures
from benchmarks.simulate.virtual_fleet import Job, Objective, VirtualFleet
from outrider.gateway.engines.fleet.autoscaling import ScaleToLatency, ScalingLimits

POLICIES: Final = ("round robin", "least work", "cache aware", "oracle")
APART: Final = ((0, "200 Gbit/s"), (1, "200 Gbit/s"), (2, "200 Gbit/s"), (1, "10 Gbit/s"))
"""Replicas for prompts, of four, and the line between them."""
MACHINE: Final = replace(MACHINES["8 B, a GPU"], tokens=1.0)
OBJECTIVE: Final = Objective(ttft_s=2.0, inter_token_s=0.05)


def figures(fleet: VirtualFleet, jobs: Sequence[Job], calls: Sequence[Call]) -> dict[str, float]:
    """Return what came of a run."""
    good = sum(OBJECTIVE.is_met(job) for job in jobs)
    ttfts_s = np.array([job.first_s - job.call.at_s for job in jobs if job.first_s is not None])
    found = {
        "offered_per_s": len(calls) / calls[-1].at_s,
        "goodput_per_s": good / calls[-1].at_s,
        "attainment": good / len(jobs),
        "hit_rate": sum(job.hit for job in jobs) / sum(job.call.num_prompt for job in jobs),
        "ttft_p50_s": float(np.percentile(ttfts_s, 50)),
        "ttft_p99_s": float(np.percentile(ttfts_s, 99)),
        "num_unanswered": sum(job.end_s is None for job in jobs),
        "num_begun_anew": sum(job.num_failures for job in jobs),
        "replica_s_per_good": fleet.replica_s / max(good, 1),
        "place_p50_us": float(np.percentile(fleet.place_s, 50)) * 1e6,
        "place_p99_us": float(np.percentile(fleet.place_s, 99)) * 1e6,
    }
    if fleet.index is not None:
        found |= {
            "index_pairs": fleet.index.num_pairs,
            "index_bytes": fleet.index.num_bytes,
            "index_lost": fleet.index.num_lost,
            "update_us": fleet.update_s / max(fleet.num_updates, 1) * 1e6,
        }
    return found


def run(  # noqa: PLR0913 - what a fleet is made of
    calls: Sequence[Call],
    *,
    policy: str,
    num_replicas: int,
    num_blocks: int,
    fails: bool = False,
    scaling: ScaleToLatency | None = None,
    num_at_first: int | None = None,
    loaded: tuple[float, float] | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Simulate one fleet; `loaded`: the begin and end of the time of `loaded_goodput_per_s`."""
    failures: list[tuple[float, int]] = []
    if fails:  # one after another, through the middle of the run
        span_s = calls[-1].at_s
        failures = [
            (span_s * (0.2 + 0.6 * lane / num_replicas), lane) for lane in range(num_replicas)
        ]
    fleet = VirtualFleet(
        machine=MACHINE,
        num_replicas=num_replicas,
        num_blocks=num_blocks,
        policy=policy,
        failures=failures,
        scaling=scaling,
        num_at_first=num_at_first,
        seed=seed,
    )
    jobs = fleet.run(calls)
    found = figures(fleet, jobs, calls)
    if loaded is not None:
        begin_s, end_s = loaded
        good = sum(OBJECTIVE.is_met(job) for job in jobs if begin_s <= job.call.at_s < end_s)
        found["loaded_goodput_per_s"] = good / (end_s - begin_s)
    return found


def at_rates(
    trace: Sequence[Row],
    rates: Sequence[float],
    *,
    num_replicas: int,
    num_blocks: int,
    advance: Callable[[str], None],
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures of all policies by rate a replica; with failures at the last but one."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    cases = [(f"{rate:g}", rate, False) for rate in rates]
    cases.append((f"{rates[-2]:g}, failures", rates[-2], True))
    for name, rate, fails in cases:
        calls = offered(trace, rate=rate * num_replicas)
        found[name] = {}
        for policy in POLICIES:
            found[name][policy] = run(
                calls,
                policy=policy,
                num_replicas=num_replicas,
                num_blocks=num_blocks,
                fails=fails,
            )
            advance(f"{name}/s a replica, {policy}")
        robin = max(found[name]["round robin"]["goodput_per_s"], 1e-9)
        for one in found[name].values():
            one["over_round_robin"] = one["goodput_per_s"] / robin
            one["of_oracles_hits"] = one["hit_rate"] / max(found[name]["oracle"]["hit_rate"], 1e-9)
    return found


def by_size(
    trace: Sequence[Row],
    sizes: Sequence[int],
    *,
    rate: float,
    num_blocks: int,
    advance: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    """Return the figures of fleets that have as much to do for each replica.

    Four replicas share a copy of the trace's beginning, of fewer a part of its requests. Copies do
    not begin at once, nor end, so what fleets do is compared while all copies go on: linear is the
    goodput of requests that come in that time, by that of four replicas and the number.
    """
    found: dict[str, dict[str, float]] = {}
    for size in sizes:
        copies = max(size // 4, 1)
        part = trace if size >= 4 else trace[: len(trace) * size // 4]
        calls = offered(part, rate=rate * size, copies=copies)
        span_s = span_of(part, rate=rate * size, copies=copies)
        found[str(size)] = run(
            calls,
            policy="cache aware",
            num_replicas=size,
            num_blocks=num_blocks,
            loaded=(span_s / 10, span_s),
        )
        advance(f"{size} replicas")
    base = 4 if 4 in sizes else sizes[0]
    for size, one in zip(sizes, found.values(), strict=True):
        one["linear"] = one["loaded_goodput_per_s"] / found[str(base)]["loaded_goodput_per_s"]
        one["linear"] *= base / size
    return found


def scaled_fleet(
    calls: Sequence[Call], *, num_blocks: int, advance: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """Return the figures of fleets that are scaled, and of a fixed one with the most replicas.

    One has run before; one has a single replica when the calls begin.
    """
    found = {}
    most = 12
    for name, is_scaled, num_at_first in (
        ("fixed", False, None),
        ("scaled", True, None),
        ("scaled, from one", True, 1),
    ):
        limits = ScalingLimits(most=most, ttft_s=OBJECTIVE.ttft_s)
        found[name] = run(
            calls,
            policy="cache aware",
            num_replicas=most,
            num_blocks=num_blocks,
            scaling=ScaleToLatency(limits) if is_scaled else None,
            num_at_first=num_at_first,
        )
        advance(f"scaling, {name}")
    return found


def apart(
    traces: Mapping[str, Callable[[float], list[Call]]],
    rates: Sequence[float],
    *,
    num_blocks: int,
    advance: Callable[[str], None],
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures of four replicas of which some compute prompts for the others, by case.

    over_both: the 99th percentile between two tokens by that of replicas that do both.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for trace, of_rate in traces.items():
        for rate in rates:
            calls = of_rate(4 * rate)
            case = found[f"{trace}, {rate:g}/s"] = {}
            for num_prefill, line in APART:
                fleet = ApartFleet(
                    machine=MACHINE,
                    num_replicas=4,
                    num_blocks=num_blocks,
                    policy="cache aware",
                    num_prefill=num_prefill,
                    bytes_per_s=LINES[line],
                )
                name = f"{num_prefill} apart, {line}" if num_prefill else "both"
                case[name] = apart_figures(fleet, fleet.run(calls), calls, OBJECTIVE)
                advance(f"{trace}, {rate:g}/s, {name}")
            for one in case.values():
                one["over_both"] = one["gap_p99_s"] / case["both"]["gap_p99_s"]
    return found


def day(trace: Sequence[Row], *, rate: float) -> list[Call]:
    """Return a trace whose rate rises to `rate` a second in the middle and falls again."""
    calls = offered(trace, rate=rate)
    span_s = calls[-1].at_s
    # Time runs slower at both ends: the rate there is a quarter of that in the middle.
    parts = np.array([call.at_s / span_s for call in calls])
    places = np.linspace(0.0, 1.0, 2001)
    density = 0.25 + 0.75 * np.sin(np.pi * places) ** 2
    reached = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    times = np.interp(parts, reached / reached[-1], places) * span_s / float(density.mean())
    return [replace(call, at_s=float(at_s)) for call, at_s in zip(calls, times, strict=True)]


def azure(minutes: float, *, rate: float) -> list[Call] | None:
    """Return Azure's conversations, of which no prefixes are known; None without the file."""
    path = _data(DEFAULT_TRACE)
    if path is None:
        return None
    arrivals = read_trace(path, first_s=minutes * 60)
    none = np.empty(0, dtype=np.uint64)
    faster = rate * arrivals[-1].at_s / len(arrivals)
    return [Call(one.at_s / faster, one.num_prompt, one.num_answer, none) for one in arrivals]


def _at_rate(calls: Sequence[Call], rate: float) -> list[Call]:
    faster = rate * calls[-1].at_s / len(calls)
    return [replace(call, at_s=call.at_s / faster) for call in calls]


def _data(named: Path) -> Path | None:
    folder = os.environ.get("OUTRIDER_DATA")
    paths = [named, *([Path(folder) / named] if folder else [])]
    return next((path for path in paths if path.is_file()), None)


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate all fleets; write and show the results."""
    arguments = _parser().parse_args(argv)
    path = _data(arguments.trace)
    whole = synthetic(arguments.requests) if path is None else read_mooncake(path)
    trace = whole[: arguments.requests]
    azures = azure(30.0, rate=20.0)
    rates, sizes, num_blocks = arguments.rates, arguments.sizes, arguments.cache_tokens // 512
    traces = {"conversations": lambda rate: offered(trace, rate=rate)}
    if azures is not None:
        traces["Azure"] = lambda rate: _at_rate(azures, rate)
    total = len(POLICIES) * (len(rates) + 1) + len(sizes) + 3 + 3 * (azures is not None)
    total += len(APART) * len(traces) * len(rates)
    with progress_bar("virtual fleets", total) as advance:
        results: dict[str, Any] = {
            "trace": "synthetic" if path is None else path.name,
            "four_replicas": at_rates(
                trace, rates, num_replicas=4, num_blocks=num_blocks, advance=advance
            ),
            "sizes": by_size(
                trace[: arguments.requests_of_four],
                sizes,
                rate=arguments.size_rate,
                num_blocks=num_blocks,
                advance=advance,
            ),
            "scaling": scaled_fleet(
                day(whole[: arguments.requests_of_day], rate=16.0),
                num_blocks=num_blocks,
                advance=advance,
            ),
        }
        results["apart"] = apart(traces, rates, num_blocks=num_blocks, advance=advance)
        if azures is not None:
            results["scaling_azure"] = scaled_fleet(azures, num_blocks=num_blocks, advance=advance)
    best = {
        policy: max(one[policy]["goodput_per_s"] for one in results["four_replicas"].values())
        for policy in POLICIES
    }
    results["best_goodput_per_s"] = best
    show(results)
    written = write_results("simulate_fleet", arguments.variant, results, arguments)
    draw(results, written.with_suffix(".png"))


_COLUMNS: Final[Mapping[str, Callable[[Mapping[str, float]], str]]] = {
    "good/s": lambda one: f"{one['goodput_per_s']:.2f}",
    "attained %": lambda one: f"{100 * one['attainment']:.0f}",
    "hits %": lambda one: f"{100 * one['hit_rate']:.1f}",
    "TTFT p99 s": lambda one: f"{one['ttft_p99_s']:.2f}",
    "replica-s": lambda one: f"{one['replica_s_per_good']:.2f}",
    "place us p50": lambda one: f"{one['place_p50_us']:.0f}",
    "over": lambda one: f"{one.get('over_round_robin', one.get('linear', float('nan'))):.2f}",
}


_APART_COLUMNS: Final[Mapping[str, Callable[[Mapping[str, float]], str]]] = {
    "good/s": lambda one: f"{one['goodput_per_s']:.2f}",
    "attained %": lambda one: f"{100 * one['attainment']:.0f}",
    "TTFT p50 s": lambda one: f"{one['ttft_p50_s']:.2f}",
    "TTFT p99 s": lambda one: f"{one['ttft_p99_s']:.2f}",
    "gap p99 ms": lambda one: f"{1e3 * one['gap_p99_s']:.1f}",
    "over both": lambda one: f"{one['over_both']:.2f}",
    "apart %": lambda one: f"{100 * one['apart_share']:.0f}",
}


def show(results: Mapping[str, Any]) -> None:
    """Print the tables."""
    groups = {
        "four replicas (over: by round robin)": {
            f"{rate}/s: {policy}": one
            for rate, policies in results["four_replicas"].items()
            for policy, one in policies.items()
        },
        "by size (over: by the share of four)": results["sizes"],
        "scaling": results["scaling"],
        "scaling, Azure": results.get("scaling_azure", {}),
    }
    for title, rows in groups.items():
        if rows:
            cells = [
                [name, *(column(one) for column in _COLUMNS.values())] for name, one in rows.items()
            ]
            show_table(title, ("", *_COLUMNS), cells)
    for name, ways in results["apart"].items():
        cells = [
            [way, *(column(one) for column in _APART_COLUMNS.values())] for way, one in ways.items()
        ]
        show_table(f"prompts apart, {name} a replica", ("", *_APART_COLUMNS), cells)
    best = results["best_goodput_per_s"]
    text = ", ".join(f"{policy} {rate:.2f}" for policy, rate in best.items())
    console.print(f"best goodput of four replicas at any rate, 1/s: {text}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=MOONCAKE, help="also in $OUTRIDER_DATA")
    parser.add_argument("--requests", type=int, default=12_031, help="of the trace, at most")
    parser.add_argument("--requests-of-day", type=int, default=12_031, help="in those of a day")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1.5, 2.0, 2.5, 3.0], help="a replica and second"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1000])
    parser.add_argument("--size-rate", type=float, default=1.5, help="a replica and second")
    parser.add_argument("--requests-of-four", type=int, default=400, help="in the runs by size")
    parser.add_argument("--cache-tokens", type=int, default=1_900_000, help="of a replica")
    parser.add_argument("--variant", default="mooncake")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the files go")
    return parser


if __name__ == "__main__":
    main()
