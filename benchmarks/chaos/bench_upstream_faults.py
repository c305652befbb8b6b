"""What do users notice when a server behind the gateway fails?

Method: for each way to fail, a fresh `outrider serve`. A window of requests while all is well, then
the same requests at the same moments while one server fails at each request that it gets. Three out
of four are streamed. Two cases: `replica`, two servers with the same model of which one fails;
`local`, the only upstream server fails and the small model on this machine is left. The servers
are mocks whose answer is a function of the prompt, so every text can be compared.

Reading it: `hit` is how many requests reached the failing server (its breaker keeps the others
away). `answered` came in full and with the right text; `refused` ended in an error in OpenAI's
words, with a true beginning of the answer before it. The goal is that these two are all, and that
with a healthy replica all are answered. `added` is the time to the first text (of streams) minus
that of the same request in the healthy window; `longest` is the whole of the longest answer.

    python -m benchmarks.chaos.bench_upstream_faults
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos.upstream_faults import FAULTS, GOOD, Fault, Judged, judge, tally
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
from benchmarks.shared.harness import DEMO_PAIR, progress_bar
from benchmarks.shared.mock_upstream import MockScript, MockThread, answer_text, mock_in_thread
from benchmarks.shared.record import percentile
from benchmarks.shared.upstream_load import Clients, Exchange, arrivals, http_request
from benchmarks.shared.upstream_servers import Server, gateway_server

CASES: Final = ("replica", "local")
TIMEOUT_S: Final = 1.0
"""For the first token and between two tokens."""
_SLACK_S: Final = 0.5
# For the small model to be loaded, and to answer a window's requests at once.
_LOCAL_S: Final = 120.0
_WHOLE_EVERY: Final = 4

Expected = Callable[[dict[str, Any]], set[str]]
"""The texts that a request may be answered with."""


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    cases: tuple[str, ...] = option(CASES, choices=CASES)
    faults: tuple[str, ...] = option(
        (), "default: all", choices=tuple(fault.name for fault in FAULTS)
    )
    small: Path = option(DEMO_PAIR / "small", "the local model")
    rate: float = option(10.0, "requests a second")
    seconds: float = option(6.0, "a window")
    tokens: int = option(24, "of an answer")
    first_token_ms: float = option(20.0)
    gap_ms: float = option(5.0)
    deadline_s: float = option(8.0, "of each request")
    seed: int = option(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Requests of a window: documents and times."""

    documents: list[dict[str, Any]]
    moments_s: list[float]
    deadline_s: float


def make_plan(options: Options, case: str) -> Plan:
    """Each request asks something else."""
    moments_s = arrivals(options.rate, options.seconds, options.seed)
    more = {"policy": "prefer_cloud"} if case == "local" else {}
    documents = [
        {
            "model": "cloud" if case == "replica" else "auto",
            "messages": [{"role": "user", "content": f"Question {number}: which trees grow here?"}],
            "temperature": 0,
            "max_tokens": options.tokens,
            "stream": number % _WHOLE_EVERY != _WHOLE_EVERY - 1,
            "outrider": {"deadline_ms": options.deadline_s * 1e3, **more},
        }
        for number in range(len(moments_s))
    ]
    return Plan(documents=documents, moments_s=moments_s, deadline_s=options.deadline_s)


async def _send(port: int, plan: Plan) -> list[Exchange]:
    """The whole window; an answer that does not end is given up behind its deadline."""
    clients = Clients(port)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    tasks = []
    for document, moment_s in zip(plan.documents, plan.moments_s, strict=True):
        await asyncio.sleep(max(0.0, began_s + moment_s - loop.time()))
        request = http_request(document)
        limit_s = plan.deadline_s + 4 * _SLACK_S
        tasks.append(asyncio.create_task(clients.ask(request, timeout_s=limit_s)))
    exchanges = await asyncio.gather(*tasks)
    clients.close()
    return exchanges


def run_window(port: int, plan: Plan, expected: Expected) -> list[Judged]:
    """Send a window and judge what came."""
    exchanges = asyncio.run(_send(port, plan))
    limit_s = plan.deadline_s + _SLACK_S
    return [
        judge(exchange, expected(document), limit_s=limit_s)
        for exchange, document in zip(exchanges, plan.documents, strict=True)
    ]


def figures(plan: Plan, healthy: Sequence[Judged], struck: Sequence[Judged]) -> dict[str, Any]:
    """Return what the fault did to a window."""
    added = [
        after.first_text_s - before.first_text_s
        for document, before, after in zip(plan.documents, healthy, struck, strict=True)
        if document["stream"] and before.first_text_s is not None and after.first_text_s is not None
    ]
    return {
        "num_requests": len(struck),
        "healthy": tally(healthy),
        "struck": tally(struck),
        "codes": sorted({answer.code for answer in struck if answer.code}),
        "added_first_text_median_s": statistics.median(added) if added else None,
        "added_first_text_p99_s": percentile(added, 99) if added else None,
        "longest_s": max(answer.total_s for answer in struck),
        "is_good": all(answer.verdict in GOOD for answer in (*healthy, *struck)),
    }


