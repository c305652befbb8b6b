from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from benchmarks.shared.mock_upstream import MockScript, MockThread, mock_in_thread
from outrider.gateway.tools.measuring.bench.client import TargetSettings
from outrider.gateway.tools.measuring.bench.flags import (
    parse_headers,
    parse_objectives,
    parse_prices,
    parse_sides,
)
from outrider.gateway.tools.measuring.bench.options import BENCH_HELP, bench
from outrider.gateway.tools.measuring.bench.plan import BenchPlan, LoadSettings, PlanError
from outrider.gateway.tools.measuring.bench.results import read_result
from outrider.gateway.tools.measuring.bench.workloads import WorkloadSettings

app = typer.Typer(pretty_exceptions_enable=False)
app.command(help=BENCH_HELP)(bench)


@pytest.fixture(scope="module")
def mock() -> Iterator[MockThread]:
    script = MockScript(num_pieces=6, first_token_delay_s=0.005, gap_s=0.001)
    with mock_in_thread(script) as running:
        yield running


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": "150", **environment})


QUICK = ("--num-requests", "8", "--rate", "200", "--warm-up", "0", "--arrivals", "constant")


def test_a_run_prints_and_keeps_what_it_found(mock: MockThread, tmp_path: Path) -> None:
    file, page = tmp_path / "run.json", tmp_path / "run.html"
    told = run(
        *("--url", mock.url, *QUICK, "--slo", "ttft_ms=2000,inter_token_ms=500"),
        *("--price", "1,2", "--json", str(file), "--html", str(page), "--commit", "abc"),
        *("--set", "outrider.max_draft_nodes=0"),
    )
    assert told.exit_code == 0, told.output
    assert "time to first token" in told.output
    assert "8 of 8 requests answered" in told.output
    assert "attainment of TTFT ≤ 2000 ms, TPOT ≤ 500 ms: 100.0%" in told.output
    result = read_result(file)
    assert result.summary.num_completed == 8
    assert result.summary.cost is not None
    assert result.meta.commit == "abc"
    assert result.meta.request_fields == {"outrider": {"max_draft_nodes": 0}}
    assert page.read_text(encoding="utf-8").lower().startswith("<!doctype html>")


@pytest.mark.slow
def test_the_exit_status_tells_of_objectives_that_were_missed(mock: MockThread) -> None:
    missed = run("--url", mock.url, *QUICK, "--slo", "ttft_ms=0.01", "--fail-below", "0.5")
    assert missed.exit_code == 3
    assert "0.0% met the objectives" in missed.output


@pytest.mark.slow
def test_a_missing_server_fails_with_a_message() -> None:
    told = run("--url", "http://127.0.0.1:9", *QUICK)
    assert told.exit_code == 1
    assert "no server answers at http://127.0.0.1:9" in told.output
    assert "Traceback" not in told.output


@pytest.mark.slow
def test_a_trace_may_lie_in_the_folder_of_data(mock: MockThread, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "t.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,30,4\n"
        "2023-11-16 18:15:47,20,3\n2023-11-16 18:15:46.5,25,2\n"
    )
    file = tmp_path / "run.json"
    told = run(
        *("--url", mock.url, "--trace", "t.csv", "--rate", "50", "--num-requests", "3"),
        *("--warm-up", "0", "--json", str(file)),
        OUTRIDER_DATA=str(tmp_path),
    )
    assert told.exit_code == 0, told.output
    result = read_result(file)
    assert [row.num_completion_tokens for row in result.rows] == [4, 2, 3]
    assert [row.num_prompt_tokens for row in result.rows] == [30, 25, 20]
    assert any("order of time" in note for note in result.meta.notes)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rate", "1", "--concurrency", "1"), "choose one"),
        (("--prompts", "a", "--trace", "b"), "choose one"),
        (("--trace", "missing.csv"), "cannot be read"),
        (("--synthetic", "7"), "PROMPT,ANSWER"),
        (("--synthetic", "7,x"), "is not a length"),
        (("--slo", "ttft=5"), "ttft_ms"),
        (("--slo", "ttft_ms=soon"), "not a number"),
        (("--search",), "needs objectives"),
        (("--fail-below", "0.5"), "--slo"),
        (("--price", "1"), "two numbers"),
        (("--set", "messages=1"), "use its flag"),
        (("--arrivals", "weekly"), "poisson"),
        (("--compare", "a.json", "b.json"), "cannot be read"),
        (("--ab", "temperature=1", "temperature=1"), "the same"),
        (("--ab", "temperature=1", "nonsense"), "not a field"),
        (("--serve", "--device cpu"), "without --url"),
        (("--header", "x"), "NAME: VALUE"),
    ],
)
def test_wrong_flags_are_told_in_words(arguments: tuple[str, ...], said: str) -> None:
    told = run("--url", "http://127.0.0.1:9", *arguments)
    assert told.exit_code == 2, told.output
    assert said in told.output
    assert "Traceback" not in told.output


def test_sides_are_fields_or_urls() -> None:
    plan = BenchPlan(
        target=TargetSettings(url="http://a:1"),
        workload=WorkloadSettings(),
        load=LoadSettings(concurrency=1),
        request_fields={"outrider": {"tier": "large"}},
    )
    first, second = parse_sides(
        "outrider.max_draft_nodes=0,temperature=0",
        'outrider.slo={"ttft_ms":1,"inter_token_ms":2},outrider.sources=["model","suffix"]',
        plan,
    )
    assert first.request_fields == {
        "outrider": {"tier": "large", "max_draft_nodes": 0},
        "temperature": 0,
    }
    assert second.request_fields["outrider"] == {
        "tier": "large",
        "slo": {"ttft_ms": 1, "inter_token_ms": 2},
        "sources": ["model", "suffix"],
    }
    assert first.arm == "outrider.max_draft_nodes=0,temperature=0"[:40]
    base, other = parse_sides("base", "http://user:secret@b:2", plan)
    assert (base.arm, other.arm) == ("base", "http://b:2")
    assert base.request_fields == plan.request_fields
    assert other.target.url == "http://user:secret@b:2"


def test_flags_are_read() -> None:
    assert parse_objectives("tpot_ms=5, e2e_ms=7").inter_token_ms == 5.0
    assert parse_prices("0.5,2").completion_usd == 2.0
    assert parse_headers(["X-A: b: c"]) == {"x-a": "b: c"}
    for wrong in ("ttft_ms=0", "ttft_ms=1,ttft_ms=2", "ttft_ms=nan"):
        with pytest.raises(PlanError):
            parse_objectives(wrong)
