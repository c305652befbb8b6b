"""The chaos benchmark sees what it is to see; and, long, that there is nothing to see."""

import asyncio
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import jsonschema_rs
import pytest

from benchmarks.chaos_findings import (
    Finding,
    Sample,
    judge_answers,
    judge_books,
    judge_growth,
    judge_rest,
    read_metrics,
)
from benchmarks.chaos_traffic import Clients, Exchange, Question, make_questions
from benchmarks.mock_upstream import MockScript, mock_in_thread
from benchmarks.record import ROOT
from benchmarks.toxics import Toxic

QUESTION = Question(number=0, kind="chat", body={"model": "large", "messages": []})
FINE = Exchange(
    question=0,
    kind="chat",
    request_id="a",
    began_s=0.0,
    outcome="answered",
    status=200,
    answer="4",
    total_tokens=30,
)
IDLE = {
    "outrider_num_requests_running": 0.0,
    "outrider_num_requests_waiting": 0.0,
    "outrider_kv_cache_usage_perc": 0.0,
    "outrider_limit_reservations": 0.0,
    "outrider_ledger_pending_rows": 0.0,
    "outrider_http_body_bytes": 0.0,
    "outrider_ledger_dropped_rows_total": 0.0,
    "outrider_generation_tokens_total": 9.0,
}


def broken(findings: list[Finding]) -> list[str]:
    return [each.rule.split()[0] for each in findings if not each.holds]


def test_answers_that_differ_or_do_not_end_are_seen() -> None:
    again = replace(FINE, request_id="b")
    assert broken(judge_answers([QUESTION], [FINE, again])) == []
    other = replace(FINE, request_id="b", answer="5")
    assert broken(judge_answers([QUESTION], [FINE, other])) == ["an"]
    hung = replace(FINE, request_id="b", outcome="hung", answer="")
    assert broken(judge_answers([QUESTION], [FINE, hung])) == ["every"]


@pytest.mark.parametrize(
    ("charges", "counted", "seen"),
    [
        ([("a", "answer", 30, 9)], 9, []),
        ([], 0, ["the"]),  # lost
        ([("a", "answer", 30, 9), ("a", "answer", 30, 9)], 18, ["the"]),  # charged twice
        ([("a", "answer", 30, 9), ("a", "continuation", 4, 4)], 13, []),
        ([("a", "answer", 29, 9)], 9, ["the"]),
        ([("a", "answer", 30, 9)], 8, ["the"]),
        ([("a", "answer", 30, 9), ("left", "answer", 20, 5)], 11, []),  # two of five were sent
        ([("a", "answer", 30, 9), ("left", "answer", 20, 5)], 15, ["the"]),
    ],
)
def test_books_that_are_wrong_are_seen(
    tmp_path: Path, charges: list[tuple[str, str, int, int]], counted: int, seen: list[str]
) -> None:
    database = tmp_path / "o.db"
    with sqlite3.connect(database) as connection:
        connection.execute(
            "CREATE TABLE ledger (client_request_id, tier, kind, num_charged_tokens, "
            "num_completion_tokens, num_discarded_tokens)"
        )
        connection.executemany("INSERT INTO ledger VALUES (?, 'large', ?, ?, ?, 0)", charges)
    connection.close()
    left = replace(FINE, request_id="left", outcome="left", total_tokens=None)
    assert broken(judge_books(database, [FINE, left], counted)) == seen


def test_what_is_left_is_seen() -> None:
    assert broken(judge_rest(IDLE, IDLE)) == []
    assert broken(judge_rest(IDLE, IDLE | {"outrider_limit_reservations": 1.0})) == ["no"]
    assert broken(judge_rest(IDLE, IDLE | {"outrider_ledger_dropped_rows_total": 1.0})) == ["no"]
    assert broken(judge_rest(IDLE, {})) == ["no"]  # a metric of another name proves nothing


def test_growth_is_seen() -> None:
    flat = [
        Sample(at_s=at, gateway_bytes=200 << 20, engine_bytes=500 << 20, num_files=30)
        for at in range(50)
    ]
    assert broken(judge_growth(flat, (30, 31))) == []
    assert broken(judge_growth(flat, (30, 60))) == ["no"]
    grown = [replace(each, gateway_bytes=(200 + 4 * int(each.at_s)) << 20) for each in flat]
    assert broken(judge_growth(grown, (30, 31))) == ["memory"]


def test_metrics_are_summed_over_their_labels() -> None:
    text = '# HELP a b\na{tier="x"} 1.0\na{tier="y"} 2.5\nb 3\n'
    assert read_metrics(text) == {"a": 3.5, "b": 3.0}


def test_questions_are_the_same_for_a_seed_and_have_all_kinds() -> None:
    questions = make_questions(80, 1)
    assert questions == make_questions(80, 1)
    assert questions != make_questions(80, 2)
    assert len({each.kind for each in questions}) == 6
    for each in questions:
        if each.kind == "schema":
            jsonschema_rs.validator_for(each.body["response_format"]["json_schema"]["schema"])


@pytest.mark.parametrize(
    ("toxic", "outcome"),
    [
        (None, "answered"),
        (Toxic(kind="status", status=503), "refused"),
        (Toxic(kind="reset"), "broken"),
        (Toxic(kind="garbage"), "garbled"),
    ],
)
def test_how_a_request_ended_is_told(toxic: Toxic | None, outcome: str) -> None:
    async def ask(url: str) -> Exchange:
        clients = Clients(
            url=url, questions=[QUESTION], keys={"any": "k"}, zero_s=time.monotonic(), seed=0
        )
        async with httpx.AsyncClient() as client:
            return await clients.ask(client, QUESTION, None)

    with mock_in_thread(MockScript(toxic=toxic)) as mock:
        assert asyncio.run(ask(mock.url)).outcome == outcome


@pytest.mark.long
@pytest.mark.timeout(5000)
def test_an_hour_of_chaos_leaves_no_trace(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--minutes", "60"]
    ran = subprocess.run(
        [*command, "--results", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