# ---- the two cases ----------------------------------------------------------------------------


@contextlib.contextmanager
def _gateway(case: str, mocks: Sequence[MockThread], options: Options) -> Iterator[Server]:
    words = ["--large", "none", "--small", str(options.small) if case == "local" else "none"]
    settings = {
        "server": "vllm",
        "timeouts.first_token_s": TIMEOUT_S,
        "timeouts.between_tokens_s": TIMEOUT_S,
    }
    for name, value in settings.items():
        words += ["--set", f"tiers.cloud.{name}={value}"]
    with gateway_server([("cloud", mock.url) for mock in mocks], options=words) as server:
        yield server


def run_fault(case: str, fault: Fault, options: Options) -> dict[str, Any]:
    """A healthy window and a struck one, on a gateway of their own."""
    script = MockScript(
        num_pieces=options.tokens,
        first_token_delay_s=options.first_token_ms / 1e3,
        gap_s=options.gap_ms / 1e3,
    )
    plan = make_plan(options, case)
    with contextlib.ExitStack() as stack:
        spoilt = stack.enter_context(mock_in_thread(script, name="spoilt"))
        mocks = [spoilt]
        if case == "replica":
            mocks.append(stack.enter_context(mock_in_thread(script, name="healthy")))
        server = stack.enter_context(_gateway(case, mocks, options))
        expected = _expected(case, script, plan, server)
        healthy = run_window(server.port, plan, expected)
        num_before = len(spoilt.requests)
        fault.strike(spoilt, script)
        struck = run_window(server.port, plan, expected)
        num_hit = len(spoilt.requests) - num_before
    return {**figures(plan, healthy, struck), "num_hit": None if fault.toxic is None else num_hit}


def _expected(case: str, script: MockScript, plan: Plan, server: Server) -> Expected:
    """The mock's text; in the local case also what the small model says to the same."""
    texts = {str(d["messages"]): {answer_text(script, d)} for d in plan.documents}
    if case == "local":
        local = [
            {**document, "model": "small", "stream": False, "outrider": {}}
            for document in plan.documents
        ]
        _await_local(server, local[0])
        asked = Plan(documents=local, moments_s=[0.0] * len(local), deadline_s=_LOCAL_S)
        for document, exchange in zip(local, asyncio.run(_send(server.port, asked)), strict=True):
            texts[str(document["messages"])].add(_local_text(exchange))
    return lambda document: texts[str(document["messages"])]


def _await_local(server: Server, document: dict[str, Any]) -> None:
    """A gateway with an upstream tier is ready before its own models are loaded."""
    asked = Plan(documents=[document], moments_s=[0.0], deadline_s=_LOCAL_S)
    deadline_s = time.monotonic() + _LOCAL_S
    while time.monotonic() < deadline_s:
        (exchange,) = asyncio.run(_send(server.port, asked))
        if exchange.status != 503:
            return
        time.sleep(0.2)


def _local_text(exchange: Exchange) -> str:
    """Raises SystemExit where the small model does not answer."""
    if exchange.status != 200:
        raise SystemExit(f"the small model does not answer: {exchange.body.decode()[:500]}")
    return judge(exchange, (), limit_s=_LOCAL_S).text


# ---- the command ------------------------------------------------------------------------------


def measure(options: Options) -> Results:
    """Return the figures by case and fault."""
    faults = [fault for fault in FAULTS if not options.faults or fault.name in options.faults]
    results: Results = {case: {} for case in options.cases}
    with progress_bar("faults", len(faults) * len(options.cases)) as advance:
        for case in options.cases:
            for fault in faults:
                results[case][fault.name] = run_fault(case, fault, options)
                advance(f"{case}, {fault.name}")
    return results


def _others(entry: Mapping[str, Any]) -> str:
    struck = entry["struck"]
    return str(sum(struck.values()) - sum(struck[good] for good in GOOD))


_COLUMNS: Final = (
    ("sent", count("num_requests")),
    ("hit", count("num_hit")),
    ("answered", lambda entry: str(entry["struck"]["answered"])),
    ("refused", lambda entry: str(entry["struck"]["refused"])),
    ("other", _others),
    ("added ms", milliseconds("added_first_text_median_s")),
    ("p99", milliseconds("added_first_text_p99_s")),
    ("longest s", figure("longest_s")),
    ("good", figure("is_good")),
)


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A table a case, a row a fault."""
    for case, entries in results.items():
        yield Table(title=f"{case}: one server fails", columns=_COLUMNS, entries=entries)


BENCHMARK: Final = Benchmark(options=Options, measure=measure, tables=tables, variant="mock")

if __name__ == "__main__":
    BENCHMARK.start()
