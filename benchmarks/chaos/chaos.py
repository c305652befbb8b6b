"""Mixed traffic on the shipped pair while all around it fails: is anything lost, wrong or left?

A gateway with keys, limits and a ledger serves both models in deterministic mode, and an upstream
server. Clients chat, stream, ask for tools and for JSON of random schemas, let the router and the
cascade choose, are in the arms of two experiments (different models for users of an alias; drafts
or none), run into limits, and some hang up. Meanwhile engines are killed and stopped, the
upstream server fails in every way of bench_upstream_faults, the database is locked, the disk is
full (on Linux as root), the wall clock jumps (with libfaketime). Then all faults end, the clients
go, and each question is asked once more, alone.

It holds that every request ends in time, in an answer or in an error as the API promises; that an
answer is the one that the question has alone, and conforms to its schema; that the ledger charges
each answer once, as its usage says; that users stay in their arm, and that reports count as the
ledger does; that no request, block, reservation, row, task, file or connection is left; that memory
stays.

    python -m benchmarks.chaos.chaos --minutes 60
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos.chaos_experiments import count_answers, create_experiments, read_reports
from benchmarks.chaos.chaos_faults import Struck, Surroundings, fake_clock, small_disk, striking
from benchmarks.chaos.chaos_findings import (
    Finding,
    Sample,
    answered_arms,
    judge_answers,
    judge_books,
    judge_coverage,
    judge_experiments,
    judge_files,
    judge_growth,
    judge_rest,
    open_files,
    process_bytes,
    read_metrics,
    summary,
)
from benchmarks.chaos.chaos_plot import draw
from benchmarks.chaos.chaos_questions import CHAIN, TRIED, make_questions
from benchmarks.chaos.chaos_traffic import Clients
from benchmarks.shared.harness import argument_parser, console, show_table, start, write_results
from benchmarks.shared.mock_upstream import MockScript, mock_in_thread
from benchmarks.shared.record import ROOT
from benchmarks.shared.upstream_servers import Server, gateway_server

_CALM_S: Final = 15.0
_SAMPLE_S: Final = 2.0
_SETTLE_S: Final = 60.0
_HEALTHY: Final = MockScript(num_pieces=24)
_LIMITED: Final = ("--requests-per-minute", "30", "--tokens-per-minute", "4000")


def _new_key(database_url: str, *flags: str) -> str:
    command = [
        sys.executable,
        "-m",
        "outrider.gateway.cli",
        "keys",
        "create",
        "--json",
        "--name",
        "chaos",
    ]
    command += [*flags, "--database-url", database_url]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return str(json.loads(made.stdout)["key"])


class _Watch:
    """Samples of a gateway's and its engine's memory, taken in a thread."""

    def __init__(self, surroundings: Surroundings, zero_s: float) -> None:
        self.samples: list[Sample] = []
        self._surroundings = surroundings
        self._zero_s = zero_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        pid = self._surroundings.gateway_pid
        while not self._ended.wait(_SAMPLE_S):
            engines = self._surroundings.engines()
            self.samples.append(
                Sample(
                    at_s=time.monotonic() - self._zero_s,
                    gateway_bytes=process_bytes(pid),
                    engine_bytes=max((process_bytes(each) for each in engines), default=0),
                    num_files=open_files(pid).total(),
                )
            )


def _settled(server: Server, key: str) -> dict[str, float]:
    """Return the metrics when nothing is under way any more, or those of a minute later."""
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        metrics = read_metrics(server.get("/metrics", key=key))
        under_way = (
            "outrider_num_requests_running",
            "outrider_num_requests_waiting",
            "outrider_ledger_pending_rows",
            "outrider_limit_reservations",
        )
        if not any(metrics[name] for name in under_way) or time.monotonic() > deadline_s:
            return metrics
        time.sleep(0.5)


def _options(arguments: argparse.Namespace, folder: Path, database_url: str) -> list[str]:
    settings = {
        "database_url": database_url,
        "engine.deterministic": "true",
        "keys.mode": "required",
        "keys.refresh_s": "1",
        "ledger.journal": folder / "journal",
        f"aliases.{CHAIN}.models": "cloud,large",
        f"aliases.{TRIED}.models": "small",
        "tiers.cloud.timeouts.first_token_s": "4",
        "tiers.cloud.timeouts.between_tokens_s": "4",
    }
    flags = ["--large", str(arguments.large), "--small", str(arguments.small)]
    flags += ["--dtype", "float32", "--num-threads", str(arguments.threads or 1)]
    flags += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return flags


def _run(arguments: argparse.Namespace, work: Path, stack: ExitStack) -> dict[str, Any]:
    state = stack.enter_context(small_disk(work / "state"))
    folder = work / "state"
    database = folder / "outrider.db"
    database_url = f"sqlite:///{database}"
    keys = {"any": _new_key(database_url, "--admin")}
    keys["limited"] = _new_key(database_url, *_LIMITED)
    create_experiments(database_url)
    upstream = stack.enter_context(mock_in_thread(_HEALTHY))
    clock = work / "clock"
    variables = fake_clock(clock)
    server = stack.enter_context(
        gateway_server(
            [("cloud", upstream.url)],
            options=_options(arguments, folder, database_url),
            variables=variables,
        )
    )
    surroundings = Surroundings(
        gateway_pid=server.pid,
        database=database,
        upstream=upstream,
        healthy=_HEALTHY,
        state=state,
        clock=clock if variables else None,
    )
    questions = make_questions(arguments.questions, arguments.seed)
    _wait_for_models(server, keys["any"])
    before, files_before = _settled(server, keys["any"]), open_files(server.pid)
    zero_s = time.monotonic()
    clients = Clients(
        url=server.url, questions=questions, keys=keys, zero_s=zero_s, seed=arguments.seed
    )
    until_s = 60.0 * arguments.minutes
    with (
        _Watch(surroundings, zero_s) as watch,
        console.status(f"{arguments.minutes:g} minutes of chaos"),
    ):
        with striking(
            surroundings, zero_s=zero_s, every_s=arguments.every, seed=arguments.seed
        ) as struck:
            threading.Timer(max(until_s - _CALM_S, 1.0), surroundings.stopping.set).start()
            asyncio.run(clients.run(number=arguments.clients, until_s=until_s))
        _wait_for_models(server, keys["any"])
        asyncio.run(clients.alone())
    upstream.refuse()  # connections to it are kept open for later requests
    after = _settled(server, keys["any"])
    files_after = open_files(server.pid)
    in_arms = _booked_arms(database, clients)
    reports = read_reports(database_url, count_answers(list(in_arms.values())))
    findings = [
        *judge_answers(questions, clients.exchanges),
        judge_coverage(clients.exchanges, {each.kind for each in questions}),
        *judge_experiments(clients.exchanges, in_arms, reports),
        *judge_books(database, clients.exchanges, after["outrider_generation_tokens_total"]),
        *judge_rest(before, after),
        *judge_growth(watch.samples),
        judge_files(files_before, files_after, database),
    ]
    draw(clients.exchanges, struck, watch.samples, _picture(arguments))
    return {
        "findings": findings,
        "faults": _durations(struck),
        "arms": {"/".join(place): count for place, count in reports.items()},
        "not_possible_here": [
            name
            for name, there in (("disk full", state), ("clock jumped", variables))
            if there is None
        ],
        **summary(clients.exchanges),
    }


def _booked_arms(database: Path, clients: Clients) -> dict[str, str]:
    """Return `answered_arms` once all answers are in it; the last one is booked behind its end."""
    answered = {each.request_id for each in clients.exchanges if each.outcome == "answered"}
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        found = answered_arms(database)
        if answered <= found.keys() or time.monotonic() > deadline_s:
            return found
        time.sleep(0.5)


def _wait_for_models(server: Server, key: str) -> None:
    """Wait until the engine tells its state; a gateway with an upstream tier is ready before."""
    deadline_s = time.monotonic() + 300.0
    while "outrider_num_requests_running{" not in server.get("/metrics", key=key):
        if time.monotonic() > deadline_s:
            raise SystemExit("the models did not get ready")
        time.sleep(0.5)


def _durations(struck: Sequence[Struck]) -> Mapping[str, list[float]]:
    found: dict[str, list[float]] = {}
    for each in struck:
        found.setdefault(each.name, []).append(each.ended_s - each.began_s)
    return found


def _picture(arguments: argparse.Namespace) -> Path:
    folder = Path(arguments.results)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"chaos-{_variant(arguments)}.png"


def _variant(arguments: argparse.Namespace) -> str:
    return str(arguments.variant or f"{arguments.minutes:g}-minutes")


def _show(results: Mapping[str, Any]) -> None:
    findings: Sequence[Finding] = results["findings"]
    show_table(
        f"{results['num_requests']} requests: {results['by_outcome']}",
        ["rule", "holds", ""],
        [[each.rule, "yes" if each.holds else "NO", each.wrong] for each in findings],
        caption=", ".join(f"{name}: {len(times)}" for name, times in results["faults"].items()),
    )


def main() -> None:
    """Run, judge, draw, write; the exit status is 1 where a rule does not hold."""
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="of traffic")
    parser.add_argument("--clients", type=int, default=10, help="at once")
    parser.add_argument("--questions", type=int, default=150, help="that they choose from")
    parser.add_argument("--every", type=float, default=12.0, help="seconds between faults")
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="outrider-chaos-"))
    try:
        with ExitStack() as stack:
            results = _run(arguments, work, stack)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _show(results)
    write_results("chaos", _variant(arguments), results, arguments)
    if not all(each.holds for each in results["findings"]):
        sys.stdout.flush()
        os._exit(1)


if __name__ == "__main__":
    start(main)
