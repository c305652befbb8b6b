"""How much of a request's time is the gateway's own, and did a change make it less?

Method: two gateways, each in a process on one core, with the clients (and the mock server) on
another: `local` answers from an engine whose answers are there at once, with keys, limits, prices
and the ledger on; `passed on` sends requests to a mock server, without tenants. With `--baseline`,
the same two of another checkout are asked in turn (A B A B) within the run; all but the one that is
asked are stopped. Clients ask for whole answers: 16 of them one after the other, one by itself, and
a Poisson process at half of the least rate that the 16 reached; the last is streams of 64 chunks,
which are also sent through a relay that only copies bytes.

Reading it: `busy` is the processor time of the gateway's process a request, all threads included,
which other programs on the machine disturb least. `local` has no engine's time in it, so all of its
latency is the gateway's. `lag` is the event loop's at half of the rate, from the gateway's metrics:
the bound below which 99 % lie. `ratio`: busy of this checkout over the baseline's. What the relay
adds to a chunk is two programs waking each other, which nothing between client and server can save;
what the gateway adds beyond it is its own, and so is its processor time a chunk.

    python -m benchmarks.gateway.bench_gateway_time --baseline ../before
"""

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.gateway.bench_tenants import CASES, EVERYTHING, Way, running
from benchmarks.gateway.bench_upstream import added, streams_of
from benchmarks.shared.harness import (
    Summary,
    measure_in_turn,
    milliseconds,
    percentile,
    quiet_transformers,
    show_table,
    start,
    verdict,
    write_results,
)
from benchmarks.shared.record import RESULTS, ROOT
from benchmarks.shared.upstream_servers import (
    Server,
    bucket_quantile,
    cores,
    gateway_server,
    loop_lag,
    mock_server,
    relay_server,
)

LOCAL: Final = "local"
PASSED: Final = "passed on"
NOW: Final = "now"
BASELINE: Final = "baseline"
DIRECT: Final = "direct"
RELAY: Final = "relay"
_US: Final = 1e-6
_WINDOW_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """One gateway, and the model that is asked for."""

    way: Way
    model: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """All gateways by kind and checkout, and the mock behind them."""

    gateways: dict[tuple[str, str], Gateway]
    mock: Server
    relay: Server
    load_core: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What clients saw; the loop's lag is None where it was not read."""

    latencies_s: list[float]
    num_failed: int
    busy_s: float
    seconds: float | None
    lag_p99_s: float | None = None


@contextlib.contextmanager
def test_bed(roots: Mapping[str, Path]) -> Iterator[Bed]:
    """Start the mock and the gateways of each checkout."""
    core, load_core = cores()
    with contextlib.ExitStack() as stack:
        mock = stack.enter_context(mock_server(["--stamped", "--tokens", "64"], core=load_core))
        relay = stack.enter_context(relay_server(mock, core=core))
        gateways: dict[tuple[str, str], Gateway] = {}
        for name, root in roots.items():
            local = stack.enter_context(running(name, CASES[EVERYTHING], core=core, root=root))
            passed = stack.enter_context(gateway_server([("fast", mock.url)], core=core, root=root))
            gateways[LOCAL, name] = Gateway(way=local, model="small", num_tokens=16)
            gateways[PASSED, name] = Gateway(
                way=Way(server=passed, key=None), model="fast", num_tokens=64
            )
        yield Bed(gateways=gateways, mock=mock, relay=relay, load_core=load_core)


# ---- measuring --------------------------------------------------------------------------------


def _seen(bed: Bed, gateway: Gateway, server: Server, options: Sequence[str]) -> dict[str, Any]:
    """Return what clients of `server` saw; other servers' gateways get no processor time meanwhile.

    `gateway`: whose model and key they send.
    """
    command = [sys.executable, "-m", "benchmarks.shared.upstream_load", "--port", str(server.port)]
    command += ["--server-pid", str(server.pid), "--model", gateway.model, "--sentences", "3"]
    command += ["--max-tokens", str(gateway.num_tokens), *options]
    command += ["--key", gateway.way.key] if gateway.way.key else []
    command += [] if bed.load_core is None else ["--core", str(bed.load_core)]
    with contextlib.ExitStack() as stack:
        for other in bed.gateways.values():
            if other.way.server is not server:
                stack.enter_context(other.way.server.paused())
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, check=False, timeout=_WINDOW_TIMEOUT_S
        )
    if done.returncode:
        raise SystemExit(f"the clients failed:\n{done.stderr.decode()[-2000:]}")
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def wholes(bed: Bed, gateway: Gateway, options: Sequence[str], *, reads_lag: bool) -> Window:
    """One window of whole answers."""
    server = gateway.way.server
    key = gateway.way.key
    before = loop_lag(server, key=key) if reads_lag else {}
    seen = _seen(bed, gateway, server, options)
    return Window(
        latencies_s=[us * _US for us in seen["latencies"] if us is not None],
        num_failed=seen["num_failed"],
        busy_s=seen["busy_s"],
        seconds=seen.get("seconds"),
        lag_p99_s=bucket_quantile(before, loop_lag(server, key=key), 0.99) if reads_lag else None,
    )


