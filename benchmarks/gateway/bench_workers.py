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

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

from benchmarks.shared.harness import (
    Summary,
    measure_in_turn,
    milliseconds,
    quiet_transformers,
    show_table,
    start,
    verdict,
    write_results,
)
from benchmarks.shared.record import RESULTS, ROOT
from benchmarks.shared.upstream_servers import Server, cores, gateway_server, mock_server

GOAL: Final = 1.1
KINDS: Final = {"passed on": ("fast", 16), "local": ("small", 8)}
"""The model that is asked for, and the tokens of its answers."""
_ROWS: Final = re.compile(r"^outrider_ledger_rows_total\{[^}]*\} (\S+)$", re.MULTILINE)
_WINDOW_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Figures of one window of requests; `shares`: each worker's part of the processor time.

    whole_s: also with the clients' start and warm-up, as `busy_s` and `num_rows`.
    """

    busy_s: float
    num_rows: int
    num_failed: int
    latencies_s: list[float]
    seconds: float
    whole_s: float
    shares: list[float]


@contextlib.contextmanager
def gateways(counts: Sequence[int], mock: Server, core: int | None) -> Iterator[dict[int, Server]]:
    """Run a gateway with each number of workers."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = {}
        for count in counts:
            options = ["--large", "none", "--small", "demo", "--workers", str(count)]
            options += [
                "--num-threads",
                "1",
                "--set",
                f"database_url=sqlite:///{folder}/{count}.db",
            ]
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


def window(
    server: Server, kind: str, load_core: int | None, clients: int, seconds: float
) -> Window:
    """Ask for answers for so long."""
    model, max_tokens = KINDS[kind]
    command = [sys.executable, "-m", "benchmarks.shared.upstream_load", "--port", str(server.port)]
    command += ["--server-pid", str(server.pid), "--model", model, "--sentences", "3"]
    command += ["--max-tokens", str(max_tokens), "--clients", str(clients)]
    command += ["--seconds", str(seconds)]
    command += [] if load_core is None else ["--core", str(load_core)]
    rows, before, began_s = num_rows(server), busy_s(server), time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, check=False, timeout=_WINDOW_TIMEOUT_S
    )
    after, whole_s = busy_s(server), time.monotonic() - began_s
    if done.returncode:
        raise SystemExit(f"the clients failed:\n{done.stderr.decode()[-2000:]}")
    seen: dict[str, Any] = json.loads(done.stdout)
    spent = {pid: after[pid] - before[pid] for pid in after}
    total = sum(spent.values())
    return Window(
        busy_s=total,
        num_rows=num_rows(server) - rows,
        num_failed=seen["num_failed"],
        latencies_s=[us * 1e-6 for us in seen["latencies"]],
        seconds=seen["seconds"],
        whole_s=whole_s,
        shares=[each / total for pid, each in spent.items() if pid != server.pid],
    )


def idle_s_per_s(server: Server, seconds: float) -> float:
    """Return the processor time that a gateway takes in a second without requests."""
    before = sum(busy_s(server).values())
    time.sleep(seconds)
    return (sum(busy_s(server).values()) - before) / seconds


def figures(windows: Sequence[Window], idle: Summary) -> dict[str, Any]:
    """Figures of one gateway under one load."""
    latencies_s = [s for each in windows for s in each.latencies_s]
    found: dict[str, Any] = {
        "num_answers": sum(each.num_rows for each in windows),
        "num_failed": sum(each.num_failed for each in windows),
        "busy_s": Summary.of([each.busy_s / each.num_rows for each in windows]),
        "answers_per_s": Summary.of([len(w.latencies_s) / w.seconds for w in windows]),
        "latency_s": Summary.of(latencies_s),
        "above_idle_s": Summary.of(
            [(each.busy_s - idle.median * each.whole_s) / each.num_rows for each in windows]
        ),
    }
    if windows[0].shares:
        found["largest_share"] = Summary.of([max(each.shares) for each in windows])
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2, help="processes of the second gateway")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=4.0, help="a window")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the file goes")
    arguments = parser.parse_args(argv)
    quiet_transformers()
    core, load_core = cores()
    counts = (1, arguments.workers)
    results: dict[str, Any] = {}
    windows_of: dict[str, dict[str, list[Window]]] = {}
    mocks = mock_server(["--tokens", "16"], core=load_core)
    with mocks as mock, gateways(counts, mock, core) as servers:
        for kind in KINDS:

            def ask(count: int, seconds: float, kind: str = kind) -> Window:
                return window(servers[count], kind, load_core, arguments.clients, seconds)

            rounds = measure_in_turn(
                {str(count): partial(ask, count, arguments.seconds) for count in counts},
                repeats=arguments.repeats,
                warm_up={str(count): partial(ask, count, 1.0) for count in counts},
                description=kind,
            )
            windows_of[kind] = rounds
        idle = measure_in_turn(
            {
                str(count): partial(idle_s_per_s, servers[count], arguments.seconds)
                for count in counts
            },
            repeats=arguments.repeats,
            description="idle",
        )
    idle_of = {name: Summary.of(found) for name, found in idle.items()}
    for kind, rounds in windows_of.items():
        of_kind = {name: figures(windows, idle_of[name]) for name, windows in rounds.items()}
        ratios = {
            key: of_kind[str(counts[1])][f"{key}_s"].median / of_kind["1"][f"{key}_s"].median
            for key in ("busy", "above_idle")
        }
        results[kind] = of_kind | {"ratio": ratios, "met": ratios["busy"] <= GOAL}
    results["idle_s_per_s"] = idle_of
    show(results)
    write_results("bench_workers", f"{arguments.workers}-workers", results, arguments)


def show(results: dict[str, Any]) -> None:
    """Tables for people."""
    rows, ratios = [], []
    for kind in KINDS:
        of_kind = results[kind]
        for name in results["idle_s_per_s"]:
            found = of_kind[name]
            share = found.get("largest_share")
            rows.append(
                [
                    f"{kind}, workers {name}",
                    milliseconds(found["busy_s"].median),
                    f"{found['answers_per_s'].median:.0f}",
                    milliseconds(found["latency_s"].median),
                    milliseconds(found["latency_s"].p99),
                    "" if share is None else f"{share.median:.2f}",
                    str(found["num_failed"]),
                ]
            )
        ratio = of_kind["ratio"]
        ratios.append(
            [kind, f"{ratio['busy']:.3f}", verdict(of_kind["met"]), f"{ratio['above_idle']:.3f}"]
        )
    show_table(
        "a request", ["", "busy ms", "answers/s", "p50 ms", "p99 ms", "share", "failed"], rows
    )
    show_table(
        f"goal: at most {GOAL} times one process's", ["", "ratio", "met", "above idle"], ratios
    )
    show_table(
        "without requests",
        ["", "ms a second"],
        [
            [f"workers {name}", milliseconds(each.median)]
            for name, each in results["idle_s_per_s"].items()
        ],
    )


if __name__ == "__main__":
    start(main)
