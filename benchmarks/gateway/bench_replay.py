"""Does `outrider bench` send when it should, and does it see what the server did?

Method: an open loop replays a trace at a rate against the mock upstream, which has a core of its
own and stamps the moment when it has got a request and those when it sent a piece; both processes
read the same clock. Event loops are compared in turn (A B A B). Without a trace the requests come
as a Poisson process.

Reading it: `sent` is how late after its time a request left the client, as the client says;
`received` how late after it the mock had all of it, which is what the target sees. `seen` is how
long after the mock had sent a piece the client's clock says that it was there: no latency that is
reported can be more exact than that. `processor` is the client's own time for a request, of a
whole core.

    python -m benchmarks.gateway.bench_replay --trace azure_2023_conv_first_half.csv
    OUTRIDER_DATA=... python -m benchmarks.gateway.bench_replay --rate 400
"""

import asyncio
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import uvloop

from benchmarks.shared.harness import (
    Summary,
    argument_parser,
    console,
    milliseconds,
    percentile,
    show_table,
    start,
    verdict,
    write_results,
)
from benchmarks.shared.upstream_servers import cores, mock_server
from outrider.gateway.tools.measuring.bench.answer import RawAnswer
from outrider.gateway.tools.measuring.bench.client import BenchClient, TargetSettings
from outrider.gateway.tools.measuring.bench.plan import BenchPlan, LoadSettings
from outrider.gateway.tools.measuring.bench.runner import Session
from outrider.gateway.tools.measuring.bench.workloads import WorkloadSettings