def figures(windows: Sequence[Window]) -> dict[str, Any]:
    """Figures of one gateway under one load."""
    latencies_s = [s for window in windows for s in window.latencies_s]
    lags_s = [window.lag_p99_s for window in windows if window.lag_p99_s is not None]
    found: dict[str, Any] = {
        "num_answers": len(latencies_s),
        "num_failed": sum(window.num_failed for window in windows),
        "latency_s": Summary.of(latencies_s),
        "busy_s": Summary.of([window.busy_s / len(window.latencies_s) for window in windows]),
    }
    if lags_s:
        found["lag_p99_s"] = Summary.of(lags_s)
    rates = [len(w.latencies_s) / w.seconds for w in windows if w.seconds is not None]
    if rates:
        found["answers_per_s"] = Summary.of(rates)
    return found


def measure(
    bed: Bed,
    arguments: argparse.Namespace,
    options: Mapping[tuple[str, str], Sequence[str]],
    title: str,
    *,
    reads_lag: bool = False,
) -> dict[tuple[str, str], dict[str, Any]]:
    """Ask all gateways in turn, with each one's options."""

    def window(name: tuple[str, str], seconds: float) -> Window:
        more = [*options[name], "--seconds", str(seconds)]
        return wholes(bed, bed.gateways[name], more, reads_lag=reads_lag)

    def titled(name: tuple[str, str]) -> str:
        return ", ".join(name)

    rounds = measure_in_turn(
        {titled(name): partial(window, name, arguments.seconds) for name in options},
        repeats=arguments.repeats,
        warm_up={titled(name): partial(window, name, 1.0) for name in options},
        description=title,
    )
    return {name: figures(rounds[titled(name)]) for name in options}


