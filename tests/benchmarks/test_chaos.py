"""The chaos benchmark sees what it is to see; and, long, that there is nothing to see."""

import asyncio
import os
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from benchmarks.chaos.chaos_experiments import ArmCount, arms_of, create_experiments, read_reports
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
    read_metrics,
)
from benchmarks.chaos.chaos_questions import Question, make_questions
from benchmarks.chaos.chaos_traffic import Clients, Exchange
from benchmarks.shared.mock_upstream import MockScript, mock_in_thread
from benchmarks.shared.record import ROOT
from benchmarks.shared.toxics import Toxic
from outrider.gateway.contract.answers.outcomes import ArmRef, RequestEnding, RequestOutcome
from outrider.gateway.experiments.measure_store import MeasureStore
from outrider.gateway.experiments.measures import ArmMeasures
from outrider.gateway.storage.database import Database

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
    "outrider_event_loop_tasks": 12.0,
}


def broken(findings: list[Finding]) -> list[str]:
    return [each.rule.split()[0] for each in findings if not each.holds]


def test_answers_that_differ_or_do_not_end_are_seen() -> None:
    alone = replace(FINE, request_id="b", is_alone=True)
    assert broken(judge_answers([QUESTION], [FINE, alone])) == []
    other = replace(alone, answer="5")
    assert broken(judge_answers([QUESTION], [FINE, other])) == ["an"]
    assert broken(judge_answers([QUESTION], [FINE])) == ["an"]  # was not asked alone
    hung = replace(FINE, request_id="b", outcome="hung", answer="")
    assert broken(judge_answers([QUESTION], [FINE, alone, hung])) == ["every"]


def test_answers_of_an_experiment_are_compared_by_the_arms_model() -> None:
    question = replace(QUESTION, kind="experiment")
    small = replace(FINE, kind="experiment", arms="models:1/small,drafts:1/off")
    alone = replace(small, arms="forced:models:1/small", is_alone=True)
    chain = replace(small, arms="models:1/chain,drafts:1/on", answer="either's")
    assert broken(judge_answers([question], [small, alone, chain])) == []
    other = replace(small, arms="models:1/small,drafts:1/on", answer="5")
    assert broken(judge_answers([question], [small, alone, other])) == ["an"]


