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

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

from benchmarks.shared.harness import (
    Summary,
    console,
    measure_in_turn,
    milliseconds,
    quiet_transformers,
    show_table,
    start,
    verdict,
    write_results,
)
from benchmarks.shared.record import RESULTS, ROOT, package_version
from benchmarks.shared.upstream_servers import Server, cores, tenant_server
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.storage.open import open_database
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.parts import key_store
from outrider.gateway.tenancy.keys.records import KeyOrder

EVERYTHING: Final = "everything"
NOTHING: Final = "nothing of it"
_US: Final = 1e-6
_MIB: Final = 2**20
_WINDOW_TIMEOUT_S: Final = 300.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Measurements of one process of clients."""

    latencies_s: list[float]
    num_failed: int
    busy_s: float
    seconds: float | None = None

    @property
    def rate(self) -> float:
        """Answers per second."""
        assert self.seconds is not None
        return len(self.latencies_s) / self.seconds


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
    server = way.server
    command = [sys.executable, "-m", "benchmarks.shared.upstream_load", "--port", str(server.port)]
    command += ["--server-pid", str(server.pid), "--model", "small", "--sentences", "3", *options]
    command += ["--key", way.key] if way.key else []
    command += [] if core is None else ["--core", str(core)]
    with contextlib.ExitStack() as stack:
        for other in ways.values():
            if other is not way:
                stack.enter_context(other.server.paused())
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, check=False, timeout=_WINDOW_TIMEOUT_S
        )
    if done.returncode:
        raise SystemExit(f"the clients failed:\n{done.stderr.decode()[-2000:]}")
    seen: dict[str, Any] = json.loads(done.stdout)
    return Window(
        latencies_s=[us * _US for us in seen["latencies"] if us is not None],
        num_failed=seen["num_failed"],
        busy_s=seen["busy_s"],
        seconds=seen.get("seconds"),
    )


def figures(windows: Sequence[Window], *, has_rate: bool) -> dict[str, Any]:
    """One case's figures."""
    latencies_s = [s for window in windows for s in window.latencies_s]
    found: dict[str, Any] = {
        "num_answers": len(latencies_s),
        "num_failed": sum(window.num_failed for window in windows),
        "latency_s": Summary.of(latencies_s),
        "busy_s": sum(window.busy_s for window in windows) / len(latencies_s),
    }
    if has_rate:
        found["answers_per_s"] = Summary.of([window.rate for window in windows])
    return found


def measure_throughput(
    ways: Mapping[str, Way], arguments: argparse.Namespace, core: int | None
) -> dict[str, Any]:
    """Whole answers one after the other."""
    options = ["--clients", str(arguments.clients), "--max-tokens", str(arguments.tokens)]

    def window(name: str, seconds: float) -> Window:
        return load(ways, name, [*options, "--seconds", str(seconds)], core)

    windows = measure_in_turn(
        {name: partial(window, name, arguments.seconds) for name in ways},
        repeats=arguments.repeats,
        warm_up={name: partial(window, name, 2.0) for name in ways},
        description="throughput",
    )
    return {name: figures(rounds, has_rate=True) for name, rounds in windows.items()}


def measure_latency(
    ways: Mapping[str, Way], arguments: argparse.Namespace, core: int | None
) -> dict[str, Any]:
    """Whole answers at a fixed rate, at the same moments in every case."""
    options = ["--whole", "--rate", str(arguments.rate), "--max-tokens", str(arguments.tokens)]
    seeds = {name: itertools.count(arguments.seed) for name in ways}

    def window(name: str, seconds: float) -> Window:
        more = ["--seconds", str(seconds), "--seed", str(next(seeds[name]))]
        return load(ways, name, [*options, *more], core)

    windows = measure_in_turn(
        {name: partial(window, name, arguments.seconds) for name in ways},
        repeats=arguments.repeats,
        warm_up={name: partial(window, name, 2.0) for name in ways},
        description=f"{arguments.rate:g} requests a second",
    )
    return {name: figures(rounds, has_rate=False) for name, rounds in windows.items()}


