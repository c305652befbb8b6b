"""How much later do whole answers come through the gateway, by the number of clients at a time?

Method: that of neutral harnesses of gateways. A mock server answers 20 ms after each request; 1, 4,
16 and 64 clients ask one whole answer after the other, of the mock itself and through `outrider
serve`, in turn (A B A B). The gateway has one core, mock and clients share another. A relay that
only copies bytes has its turns on the gateway's core: no gateway can add less on this machine.

Reading it: `added` is a percentile of the answers through a way minus the same percentile of the
mock's own, for in a closed loop no requests are pairs. So many clients as fill the core wait for
each other: at 64 the answers a second are what is measured. Of other gateways stands what others
have published, of other machines with more cores; only its order of magnitude can be compared.

    python -m benchmarks.gateway.bench_concurrency
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.gateway.bench_upstream import DIRECT, FAST, OUTRIDER, RELAY
from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import (
    Benchmark,
    Goal,
    Results,
    Table,
    count,
    milliseconds,
    option,
)
from benchmarks.shared.record import Summary
from benchmarks.shared.upstream_servers import (
    Server,
    cores,
    gateway_server,
    mock_server,
    relay_server,
)
from benchmarks.shared.windows import Window, seen_by_clients, whole_figures, windows_in_turn

CLIENTS: Final = (1, 4, 16, 64)
PUBLISHED: Final[Mapping[str, tuple[float, ...]]] = {
    "LiteLLM-Rust (published)": (0.89e-3, 0.61e-3, 0.33e-3, 40e-3),
    "Bifrost (published)": (0.75e-3, 0.63e-3, 0.89e-3, 29e-3),
}
"""Seconds added at p99 by the numbers of clients, over a mock of 20 ms."""


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    answer_ms: float = option(20.0, "until the mock answers")
    tokens: int = option(16, "of an answer")
    seconds: float = option(8.0, "a window")
    repeats: int = option(3, "measured rounds")


@contextlib.contextmanager
def running(options: Options) -> Iterator[tuple[dict[str, Server], int | None]]:
    """Start the servers; yield them by way, and the clients' core."""
    core, load_core = cores()
    words = ["--tokens", str(options.tokens), "--first-token-ms", str(options.answer_ms)]
    with contextlib.ExitStack() as stack:
        mock = stack.enter_context(mock_server(words, core=load_core))
        relay = stack.enter_context(relay_server(mock, core=core))
        gateway = stack.enter_context(gateway_server([(FAST, mock.url)], core=core))
        yield {DIRECT: mock, RELAY: relay, OUTRIDER: gateway}, load_core


def measure(options: Options) -> Results:
    """Return each way's figures by the number of clients."""
    with running(options) as (ways, load_core):
        return {str(num): _measure(ways, load_core, num, options) for num in CLIENTS}


def _measure(
    ways: Mapping[str, Server], load_core: int | None, num_clients: int, options: Options
) -> dict[str, dict[str, Any]]:
    words = ("--model", FAST, "--clients", str(num_clients), "--max-tokens", str(options.tokens))

    def window(way: str, seconds: float) -> Window:
        more = ("--seconds", str(seconds))
        return Window.of(seen_by_clients(ways[way], (*words, *more), core=load_core))

    rounds = windows_in_turn(
        ways,
        window,
        seconds=options.seconds,
        repeats=options.repeats,
        warm_up_s=1.0,
        description=f"{num_clients} at a time",
    )
    found = {way: whole_figures(windows) for way, windows in rounds.items()}
    direct = found[DIRECT]["latency_s"]
    for way, figures in found.items():
        if way != DIRECT:
            figures |= _added(direct, figures["latency_s"])
    return found


def _added(direct: Summary, through: Summary) -> dict[str, float]:
    return {
        "added_median_s": through.median - direct.median,
        "added_p99_s": through.p99 - direct.p99,
    }


def goals(results: Results) -> list[Goal]:
    """Bound what is added at p99 by the least that is published."""
    return [
        Goal(
            words=f"added at p99, {num} at a time, ms",
            measured=1e3 * results[str(num)][OUTRIDER]["added_p99_s"],
            bound=1e3 * min(times_s[place] for times_s in PUBLISHED.values()),
        )
        for place, num in enumerate(CLIENTS)
    ]


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A table a number of clients; a row a way."""
    columns = (
        ("added p50 ms", milliseconds("added_median_s")),
        ("p99", milliseconds("added_p99_s")),
        ("answers/s", count("answers_per_s")),
        ("busy ms", milliseconds("busy_s")),
        ("failed", count("num_failed")),
    )
    for place, num in enumerate(CLIENTS):
        published = {name: {"added_p99_s": s[place]} for name, s in PUBLISHED.items()}
        entries = {**results[str(num)], **published}
        yield Table(title=f"{num} at a time", columns=columns, entries=entries)


BENCHMARK: Final = Benchmark(
    options=Options, measure=measure, tables=tables, goals=goals, variant="mock-20-ms"
)

if __name__ == "__main__":
    BENCHMARK.start()
