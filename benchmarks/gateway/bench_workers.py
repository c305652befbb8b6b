"""How much more processor time does a request take where a gateway has several processes?

Method: gateways with one process and with `--workers` beside each other, all on one core, with the
clients and the mock server on another; they are asked in turn (A B A B). 16 clients ask for whole
answers one after the other, each over a connection of its own: `passed on` are answers of the mock
server, `local` answers of 8 tokens by the bundled small model. Keys are off; the ledger is on, in
an SQLite file of each gateway.

Reading it: `busy` is the processor time of all processes of a gateway but its engine's, for each
row in its ledger, parent process included. `share`: the busiest worker's part of it, 1 divided by
the workers where they are balanced. `answers/s` on one core shows only that nothing is lost: more
workers are for more cores. `idle` is what a gateway takes in a second without requests, which each
process does for itself (timers, keys that are read again): at a low rate it is a larger part of
`busy`. The ratio counts it; `above idle` does not.

    python -m benchmarks.gateway.bench_workers
"""

import contextlib
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]

from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import (
    Benchmark,
    Results,
    Table,
    count,
    figure,
    milliseconds,
    option,
)
from benchmarks.shared.harness import measure_in_turn
from benchmarks.shared.record import Summary
from benchmarks.shared.upstream_servers import Server, cores, gateway_server, mock_server
from benchmarks.shared.windows import Window, seen_by_clients, whole_figures, windows_in_turn