@pytest.mark.parametrize(
    ("kind", "answer", "finish", "seen"),
    [
        ("schema", '{"a": 1}', "stop", []),
        ("schema", '{"a": "x"}', "stop", ["an"]),
        ("schema", '{"a": 1', "stop", ["an"]),
        ("schema", '{"a": 1', "length", []),
        ("tools", '[{"name": "act", "arguments": "{\\"a\\": 1}"}]', "tool_calls", []),
        ("tools", '[{"name": "act", "arguments": "{}"}]', "tool_calls", ["an"]),
        ("tools", "[]", "stop", ["an"]),
    ],
)
def test_answers_that_do_not_conform_are_seen(
    kind: Any, answer: str, finish: str, seen: list[str]
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    question = Question(number=0, kind=kind, body={}, schema=schema)
    asked = replace(FINE, kind=kind, answer=answer, finish=finish)
    assert broken(judge_answers([question], [asked, replace(asked, is_alone=True)])) == seen


def test_what_did_not_happen_is_seen() -> None:
    left = replace(FINE, outcome="left")
    escalated = replace(FINE, kind="auto", is_escalated=True)
    assert judge_coverage([FINE, left, escalated], {"chat", "auto"}).holds
    assert judge_coverage([FINE, left], {"chat", "auto"}).wrong == "auto, escalations"
    assert judge_coverage([FINE, escalated], {"chat", "auto"}).wrong == "clients that left"


IN_ARMS = [
    replace(FINE, request_id=f"r{number}", kind="experiment", user=user, arms=f"models:1/{arm}")
    for number, (user, arm) in enumerate([("u1", "small"), ("u1", "small"), ("u2", "large")])
]
BOOKED = {each.request_id: each.arms for each in IN_ARMS}
COUNTED = {
    ("models", "small"): ArmCount(num_requests=3, num_answered=2),
    ("models", "large"): ArmCount(num_requests=1, num_answered=1),
}


def test_experiments_that_are_wrong_are_seen() -> None:
    assert broken(judge_experiments(IN_ARMS, BOOKED, COUNTED)) == []
    moved = replace(IN_ARMS[0], arms="models:1/large")
    found = judge_experiments([moved, *IN_ARMS[1:]], BOOKED | {"r0": moved.arms}, COUNTED)
    assert [each.rule.split()[1] for each in found if not each.holds] == ["user", "experiment's"]
    assert broken(judge_experiments(IN_ARMS, BOOKED | {"r2": ""}, COUNTED)) == ["the"]
    few = COUNTED | {("models", "small"): ArmCount(num_requests=3, num_answered=1)}
    assert broken(judge_experiments(IN_ARMS, BOOKED, few)) == ["an"]
    many = COUNTED | {("models", "small"): ArmCount(num_requests=3, num_answered=3)}
    assert broken(judge_experiments(IN_ARMS, BOOKED, many)) == ["an"]
    left = replace(FINE, kind="experiment", outcome="left", user="u1")  # answered all the same
    assert broken(judge_experiments([*IN_ARMS, left], BOOKED, many)) == []
    idle = COUNTED | {("models", "chain"): ArmCount(num_requests=0, num_answered=0)}
    assert broken(judge_experiments(IN_ARMS, BOOKED, idle)) == ["an"]  # an arm proves nothing


def test_arms_are_read_from_labels() -> None:
    label = "models:2/small,drafts:1/off"
    assert arms_of(label) == {"models": "small", "drafts": "off"}
    assert arms_of("forced:models:1/large") == {"models": "large"}
    assert arms_of("others:1/small") == arms_of("") == {}


@pytest.mark.slow
def test_counts_are_those_of_the_experiments_report(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'o.db'}"
    create_experiments(url)
    measures = ArmMeasures()
    endings: list[RequestEnding] = ["answered", "answered", "answered", "failed", "refused"]
    for place, ending in enumerate([*endings, "cancelled"]):
        arm = ArmRef(experiment="models", version=1, arm="small", unit_bucket=place)
        one = RequestOutcome(
            request_id=f"r{place}", client_request_id="", ending=ending, arms=(arm,)
        )
        measures.observe(one)
    with closing(Database(url)) as database:
        MeasureStore(database).add("w", 1, measures.take(), 0.0)
    counts = read_reports(url, {("models", "small"): 3})
    assert counts["models", "small"] == ArmCount(num_requests=6, num_answered=3)
    assert counts["drafts", "on"] == ArmCount(num_requests=0, num_answered=0)


def written(database: Path, rows: list[tuple[str, str, int, int, int, str]]) -> Path:
    """Write a ledger of the large model's rows; the last two: tokens discarded, and the outcome."""
    with sqlite3.connect(database) as connection:
        connection.execute(
            "CREATE TABLE ledger (client_request_id, kind, num_charged_tokens, "
            "num_completion_tokens, num_discarded_tokens, outcome, tier DEFAULT 'large')"
        )
        names = "client_request_id, kind, num_charged_tokens, num_completion_tokens, "
        names += "num_discarded_tokens, outcome"
        connection.executemany(f"INSERT INTO ledger ({names}) VALUES (?, ?, ?, ?, ?, ?)", rows)
    connection.close()
    return database


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
    database = written(tmp_path / "o.db", [(*each, 0, "answered") for each in charges])
    left = replace(FINE, request_id="left", outcome="left", total_tokens=None)
    assert broken(judge_books(database, [FINE, left], counted)) == seen


@pytest.mark.parametrize(("counted", "seen"), [(9, []), (15, []), (16, ["the"]), (8, ["the"])])
def test_what_came_of_a_failed_answer_may_be_counted(
    tmp_path: Path, counted: int, seen: list[str]
) -> None:
    rows = [("a", "answer", 30, 9, 0, "answered"), ("b", "answer", 0, 6, 6, "failed")]
    failed = replace(FINE, request_id="b", outcome="ended in an error", total_tokens=None)
    database = written(tmp_path / "o.db", rows)
    assert broken(judge_books(database, [FINE, failed], counted)) == seen


def test_what_is_left_is_seen() -> None:
    assert broken(judge_rest(IDLE, IDLE)) == []
    assert broken(judge_rest(IDLE, IDLE | {"outrider_limit_reservations": 1.0})) == ["no"]
    assert broken(judge_rest(IDLE, IDLE | {"outrider_ledger_dropped_rows_total": 1.0})) == ["no"]
    assert broken(judge_rest(IDLE, IDLE | {"outrider_event_loop_tasks": 30.0})) == ["no"]
    assert broken(judge_rest(IDLE, {})) == ["no"]  # a metric of another name proves nothing


def test_growth_is_seen() -> None:
    flat = [
        Sample(at_s=at, gateway_bytes=200 << 20, engine_bytes=500 << 20, num_files=30)
        for at in range(50)
    ]
    assert broken(judge_growth(flat)) == []
    grown = [replace(each, gateway_bytes=(200 + 4 * int(each.at_s)) << 20) for each in flat]
    assert broken(judge_growth(grown)) == ["memory"]


def test_open_files_are_seen(tmp_path: Path) -> None:
    database = tmp_path / "outrider.db"
    before = open_files(os.getpid())
    with ExitStack() as stack:
        opened = [stack.enter_context(database.open("w")) for _ in range(4)]
        pooled = open_files(os.getpid())
        assert pooled[str(database)] == len(opened)
        assert not judge_files(before, pooled, database).wrong
        stack.enter_context(database.open())
        assert (
            "5 more of outrider.db" in judge_files(before, open_files(os.getpid()), database).wrong
        )
        sockets = [stack.enter_context(socket.socket()) for _ in range(5)]
        found = judge_files(before, open_files(os.getpid()), tmp_path / "other.db").wrong
        assert f"{len(sockets)} more of socket" in found


def test_metrics_are_summed_over_their_labels() -> None:
    text = '# HELP a b\na{tier="x"} 1.0\na{tier="y"} 2.5\nb 3\n'
    assert read_metrics(text) == {"a": 3.5, "b": 3.0}


@pytest.mark.slow
def test_questions_are_the_same_for_a_seed_and_have_all_kinds() -> None:
    questions = make_questions(80, 1)
    assert questions == make_questions(80, 1)
    assert questions != make_questions(80, 2)
    assert len({each.kind for each in questions}) == 7
    for each in questions:
        if each.kind in ("schema", "tools"):
            assert each.schema is not None
            jsonschema_rs.validator_for(dict(each.schema))


def test_the_ledger_tells_the_arms_of_what_it_charged(tmp_path: Path) -> None:
    database = tmp_path / "o.db"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE ledger (client_request_id, arm, num_charged_tokens)")
        rows = [("a", "models:1/small", 3), ("a", "models:1/small", 0), ("b", "", 4), ("c", "x", 0)]
        connection.executemany("INSERT INTO ledger VALUES (?, ?, ?)", rows)
    connection.close()
    assert answered_arms(database) == {"a": "models:1/small", "b": ""}


@pytest.mark.slow_cases
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
    command = [sys.executable, "-m", "benchmarks.chaos.chaos", "--minutes", "60"]
    ran = subprocess.run(
        [*command, "--results", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