GOAL_P99_MS: Final = 2.0
_TRACE: Final = "traces/azure_2023_conv_first_half.csv"
_STAMPS: Final = re.compile(rb'"content":"(\d{20})(\d{20})"')
_LOOPS: Final[Mapping[str, Callable[[], asyncio.AbstractEventLoop]]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


class StampReader(BenchClient):
    """The client, which keeps what the mock's stamps tell; `received_s` by the moment of sending.

    `seen_ms`: from a piece's sending to its arrival, the first of each answer.
    """

    def __init__(self, target: TargetSettings) -> None:
        super().__init__(target, clock=time.perf_counter)
        self.received_s: dict[float, float] = {}
        self.seen_ms: list[float] = []

    async def ask(self, body: bytes) -> RawAnswer:
        """As the parent."""
        raw = await super().ask(body)
        for arrived_s, piece in raw.pieces:
            if stamps := _STAMPS.search(piece):
                assert raw.sent_s is not None
                self.received_s[round(raw.sent_s, 6)] = int(stamps[1]) / 1e9
                self.seen_ms.append(1e3 * (arrived_s - int(stamps[2]) / 1e9))
                break
        return raw


async def _replay(plan: BenchPlan) -> dict[str, Any]:
    """One run's figures."""
    session = Session(plan, clock=time.perf_counter)
    client = session.client = StampReader(plan.target)
    async with session:
        client.seen_ms.clear()  # of the look at the target
        requests = session.requests(plan.load)
        began_s = time.process_time()
        done = await session.run(requests, plan.load)
        cpu_s = time.process_time() - began_s
        rows = [row for row in done.rows if not row.is_warm_up]
        failed = [row for row in rows if not row.is_success]
        if failed:
            raise SystemExit(f"{len(failed)} requests failed: {failed[0].message}")
        received = [
            1e3 * (client.received_s[row.sent_s] - row.scheduled_s)
            for row in rows
            if row.sent_s is not None and row.sent_s in client.received_s
        ]
        summary = session.summarize(done.rows, done.tally)
        return {
            "sent_ms": [row.lateness_ms for row in rows if row.lateness_ms is not None],
            "received_ms": received,
            "seen_ms": client.seen_ms,
            "offered_per_s": summary.offered_per_s,
            "cpu_us": 1e6 * cpu_s / len(done.rows),
            "num_requests": len(rows),
            "most_in_flight": done.tally.most_in_flight,
        }


def _plan(arguments: Any, url: str, trace: Path | None) -> BenchPlan:
    workload = (
        WorkloadSettings(kind="prompts", max_tokens=arguments.tokens)
        if trace is None
        else WorkloadSettings(
            kind="trace", path=trace, context_tokens=1024, max_tokens=arguments.tokens
        )
    )
    return BenchPlan(
        target=TargetSettings(url=url),
        workload=workload,
        load=LoadSettings(
            rate_per_s=arguments.rate, duration_s=arguments.seconds, warm_up_s=arguments.warm_up
        ),
        seed=arguments.seed,
    )


def _found_trace(given: Path | None) -> Path | None:
    """The trace; None, with a word, where there is none."""
    data = os.environ.get("OUTRIDER_DATA")
    places = [given] if given is not None else []
    if data:
        places += [Path(data) / (given or _TRACE), Path(data) / "traces" / (given or _TRACE)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        console.print("no trace (--trace, or OUTRIDER_DATA): a Poisson process instead")
    return found


def _row(name: str, values: Sequence[float]) -> tuple[str, str, str, str]:
    figures = Summary.of(values)
    return (
        name,
        milliseconds(figures.median / 1e3),
        milliseconds(figures.p99 / 1e3),
        milliseconds(figures.maximum / 1e3),
    )


def main() -> None:
    """Run it."""
    parser = argument_parser(__doc__)
    parser.add_argument("--trace", type=Path, help="Azure's CSV or Mooncake's JSON lines")
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before each")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer, at most")
    arguments = parser.parse_args()
    trace = _found_trace(arguments.trace)
    client_core, mock_core = cores()
    if client_core is not None:
        os.sched_setaffinity(0, {client_core})
    pace = ["--first-token-ms", "20", "--gap-ms", "5"]
    with mock_server(
        ["--stamped", "--tokens", str(arguments.tokens), *pace], core=mock_core
    ) as mock:
        plan = _plan(arguments, mock.url, trace)

        def run(name: str) -> dict[str, Any]:
            with asyncio.Runner(loop_factory=_LOOPS[name]) as runner:
                return runner.run(_replay(plan))

        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in _LOOPS}
        for _ in range(arguments.repeats):
            for name in _LOOPS:
                runs[name].append(run(name))
    results: dict[str, Any] = {"trace": "" if trace is None else trace.name}
    for name, done in runs.items():
        results[name] = _show(name, done)
    write_results(
        "bench_replay", arguments.variant or f"{arguments.rate:g}-per-s", results, arguments
    )


def _show(name: str, done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A table of one event loop's runs together; its figures."""
    kinds = {"sent": "sent_ms", "received": "received_ms", "seen": "seen_ms"}
    together = {kind: [ms for run in done for ms in run[key]] for kind, key in kinds.items()}
    p99_ms = percentile(together["sent"], 99.0)
    cpu_us = sum(run["cpu_us"] for run in done) / len(done)
    offered = sum(run["offered_per_s"] for run in done) / len(done)
    show_table(
        f"{name}: {len(together['sent'])} requests at {offered:.1f}/s",
        ("late by, ms", "p50", "p99", "max"),
        [_row(kind, values) for kind, values in together.items()],
        caption=f"p99 of sent within {GOAL_P99_MS:g} ms: {verdict(p99_ms <= GOAL_P99_MS)}; "
        f"processor: {cpu_us:.0f} us a request",
    )
    return {
        "offered_per_s": offered,
        "cpu_us_per_request": cpu_us,
        "p99_ms_by_run": [percentile(run["sent_ms"], 99.0) for run in done],
        "most_in_flight": max(run["most_in_flight"] for run in done),
        "is_goal_met": p99_ms <= GOAL_P99_MS,
        **{f"{kind}_ms": Summary.of(values) for kind, values in together.items()},
    }


if __name__ == "__main__":
    start(main)
