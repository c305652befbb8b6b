"""What do keys, limits and the ledger cost a request, and does the gateway stay as large as it is?

Method: the gateway serves a mock engine whose answers are there at once, so all time is the
gateway's own: HTTP, key, template and tokenising, limits, writing the answer, ledger, metrics. A
second process asks. Each case is a gateway of its own with one thing switched off, asked in turn
(A B A B), stopped while others have their turn; gateway and clients have a core each. Throughput:
clients that ask for one whole answer after the other. Latency: whole answers at a fixed rate, a
Poisson process, the same moments for every case. Memory: the resident size of the gateway with
everything on, each so many requests.

Reading it: `added` is the time from the request's last byte to the answer's, and there is no
engine's time in it. What a thing costs is the processor time of `everything` minus that of the case
without it.

    python -m benchmarks.gateway.bench_tenants
    python -m benchmarks.gateway.bench_tenants --requests 0  # not the memory, which takes minutes
"""

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import (
    Benchmark,
    Goal,
    Results,
    Table,
    count,
    figure,
    microseconds,
    milliseconds,
    option,
)
from benchmarks.shared.harness import console
from benchmarks.shared.record import ROOT, package_version
from benchmarks.shared.upstream_servers import Server, cores, tenant_server
from benchmarks.shared.windows import Window, seen_by_clients, whole_figures, windows_in_turn
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.storage.open import open_database
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.key_parts import key_store
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder

