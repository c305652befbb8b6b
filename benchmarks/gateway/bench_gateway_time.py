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

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.gateway.bench_tenants import CASES, EVERYTHING, Way, running
from benchmarks.gateway.bench_upstream import added, streams_of
from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import (
    Benchmark,
    Goal,
    Results,
    Table,
    count,
    figure,
    milliseconds,
    option,
)
from benchmarks.shared.record import ROOT, Summary, percentile
from benchmarks.shared.upstream_servers import (
    Server,
    bucket_quantile,
    cores,
    gateway_server,
    loop_lag,
    mock_server,
    relay_server,
)
from benchmarks.shared.windows import Window, seen_by_clients, whole_figures, windows_in_turn

LOCAL: Final = "local"
PASSED: Final = "passed on"
NOW: Final = "now"
BASELINE: Final = "baseline"
DIRECT: Final = "direct"
RELAY: Final = "relay"


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    baseline: Path | None = option(None, "another checkout")
    seconds: float = option(4.0, "a window")
    streams: float = option(10.0, "streams a second")
    seed: int = option(0)


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


@contextlib.contextmanager
def test_bed(baseline: Path | None) -> Iterator[Bed]:
    """Start the mock and the gateways of this checkout and, where there is one, of another."""
    roots = {NOW: ROOT}
    if baseline is not None:
        roots = {BASELINE: baseline.resolve(), **roots}
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
    words = ("--model", gateway.model, "--sentences", "3", "--max-tokens", str(gateway.num_tokens))
    servers = [other.way.server for other in bed.gateways.values()]
    others = [other for other in servers if other is not server]
    return seen_by_clients(
        server, (*words, *options), core=bed.load_core, key=gateway.way.key, paused=others
    )


def wholes(
    bed: Bed, gateway: Gateway, options: Sequence[str], *, reads_lag: bool
) -> tuple[Window, float | None]:
    """One window of whole answers; the bound of the loop's lag in it, where that is read."""
    server, key = gateway.way.server, gateway.way.key
    before = loop_lag(server, key=key) if reads_lag else {}
    window = Window.of(_seen(bed, gateway, server, options))
    if not reads_lag:
        return window, None
    return window, bucket_quantile(before, loop_lag(server, key=key), 0.99)


def measure_wholes(
    bed: Bed,
    options: Options,
    load_of: Callable[[str], Sequence[str]],
    title: str,
    *,
    reads_lag: bool = False,
) -> dict[str, dict[str, Any]]:
    """Ask all gateways in turn, with the load of their kind; figures by kind, then by checkout."""

    def window(name: tuple[str, str], seconds: float) -> tuple[Window, float | None]:
        words = (*load_of(name[0]), "--seconds", str(seconds))
        return wholes(bed, bed.gateways[name], words, reads_lag=reads_lag)

    rounds = windows_in_turn(
        bed.gateways,
        window,
        seconds=options.seconds,
        repeats=options.repeats,
        warm_up_s=1.0,
        description=title,
    )
    found: dict[str, dict[str, Any]] = {}
    for (kind, name), windows in rounds.items():
        found.setdefault(kind, {})[name] = _figures(windows)
    return found


def _figures(seen: Sequence[tuple[Window, float | None]]) -> dict[str, Any]:
    windows = [window for window, _ in seen]
    busy_s = [window.busy_s / len(window.latencies_s) for window in windows]
    found = whole_figures(windows) | {"busy_s": Summary.of(busy_s)}
    lags_s = [lag_s for _, lag_s in seen if lag_s is not None]
    return found | ({"lag_p99_s": Summary.of(lags_s)} if lags_s else {})


def measure_streams(bed: Bed, options: Options) -> dict[str, dict[str, Any]]:
    """Return what the relay and each checkout add to streams that are passed on.

    Over asking the mock itself; the gateways' chunks over the relay's as well.
    """
    seeds = itertools.count(options.seed)
    names = [name for kind, name in bed.gateways if kind == PASSED]
    any_gateway = bed.gateways[PASSED, names[0]]
    ways = {DIRECT: bed.mock, RELAY: bed.relay}
    ways |= {name: bed.gateways[PASSED, name].way.server for name in names}
    first_s: dict[str, list[float]] = {way: [] for way in ways}
    back_s: dict[str, list[float]] = {way: [] for way in ways}
    busy_s = dict.fromkeys(ways, 0.0)
    for _ in range(options.repeats):
        more = ["--rate", str(options.streams), "--seconds", str(options.seconds)]
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


def measure(options: Options) -> Results:
    """Whole answers under three loads, and streams."""
    with test_bed(options.baseline) as bed:
        full = measure_wholes(bed, options, lambda _: ("--clients", "16"), "full")
        one = measure_wholes(bed, options, lambda _: ("--clients", "1"), "one")
        rates = {
            kind: min(found["answers_per_s"].median for found in of_kind.values()) / 2
            for kind, of_kind in full.items()
        }

        def at_half(kind: str) -> Sequence[str]:
            return ("--whole", "--rate", f"{rates[kind]:.0f}")

        half = measure_wholes(bed, options, at_half, "half", reads_lag=True)
        return {
            "16 clients": full,
            "one client": one,
            "half of the rate": half,
            "rates_per_s": rates,
            "streams": measure_streams(bed, options),
        }


def goals(results: Results) -> list[Goal]:
    """Bound the time of the gateway's own work."""
    full, one = results["16 clients"][LOCAL][NOW], results["one client"][LOCAL][NOW]
    half, streams = results["half of the rate"][LOCAL][NOW], results["streams"][NOW]
    rate = full["answers_per_s"].median
    at_most = (
        ("busy, everything on, ms", full["busy_s"].median, 1.0),
        ("one client, everything on, p50 ms", one["latency_s"].median, 1.2),
        ("half of the rate, p99 ms", half["latency_s"].p99, 6.0),
        ("lag there, p99 ms", half["lag_p99_s"].median, 2.0),
        ("a chunk passed on, p50 ms", streams["added_chunk_median_s"], 0.1),
        ("the same over a relay's, ms", streams["over_relay_chunk_median_s"], 0.1),
        ("busy, a chunk passed on, ms", streams["busy_chunk_s"], 0.1),
    )
    return [
        Goal(words="answers a second, everything on", measured=rate, bound=800, at_least=True),
        *(Goal(words=words, measured=1e3 * s, bound=bound) for words, s, bound in at_most),
    ]


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A table a load; a row a gateway."""
    columns = (
        ("busy ms", milliseconds("busy_s")),
        ("ratio", figure("ratio")),
        ("answers/s", count("answers_per_s")),
        ("p50 ms", milliseconds("latency_s")),
        ("p99", milliseconds("latency_s", part="p99")),
        ("lag p99 ms", milliseconds("lag_p99_s")),
    )
    for title in ("16 clients", "one client", "half of the rate"):
        entries = {}
        for kind, of_kind in results[title].items():
            for name, entry in of_kind.items():
                before = of_kind.get(BASELINE, entry)["busy_s"].median
                entries[f"{kind}, {name}"] = entry | {"ratio": entry["busy_s"].median / before}
        yield Table(title=title, columns=columns, entries=entries)


BENCHMARK: Final = Benchmark(
    options=Options, measure=measure, tables=tables, goals=goals, variant="mock"
)

if __name__ == "__main__":
    BENCHMARK.start()