def measure_memory(way: Way, arguments: argparse.Namespace, core: int | None) -> dict[str, Any]:
    """The gateway's resident size after each part of so many requests."""
    process = psutil.Process(way.server.pid)
    ways = {EVERYTHING: way}
    options = ["--clients", str(arguments.clients), "--max-tokens", str(arguments.tokens)]
    points: list[tuple[int, float]] = []
    num_requests = 0
    with console.status("memory") as status:
        while num_requests < arguments.requests:
            window = load(ways, EVERYTHING, [*options, "--seconds", "20"], core)
            num_requests += len(window.latencies_s)
            points.append((num_requests, process.memory_info().rss / _MIB))
            status.update(f"memory: {num_requests:,} of {arguments.requests:,} requests")
    half = next(size for count, size in points if count >= arguments.requests / 2)
    return {
        "num_requests": num_requests,
        "resident_mib": points,
        "growth_of_second_half_mib": points[-1][1] - half,
    }


# ---- the command ------------------------------------------------------------------------------


def goals(results: Mapping[str, Any]) -> list[tuple[str, float, float, bool]]:
    """Each goal: its words, the figure, the bound, and whether it is met."""
    rate = results["throughput"][EVERYTHING]["answers_per_s"].median
    latency = results["latency"][EVERYTHING]["latency_s"]
    p50_ms, p99_ms = latency.median * 1e3, latency.p99 * 1e3
    rows = [
        ("requests per second, everything on", rate, 500.0, rate >= 500.0),
        ("added p50 at half of that, ms", p50_ms, 1.5, p50_ms <= 1.5),
        ("added p99 at half of that, ms", p99_ms, 5.0, p99_ms <= 5.0),
    ]
    if "memory" in results:
        grown = results["memory"]["growth_of_second_half_mib"]
        rows.append(("memory grown in the second half, MiB", grown, 5.0, grown <= 5.0))
    return rows


def show(results: Mapping[str, Any]) -> None:
    """Tables for people."""
    throughput, latency = results["throughput"], results["latency"]
    busy = throughput[EVERYTHING]["busy_s"]
    show_table(
        "keys, limits, ledger",
        ["", "answers/s", "added p50 ms", "p99", "busy us", "costs us", "failed"],
        [
            [
                name,
                f"{entry['answers_per_s'].median:.0f}",
                milliseconds(latency[name]["latency_s"].median),
                milliseconds(latency[name]["latency_s"].p99),
                f"{entry['busy_s'] * 1e6:.0f}",
                "" if name == EVERYTHING else f"{(busy - entry['busy_s']) * 1e6:.0f}",
                str(entry["num_failed"] + latency[name]["num_failed"]),
            ]
            for name, entry in throughput.items()
        ],
    )
    show_table(
        "goals",
        ["", "measured", "goal", "met"],
        [
            [words, f"{figure:.2f}", f"{bound:g}", verdict(is_met)]
            for words, figure, bound, is_met in goals(results)
        ],
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=250.0, help="requests a second, for latency")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--clients", type=int, default=16, help="for the throughput")
    parser.add_argument("--seconds", type=float, default=8.0, help="a window")
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds")
    parser.add_argument("--requests", type=int, default=200_000, help="for the memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", default="mock", help="second part of the results' name")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the file goes")
    arguments = parser.parse_args(argv)
    quiet_transformers()
    server_core, load_core = cores()
    with contextlib.ExitStack() as stack:
        with console.status("starting the gateways"):
            ways = {
                name: stack.enter_context(running(name, case, core=server_core))
                for name, case in CASES.items()
            }
        results: dict[str, Any] = {
            "throughput": measure_throughput(ways, arguments, load_core),
            "latency": measure_latency(ways, arguments, load_core),
        }
        if arguments.requests:
            for name, way in ways.items():
                if name != EVERYTHING:
                    stack.enter_context(way.server.paused())
            results["memory"] = measure_memory(ways[EVERYTHING], arguments, load_core)
    results["goals"] = [
        {"goal": words, "measured": figure, "bound": bound, "met": is_met}
        for words, figure, bound, is_met in goals(results)
    ]
    names = ("sqlalchemy", "uvloop", "uvicorn", "httptools")
    results["packages"] = {name: package_version(name) for name in names}
    show(results)
    write_results("bench_tenants", arguments.variant, results, arguments)


if __name__ == "__main__":
    start(main)