EVERYTHING: Final = "everything"
NOTHING: Final = "nothing of it"
_MIB: Final = 2**20
_ALL_LIMITS: Final = LimitSpec(
    requests_per_minute=10**9,
    tokens_per_minute=10**12,
    requests_per_day=10**9,
    tokens_per_day=10**12,
    concurrent_requests=10**6,
    usd_per_day=10**6,
    usd_per_month=10**6,
)
_PRICES: Final = ("routing.prices.small.prompt=0.1", "routing.prices.small.completion=0.4")


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    rate: float = option(250.0, "requests a second, for latency")
    tokens: int = option(16, "of an answer")
    clients: int = option(16, "for the throughput")
    seconds: float = option(8.0, "a window")
    requests: int = option(200_000, "for the memory")
    seed: int = option(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A gateway's settings, and whether its key is limited; without one no request needs a key."""

    settings: tuple[str, ...] = ()
    has_database: bool = True
    has_key: bool = True
    is_limited: bool = True


CASES: Final[Mapping[str, Case]] = {
    EVERYTHING: Case(),
    "without limits": Case(is_limited=False),
    "without ledger": Case(settings=("ledger.enabled=false",)),
    "without keys": Case(has_key=False),
    NOTHING: Case(has_database=False, has_key=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A running case. `key` is what its clients send."""

    server: Server
    key: str | None


# ---- servers ----------------------------------------------------------------------------------


@contextlib.contextmanager
def running(name: str, case: Case, *, core: int | None, root: Path = ROOT) -> Iterator[Way]:
    """The case's gateway, of the checkout in `root`, with a database of its own."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'bench.db'}" if case.has_database else "none"
        options = (f"database_url={url}", *_PRICES, *case.settings)
        key = _new_key(options, case) if case.has_key else None
        flags = [word for option in options for word in ("--set", option)]
        with tenant_server(name, flags, core=core, root=root) as server:
            yield Way(server=server, key=key)


def _new_key(options: Sequence[str], case: Case) -> str:
    settings = load_settings(flags=dict(o.split("=", 1) for o in options), environ={})
    database = open_database(settings)
    assert database is not None
    with contextlib.closing(database):
        order = KeyOrder(
            name="bench",
            scopes=Scopes(reads_metrics=True),
            limits=_ALL_LIMITS if case.is_limited else LimitSpec(),
        )
        return key_store(settings, database).create(order).text


# ---- measuring --------------------------------------------------------------------------------


def load(ways: Mapping[str, Way], name: str, options: Sequence[str], core: int | None) -> Window:
    """One window of clients; the other gateways get no processor time meanwhile."""
    way = ways[name]
    others = [other.server for other in ways.values() if other is not way]
    words = ("--model", "small", "--sentences", "3", *options)
    seen = seen_by_clients(way.server, words, core=core, key=way.key, paused=others)
    return Window.of(seen)


def measure_throughput(ways: Mapping[str, Way], options: Options, core: int | None) -> Results:
    """Whole answers one after the other."""
    words = ("--clients", str(options.clients), "--max-tokens", str(options.tokens))

    def window(name: str, seconds: float) -> Window:
        return load(ways, name, [*words, "--seconds", str(seconds)], core)

    return _in_turn(ways, window, options, "throughput")


def measure_latency(ways: Mapping[str, Way], options: Options, core: int | None) -> Results:
    """Whole answers at a fixed rate, at the same moments in every case."""
    words = ("--whole", "--rate", str(options.rate), "--max-tokens", str(options.tokens))
    seeds = {name: itertools.count(options.seed) for name in ways}

    def window(name: str, seconds: float) -> Window:
        more = ("--seconds", str(seconds), "--seed", str(next(seeds[name])))
        return load(ways, name, [*words, *more], core)

    return _in_turn(ways, window, options, f"{options.rate:g} requests a second")


def _in_turn(
    ways: Mapping[str, Way], window: Callable[[str, float], Window], options: Options, title: str
) -> Results:
    windows = windows_in_turn(
        ways,
        window,
        seconds=options.seconds,
        repeats=options.repeats,
        warm_up_s=2.0,
        description=title,
    )
    return {name: whole_figures(rounds) for name, rounds in windows.items()}


def measure_memory(way: Way, options: Options, core: int | None) -> Results:
    """The gateway's resident size after each part of so many requests."""
    process = psutil.Process(way.server.pid)
    ways = {EVERYTHING: way}
    words = ("--clients", str(options.clients), "--max-tokens", str(options.tokens))
    points: list[tuple[int, float]] = []
    num_requests = 0
    with console.status("memory") as status:
        while num_requests < options.requests:
            window = load(ways, EVERYTHING, [*words, "--seconds", "20"], core)
            num_requests += len(window.latencies_s)
            points.append((num_requests, process.memory_info().rss / _MIB))
            status.update(f"memory: {num_requests:,} of {options.requests:,} requests")
    half = next(size for count, size in points if count >= options.requests / 2)
    return {
        "num_requests": num_requests,
        "resident_mib": points,
        "growth_of_second_half_mib": points[-1][1] - half,
    }


# ---- the command ------------------------------------------------------------------------------


def measure(options: Options) -> Results:
    """Throughput and latency of every case, and the memory of the whole."""
    server_core, load_core = cores()
    with contextlib.ExitStack() as stack:
        with console.status("starting the gateways"):
            ways = {
                name: stack.enter_context(running(name, case, core=server_core))
                for name, case in CASES.items()
            }
        results: dict[str, Any] = {
            "throughput": measure_throughput(ways, options, load_core),
            "latency": measure_latency(ways, options, load_core),
        }
        if options.requests:
            for name, way in ways.items():
                if name != EVERYTHING:
                    stack.enter_context(way.server.paused())
            results["memory"] = measure_memory(ways[EVERYTHING], options, load_core)
    names = ("sqlalchemy", "uvloop", "uvicorn", "httptools")
    results["packages"] = {name: package_version(name) for name in names}
    return results


def goals(results: Results) -> list[Goal]:
    """Bound the cost with everything switched on."""
    rate = results["throughput"][EVERYTHING]["answers_per_s"].median
    latency = results["latency"][EVERYTHING]["latency_s"]
    found = [
        Goal(words="requests per second, everything on", measured=rate, bound=500, at_least=True),
        Goal(words="added p50 at half of that, ms", measured=latency.median * 1e3, bound=1.5),
        Goal(words="added p99 at half of that, ms", measured=latency.p99 * 1e3, bound=5.0),
    ]
    if "memory" in results:
        grown = results["memory"]["growth_of_second_half_mib"]
        found.append(Goal(words="memory grown in the second half, MiB", measured=grown, bound=5.0))
    return found


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A row a case."""
    throughput, latency = results["throughput"], results["latency"]
    busy_s = throughput[EVERYTHING]["busy_s"]
    entries = {
        name: {
            **entry,
            "added_s": latency[name]["latency_s"],
            "costs_s": None if name == EVERYTHING else busy_s - entry["busy_s"],
            "num_failed": entry["num_failed"] + latency[name]["num_failed"],
        }
        for name, entry in throughput.items()
    }
    columns = (
        ("answers/s", figure("answers_per_s", ".0f")),
        ("added p50 ms", milliseconds("added_s")),
        ("p99", milliseconds("added_s", part="p99")),
        ("busy us", microseconds("busy_s", ".0f")),
        ("costs us", microseconds("costs_s", ".0f")),
        ("failed", count("num_failed")),
    )
    yield Table(title="keys, limits, ledger", columns=columns, entries=entries)


BENCHMARK: Final = Benchmark(
    options=Options, measure=measure, tables=tables, goals=goals, variant="mock"
)

if __name__ == "__main__":
    BENCHMARK.start()
