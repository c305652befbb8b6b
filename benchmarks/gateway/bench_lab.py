"""The latency lab in one go: a trace replayed, an experiment run to its decision, one page of both.

Method: a gateway with the bundled pair is started with a database of its own. First a trace is
replayed at a rate that two cores carry: Azure's conversation trace (Patel et al., 2024) where
$OUTRIDER_DATA has it, otherwise one that is made here by a seed, with arrivals in bursts and
lengths as skewed. Then an experiment is made with `outrider experiment create`: two budgets of
speculation, by user, decided by the time a token takes. Users ask until the always-valid intervals
have decided, looking after each round; looking is allowed.

Reading it: runs/lab/report.html. The experiment's figures are in it as on the page of
`outrider experiment report --html`. It fails where none was decided within --max-requests.

    python -m benchmarks.gateway.bench_lab
"""

import argparse
import asyncio
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from benchmarks.shared.harness import CACHE, console, quiet_transformers, start, write_results
from benchmarks.shared.record import RESULTS, ROOT, git
from outrider.gateway.experiments.measure_store import MeasureStore
from outrider.gateway.experiments.reporting import Reporter
from outrider.gateway.experiments.statistics.report import Analysis
from outrider.gateway.experiments.statistics.report_text import print_report
from outrider.gateway.experiments.store import ExperimentStore
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.storage.open import open_database
from outrider.gateway.tools.commands.experiment_page import experiment_html
from outrider.gateway.tools.demo.process import GatewayProcess
from outrider.gateway.tools.measuring.bench.client import TargetSettings
from outrider.gateway.tools.measuring.bench.plan import BenchPlan, LoadSettings
from outrider.gateway.tools.measuring.bench.printing import print_result
from outrider.gateway.tools.measuring.bench.progress import LiveProgress
from outrider.gateway.tools.measuring.bench.report_html import ReportSection, report_page
from outrider.gateway.tools.measuring.bench.results import BenchResult, Objectives, write_result
from outrider.gateway.tools.measuring.bench.runner import Session, run_bench
from outrider.gateway.tools.measuring.bench.workloads import PlannedRequest, WorkloadSettings
from outrider.gateway.tools.reports.page import write_page

NAME: Final = "draft-budget"
DECIDED: Final = ("better", "worse", "equivalent")
_PAIR: Final = ("--large", "demo", "--small", "demo")
_AZURE: Final = "azure_2023_conv_first_half.csv"
_OBJECTIVES: Final = Objectives(ttft_ms=1000.0, inter_token_ms=60.0)
_CONTEXT_TOKENS: Final = 512
_MAX_TOKENS: Final = 48
_TIMEOUT_S: Final = 120.0


# ---- the trace --------------------------------------------------------------------------------


def azure_trace() -> Path | None:
    """The trace among the data, None where it is not."""
    data = os.environ.get("OUTRIDER_DATA")
    if not data:
        return None
    return next(Path(data).rglob(_AZURE), None)


def write_trace(path: Path, *, num_requests: int, seed: int) -> None:
    """A trace in Azure's format: gamma arrivals (coefficient of variation 2), log-normal lengths.

    The medians are about those of Azure's conversations: 1,000 tokens asked, 130 answered.
    """
    rng = np.random.default_rng(seed)
    gaps_s = rng.gamma(shape=0.25, scale=4.0, size=num_requests)
    asked = rng.lognormal(np.log(1000.0), 0.9, size=num_requests).clip(8, 4000).astype(int)
    answered = rng.lognormal(np.log(130.0), 0.7, size=num_requests).clip(4, 700).astype(int)
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for at_s, prompt, answer in zip(np.cumsum(gaps_s), asked, answered, strict=True):
            moment = begin + timedelta(seconds=float(at_s))
            writer.writerow([moment.strftime("%Y-%m-%d %H:%M:%S.%f"), prompt, answer])


def replay(url: str, trace: Path, arguments: argparse.Namespace) -> BenchResult:
    """The trace at --rate for --seconds."""
    plan = BenchPlan(
        target=TargetSettings(url=url, model="large", timeout_s=_TIMEOUT_S, stall_s=_TIMEOUT_S),
        workload=WorkloadSettings(
            kind="trace", path=trace, context_tokens=_CONTEXT_TOKENS, max_tokens=_MAX_TOKENS
        ),
        load=LoadSettings(rate_per_s=arguments.rate, duration_s=arguments.seconds, warm_up_s=2.0),
        objectives=_OBJECTIVES,
        seed=arguments.seed,
        commit=git("rev-parse", "--short=12", "HEAD"),
    )
    with LiveProgress(Console(stderr=True, highlight=False)) as progress:
        return asyncio.run(run_bench(plan, watch=progress))


# ---- the experiment ---------------------------------------------------------------------------