GOAL: Final = 1.1
KINDS: Final = {"passed on": ("fast", 16), "local": ("small", 8)}
"""The model that is asked for, and the tokens of its answers."""
_ROWS: Final = re.compile(r"^outrider_ledger_rows_total\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    workers: int = option(2, "processes of the second gateway")
    clients: int = option(16)
    seconds: float = option(4.0, "a window")
    repeats: int = option(5, "measured rounds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One window of requests, and what the gateway's processes did for it."""

    window: Window
    busy_s: float
    """Processor time, the clients' start and warm-up included, as in the next two."""
    num_rows: int
    whole_s: float
    shares: list[float]
    """Each worker's part of the processor time."""


@contextlib.contextmanager
def gateways(counts: Sequence[int], mock: Server, core: int | None) -> Iterator[dict[int, Server]]:
    """Run a gateway with each number of workers."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = {}
        for count in counts:
            options = ["--large", "none", "--small", "demo", "--workers", str(count)]
            options += ["--num-threads", "1"]
            options += ["--set", f"database_url=sqlite:///{folder}/{count}.db"]
            found[count] = stack.enter_context(
                gateway_server([("fast", mock.url)], options=options, core=core)
            )
        yield found


def busy_s(server: Server) -> dict[int, float]:
    """Return the processor time of a gateway's processes so far, its engine's apart, by id."""
    parent = psutil.Process(server.pid)
    times = {}
    for process in (parent, *parent.children()):
        if "outrider.gateway.engines.backends.engine_process" not in process.cmdline():
            cpu = process.cpu_times()
            times[process.pid] = cpu.user + cpu.system
    return times


def num_rows(server: Server) -> int:
    """Return the rows that a gateway has written to its ledger."""
    return round(sum(float(found) for found in _ROWS.findall(server.get("/metrics"))))


def ask(server: Server, kind: str, load_core: int | None, clients: int, seconds: float) -> Asked:
    """Ask for answers for so long."""
    model, max_tokens = KINDS[kind]
    words = ["--model", model, "--sentences", "3", "--max-tokens", str(max_tokens)]
    words += ["--clients", str(clients), "--seconds", str(seconds)]
    rows, before, began_s = num_rows(server), busy_s(server), time.monotonic()
    seen = seen_by_clients(server, words, core=load_core)
    after, whole_s = busy_s(server), time.monotonic() - began_s
    spent = {pid: after[pid] - before[pid] for pid in after}
    total = sum(spent.values())
    return Asked(
        window=Window.of(seen),
        busy_s=total,
        num_rows=num_rows(server) - rows,
        whole_s=whole_s,
        shares=[each / total for pid, each in spent.items() if pid != server.pid],
    )


def idle_s_per_s(server: Server, seconds: float) -> float:
    """Return the processor time that a gateway takes in a second without requests."""
    before = sum(busy_s(server).values())
    time.sleep(seconds)
    return (sum(busy_s(server).values()) - before) / seconds


def figures(asked: Sequence[Asked], idle: Summary) -> Results:
    """Figures of one gateway under one load."""
    found = whole_figures([each.window for each in asked]) | {
        "num_answers": sum(each.num_rows for each in asked),
        "busy_s": Summary.of([each.busy_s / each.num_rows for each in asked]),
        "above_idle_s": Summary.of(
            [(each.busy_s - idle.median * each.whole_s) / each.num_rows for each in asked]
        ),
    }
    if asked[0].shares:
        found["largest_share"] = Summary.of([max(each.shares) for each in asked])
    return found


def measure(options: Options) -> Results:
    """Ask both gateways for each kind of answers, then for nothing."""
    core, load_core = cores()
    counts = (1, options.workers)
    mocks = mock_server(["--tokens", "16"], core=load_core)
    with mocks as mock, gateways(counts, mock, core) as servers:

        def asked_for(kind: str, workers: int, seconds: float) -> Asked:
            return ask(servers[workers], kind, load_core, options.clients, seconds)

        asked = {
            kind: windows_in_turn(
                counts,
                partial(asked_for, kind),
                seconds=options.seconds,
                repeats=options.repeats,
                warm_up_s=1.0,
                description=kind,
            )
            for kind in KINDS
        }
        idle = measure_in_turn(
            {
                str(count): partial(idle_s_per_s, servers[count], options.seconds)
                for count in counts
            },
            repeats=options.repeats,
            description="idle",
        )
    idle_of = {name: Summary.of(found) for name, found in idle.items()}
    kinds = {
        kind: _of_kind({str(n): figures(each, idle_of[str(n)]) for n, each in rounds.items()})
        for kind, rounds in asked.items()
    }
    return {**kinds, "idle_s_per_s": idle_of}


def _of_kind(found: dict[str, Results]) -> Results:
    one, several = found.values()
    ratios = {
        key: several[f"{key}_s"].median / one[f"{key}_s"].median for key in ("busy", "above_idle")
    }
    return {**found, "ratio": ratios, "met": ratios["busy"] <= GOAL}


_COLUMNS: Final = (
    ("busy ms", milliseconds("busy_s")),
    ("answers/s", count("answers_per_s")),
    ("p50 ms", milliseconds("latency_s")),
    ("p99 ms", milliseconds("latency_s", part="p99")),
    ("share", figure("largest_share")),
    ("failed", count("num_failed")),
)
_RATIOS: Final = (
    ("ratio", figure("busy", ".3f")),
    ("met", figure("met")),
    ("above idle", figure("above_idle", ".3f")),
)


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A request by kind and gateway, the ratios, and the time without requests."""
    idle: dict[str, Summary] = results["idle_s_per_s"]
    requests = {f"{kind}, workers {n}": results[kind][n] for kind in KINDS for n in idle}
    yield Table(title="a request", columns=_COLUMNS, entries=requests)
    ratios = {kind: results[kind]["ratio"] | {"met": results[kind]["met"]} for kind in KINDS}
    title = f"goal: at most {GOAL} times one process's"
    yield Table(title=title, columns=_RATIOS, entries=ratios)
    entries = {f"workers {name}": {"idle_s": found} for name, found in idle.items()}
    columns = (("ms a second", milliseconds("idle_s")),)
    yield Table(title="without requests", columns=columns, entries=entries)


def _variant(options: Options) -> str:
    return f"{options.workers}-workers"


BENCHMARK: Final = Benchmark(options=Options, measure=measure, tables=tables, variant=_variant)

if __name__ == "__main__":
    BENCHMARK.start()
