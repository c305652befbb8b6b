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

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos.upstream_faults import FAULTS, GOOD, Fault, Judged, judge, tally
from benchmarks.shared.harness import (
    DEMO_PAIR,
    milliseconds,
    percentile,
    progress_bar,
    quiet_transformers,
    show_table,
    start,
    verdict,
    write_results,
)
from benchmarks.shared.mock_upstream import MockScript, MockThread, answer_text, mock_in_thread
from benchmarks.shared.record import RESULTS
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Requests of a window: documents and times."""

    documents: list[dict[str, Any]]
    moments_s: list[float]
    deadline_s: float


def make_plan(arguments: argparse.Namespace, case: str) -> Plan:
    """Each request asks something else."""
    moments_s = arrivals(arguments.rate, arguments.seconds, arguments.seed)
    more = {"policy": "prefer_cloud"} if case == "local" else {}
    documents = [
        {
            "model": "cloud" if case == "replica" else "auto",
            "messages": [{"role": "user", "content": f"Question {number}: which trees grow here?"}],
            "temperature": 0,
            "max_tokens": arguments.tokens,
            "stream": number % _WHOLE_EVERY != _WHOLE_EVERY - 1,
            "outrider": {"deadline_ms": arguments.deadline_s * 1e3, **more},
        }
        for number in range(len(moments_s))
    ]
    return Plan(documents=documents, moments_s=moments_s, deadline_s=arguments.deadline_s)


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
def _gateway(
    case: str, mocks: Sequence[MockThread], arguments: argparse.Namespace
) -> Iterator[Server]:
    options = ["--large", "none", "--small"]
    options += [str(arguments.small) if case == "local" else "none"]
    settings = {
        "server": "vllm",
        "timeouts.first_token_s": TIMEOUT_S,
        "timeouts.between_tokens_s": TIMEOUT_S,
    }
    for name, value in settings.items():
        options += ["--set", f"tiers.cloud.{name}={value}"]
    with gateway_server([("cloud", mock.url) for mock in mocks], options=options) as server:
        yield server


def run_fault(case: str, fault: Fault, arguments: argparse.Namespace) -> dict[str, Any]:
    """A healthy window and a struck one, on a gateway of their own."""
    script = MockScript(
        num_pieces=arguments.tokens,
        first_token_delay_s=arguments.first_token_ms / 1e3,
        gap_s=arguments.gap_ms / 1e3,
    )
    plan = make_plan(arguments, case)
    with contextlib.ExitStack() as stack:
        spoilt = stack.enter_context(mock_in_thread(script, name="spoilt"))
        mocks = [spoilt]
        if case == "replica":
            mocks.append(stack.enter_context(mock_in_thread(script, name="healthy")))
        server = stack.enter_context(_gateway(case, mocks, arguments))
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


def _show(case: str, results: dict[str, dict[str, Any]]) -> None:
    def time_of(seconds: float | None) -> str:
        return "-" if seconds is None else milliseconds(seconds)

    show_table(
        f"{case}: one server fails",
        ["", "sent", "hit", "answered", "refused", "other", "added ms", "p99", "longest s", "good"],
        [
            [
                name,
                str(entry["num_requests"]),
                "-" if entry["num_hit"] is None else str(entry["num_hit"]),
                str(entry["struck"]["answered"]),
                str(entry["struck"]["refused"]),
                str(sum(entry["struck"].values()) - sum(entry["struck"][v] for v in GOOD)),
                time_of(entry["added_first_text_median_s"]),
                time_of(entry["added_first_text_p99_s"]),
                f"{entry['longest_s']:.2f}",
                verdict(entry["is_good"]),
            ]
            for name, entry in results.items()
        ],
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the table and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--faults", nargs="+", choices=[fault.name for fault in FAULTS])
    parser.add_argument("--small", type=Path, default=DEMO_PAIR / "small", help="the local model")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=6.0, help="a window")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--first-token-ms", type=float, default=20.0)
    parser.add_argument("--gap-ms", type=float, default=5.0)
    parser.add_argument("--deadline-s", type=float, default=8.0, help="of each request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", default="mock", help="second part of the results' name")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the file goes")
    arguments = parser.parse_args(argv)
    quiet_transformers()
    faults = [fault for fault in FAULTS if not arguments.faults or fault.name in arguments.faults]
    results: dict[str, dict[str, dict[str, Any]]] = {case: {} for case in arguments.cases}
    with progress_bar("faults", len(faults) * len(arguments.cases)) as advance:
        for case in arguments.cases:
            for fault in faults:
                results[case][fault.name] = run_fault(case, fault, arguments)
                advance(f"{case}, {fault.name}")
    for case, entries in results.items():
        _show(case, entries)
    write_results("bench_upstream_faults", arguments.variant, results, arguments)


if __name__ == "__main__":
    start(main)