def outrider(*arguments: str) -> str:
    """Return what the command line prints. Raises SystemExit with its words where it fails."""
    command = [sys.executable, "-m", "outrider.gateway.cli", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    if done.returncode:
        raise SystemExit(f"outrider {' '.join(arguments[:2])} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def create_experiment(database_url: str, budgets: Sequence[int]) -> None:
    """Two budgets, by user, started."""
    arms = [f"nodes-{budget} max_draft_nodes={budget}" for budget in budgets]
    outrider(
        *("experiment", "create", NAME, "--arm", arms[0], "--arm", arms[1]),
        *("--set", f"control=nodes-{budgets[0]}", "--set", "metric=tpot", "--unit", "user"),
        *("--start", "--database-url", database_url),
    )


@contextmanager
def opened_reporter(database_url: str) -> Iterator[Reporter]:
    """Reports out of the database, beside the gateway that writes it."""
    database = open_database(load_settings(), database_url=database_url)
    assert database is not None
    try:
        yield Reporter(ExperimentStore(database), MeasureStore(database))
    finally:
        database.close()


def of_users(
    requests: Sequence[PlannedRequest], num_users: int, rng: np.random.Generator
) -> list[PlannedRequest]:
    """The same requests, each with a user."""
    found = []
    for planned in requests:
        body: dict[str, Any] = json.loads(planned.body)
        body["user"] = f"user-{rng.integers(num_users)}"
        found.append(replace(planned, body=json.dumps(body).encode()))
    return found


async def ask_until_decided(
    url: str, reporter: Reporter, arguments: argparse.Namespace
) -> Analysis:
    """Rounds of requests, and a look after each."""
    rng = np.random.default_rng(arguments.seed)
    load = LoadSettings(concurrency=2, num_requests=arguments.round, duration_s=None)
    plan = BenchPlan(
        target=TargetSettings(url=url, model="large", timeout_s=_TIMEOUT_S, stall_s=_TIMEOUT_S),
        workload=WorkloadSettings(kind="prompts", max_tokens=_MAX_TOKENS),
        load=load,
        request_fields={"temperature": 0},
        seed=arguments.seed,
    )
    sent = 0
    with LiveProgress(Console(stderr=True, highlight=False)) as progress:
        async with Session(plan, watch=progress) as session:
            while True:
                # Never a prompt twice: it would be drafted from its own remembered answer.
                asked = of_users(session.requests(load, salt=str(sent)), arguments.users, rng)
                done = await session.run(asked, load, text=f"experiment, {sent} asked")
                if failed := [row for row in done.rows if not row.is_success]:
                    raise SystemExit(f"the gateway failed: {failed[0].error} {failed[0].message}")
                sent += len(done.rows)
                analysis = await asyncio.to_thread(reporter.report, NAME)
                if analysis.verdict.state in DECIDED or sent >= arguments.max_requests:
                    return analysis


def experiment_section(analysis: Analysis) -> ReportSection:
    """The report as on its own page."""
    html = f'<p class="lead">{escape(analysis.verdict.text)}</p>\n{experiment_html(analysis)}'
    return ReportSection(title=f"The experiment {NAME}", html=html)


# ---- the command ------------------------------------------------------------------------------


def run(folder: Path, arguments: argparse.Namespace) -> tuple[BenchResult, Analysis]:
    """The replay and the experiment; the experiment is reported on when all was written."""
    trace = azure_trace()
    if trace is None:
        trace = folder / "trace.csv"
        write_trace(trace, num_requests=4000, seed=arguments.seed)
    with tempfile.TemporaryDirectory() as place:
        database_url = f"sqlite:///{place}/lab.db"
        with GatewayProcess([*_PAIR, "--set", f"database_url={database_url}"]) as gateway:
            url = gateway.start()
            result = replay(url, trace, arguments)
            create_experiment(database_url, arguments.budgets)
            with opened_reporter(database_url) as reporter:
                asyncio.run(ask_until_decided(url, reporter, arguments))
        # The gateway has written its last measures when it has ended.
        with opened_reporter(database_url) as reporter:
            analysis = reporter.report(NAME)
    return result, analysis


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second of the trace")
    parser.add_argument("--seconds", type=float, default=40.0, help="of the trace")
    parser.add_argument(
        "--budgets", type=int, nargs=2, default=[0, 32], help="nodes drafted in a step, at most"
    )
    parser.add_argument("--users", type=int, default=400, help="who ask in the experiment")
    parser.add_argument("--round", type=int, default=64, help="requests between two looks")
    parser.add_argument("--max-requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=CACHE / "lab", help="where the page goes")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    arguments = parser.parse_args(argv)
    quiet_transformers()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    result, analysis = run(folder, arguments)
    print_result(console, result)
    print_report(analysis, console)
    write_result(result, folder / "trace.json")
    page = report_page(result, sections=[experiment_section(analysis)])
    write_page(page, folder / "report.html")
    console.print(f"written: {folder.name}/report.html")
    document = {"replay": summary_figures(result), "experiment": analysis.document()}
    write_results("bench_lab", "demo", document, arguments)
    if analysis.verdict.state not in DECIDED:
        raise SystemExit(f"{NAME} was not decided: {analysis.verdict.text}")


def summary_figures(result: BenchResult) -> dict[str, Any]:
    """Return what is kept of the replay; all of it is in trace.json beside the page."""
    summary = result.summary
    found: dict[str, Any] = {
        "trace": result.meta.workload.get("name"),
        "num_requests": summary.num_requests,
        "num_failed": summary.num_failed,
        "goodput_per_s": summary.goodput_per_s,
        "completion_tokens_per_s": summary.completion_tokens_per_s,
    }
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        if (values := getattr(summary, name)) is not None:
            found[name] = {
                "p50": values.p50.value,
                "p95": values.p95.value,
                "p99": values.p99.value,
            }
    if summary.attainment is not None:
        found["attainment"] = summary.attainment.value
    return found


if __name__ == "__main__":
    start(main)