def measure_streams(bed: Bed, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return what the relay and each checkout add to streams that are passed on.

    Over asking the mock itself; the gateways' chunks over the relay's as well.
    """
    seeds = itertools.count(arguments.seed)
    names = [name for kind, name in bed.gateways if kind == PASSED]
    any_gateway = bed.gateways[PASSED, names[0]]
    ways = {DIRECT: bed.mock, RELAY: bed.relay}
    ways |= {name: bed.gateways[PASSED, name].way.server for name in names}
    first_s: dict[str, list[float]] = {way: [] for way in ways}
    back_s: dict[str, list[float]] = {way: [] for way in ways}
    busy_s = dict.fromkeys(ways, 0.0)
    for _ in range(arguments.repeats):
        more = ["--rate", str(arguments.streams), "--seconds", str(arguments.seconds)]
        more += ["--seed", str(next(seeds))]
        direct: list[float | None] = []
        for way, server in ways.items():
            seen = _seen(bed, any_gateway, server, more)
            streams = streams_of(seen["exchanges"], busy_s=seen["busy_s"])
            direct = streams.first_s if way == DIRECT else direct
            first_s[way] += added(direct, streams.first_s)
            back_s[way] += streams.back_s
            busy_s[way] += seen["busy_s"]
    chunk_s = {way: percentile(found, 50) for way, found in back_s.items()}
    return {
        way: {
            "added_first_token_s": Summary.of(first_s[way]),
            "added_chunk_median_s": chunk_s[way] - chunk_s[DIRECT],
            "over_relay_chunk_median_s": chunk_s[way] - chunk_s[RELAY],
            "busy_chunk_s": busy_s[way] / len(back_s[way]),
        }
        for way in ways
        if way != DIRECT
    }


# ---- the command ------------------------------------------------------------------------------


def goals(results: Mapping[str, Any]) -> list[tuple[str, float, float, bool]]:
    """Each goal: its words, the figure, the bound, and whether it is met."""
    full = results["16 clients"][LOCAL][NOW]
    half, single = results["half of the rate"][LOCAL][NOW], results["one client"]
    rate, streams = full["answers_per_s"].median, results["streams"][NOW]
    at_most = [
        ("busy, everything on, ms", full["busy_s"].median, 1.0),
        ("one client, everything on, p50 ms", single[LOCAL][NOW]["latency_s"].median, 1.2),
        ("half of the rate, p99 ms", half["latency_s"].p99, 6.0),
        ("lag there, p99 ms", half["lag_p99_s"].median, 2.0),
        ("a chunk passed on, p50 ms", streams["added_chunk_median_s"], 0.1),
        ("the same over a relay's, ms", streams["over_relay_chunk_median_s"], 0.1),
        ("busy, a chunk passed on, ms", streams["busy_chunk_s"], 0.1),
    ]
    rows = [(words, 1e3 * s, bound, 1e3 * s <= bound) for words, s, bound in at_most]
    return [("answers a second, everything on", rate, 800.0, rate >= 800.0), *rows]


def show(results: Mapping[str, Any]) -> None:
    """Tables for people."""
    for title in ("16 clients", "one client", "half of the rate"):
        rows = []
        for kind, of_kind in results[title].items():
            for name, entry in of_kind.items():
                before = of_kind.get(BASELINE, entry)["busy_s"].median
                rate, lag = entry.get("answers_per_s"), entry.get("lag_p99_s")
                rows.append(
                    [
                        f"{kind}, {name}",
                        milliseconds(entry["busy_s"].median),
                        f"{entry['busy_s'].median / before:.2f}",
                        "" if rate is None else f"{rate.median:.0f}",
                        milliseconds(entry["latency_s"].median),
                        milliseconds(entry["latency_s"].p99),
                        "" if lag is None else milliseconds(lag.median),
                    ]
                )
        columns = ("", "busy ms", "ratio", "answers/s", "p50 ms", "p99", "lag p99 ms")
        show_table(title, columns, rows)
    show_table(
        "goals",
        ["", "measured", "goal", "met"],
        [[words, f"{s:.2f}", f"{bound:g}", verdict(ok)] for words, s, bound, ok in goals(results)],
    )


def by_kind(found: Mapping[tuple[str, str], Any]) -> dict[str, dict[str, Any]]:
    """Return the figures by kind, then by checkout."""
    kinds = dict.fromkeys(kind for kind, _ in found)
    return {kind: {name: f for (k, name), f in found.items() if k == kind} for kind in kinds}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--baseline", type=Path, help="another checkout")
    parser.add_argument("--seconds", type=float, default=4.0, help="a window")
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds")
    parser.add_argument("--streams", type=float, default=10.0, help="streams a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", default="mock", help="second part of the results' name")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the file goes")
    arguments = parser.parse_args(argv)
    quiet_transformers()
    roots = {NOW: ROOT}
    if arguments.baseline is not None:
        roots = {BASELINE: arguments.baseline.resolve(), **roots}
    arguments.baseline = arguments.baseline and "a checkout of the commit before"
    with test_bed(roots) as bed:
        full = measure(bed, arguments, dict.fromkeys(bed.gateways, ("--clients", "16")), "full")
        one = measure(bed, arguments, dict.fromkeys(bed.gateways, ("--clients", "1")), "one")
        rates = {
            kind: min(f["answers_per_s"].median for f in of_kind.values()) / 2
            for kind, of_kind in by_kind(full).items()
        }
        options = {name: ("--whole", "--rate", f"{rates[name[0]]:.0f}") for name in bed.gateways}
        half = measure(bed, arguments, options, "half", reads_lag=True)
        results: dict[str, Any] = {
            "16 clients": by_kind(full),
            "one client": by_kind(one),
            "half of the rate": by_kind(half),
            "rates_per_s": rates,
            "streams": measure_streams(bed, arguments),
        }
    results["goals"] = [
        {"goal": words, "measured": figure, "bound": bound, "met": is_met}
        for words, figure, bound, is_met in goals(results)
    ]
    show(results)
    write_results("bench_gateway_time", arguments.variant, results, arguments)


if __name__ == "__main__":
    start(main)
