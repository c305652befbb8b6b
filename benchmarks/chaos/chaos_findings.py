"""Checks of chaos.py: answers, ledger, experiments, leftovers, memory of a gateway."""

import contextlib
import json
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.chaos.chaos_experiments import ONE_TEXT_ARMS, Counts, arms_of, count_answers
from benchmarks.chaos.chaos_questions import Question
from benchmarks.chaos.chaos_traffic import BAD, Exchange

_MOST_GROWTH: Final = 1.15
_SLACK_BYTES: Final = 48 << 20
_GENERATED: Final = "outrider_generation_tokens_total"
_AT_REST: Final = (
    "outrider_num_requests_running",
    "outrider_num_requests_waiting",
    "outrider_kv_cache_usage_perc",
    "outrider_limit_reservations",
    "outrider_ledger_pending_rows",
    "outrider_http_body_bytes",
)
_TASKS: Final = "outrider_event_loop_tasks"
_SPARE_TASKS: Final = 4  # of loops that wait and refresh now and then
_SPARE_FILES: Final = 4
_POOLED: Final = 4
"""Connections to the database that the gateway keeps open, at most."""
_LOST: Final = "outrider_ledger_dropped_rows_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The gateway's and its engine's memory and open files at a moment, seconds since the begin."""

    at_s: float
    gateway_bytes: int
    engine_bytes: int
    num_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One rule, and what was found: `wrong` says what is not as it has to be, or is empty."""

    rule: str
    wrong: str = ""

    @property
    def holds(self) -> bool:
        """True where nothing is wrong."""
        return not self.wrong


def read_metrics(text: str) -> dict[str, float]:
    """Return the sums of metrics over their labels, by name."""
    sums: Counter[str] = Counter()
    for name, value in re.findall(r"^(\w+)(?:\{[^}]*\})? (\S+)$", text, flags=re.MULTILINE):
        sums[name] += float(value)  # type: ignore[assignment]
    return dict(sums)


def judge_answers(questions: Sequence[Question], exchanges: Sequence[Exchange]) -> list[Finding]:
    """Judge how requests ended, and whether what was answered is what the question has alone."""
    bad = [each for each in exchanges if each.outcome in BAD]
    words = "; ".join(
        f"{each.request_id} {each.kind} {each.outcome} {each.status} {each.note[:120]}"
        for each in bad[:5]
    )
    return [
        Finding(
            rule="every request ends, in an answer or in an error as the API promises",
            wrong=f"{len(bad)} do not: {words}" if bad else "",
        ),
        _judge_texts(questions, exchanges),
        _judge_schemas(questions, exchanges),
    ]


def _judge_texts(questions: Sequence[Question], exchanges: Sequence[Exchange]) -> Finding:
    """Compare texts by question and, in an experiment, by the model's arm."""
    named = {each.number for each in questions if each.has_one_text}
    texts: dict[tuple[int, str], Counter[str]] = {}
    alone: dict[tuple[int, str], str] = {}
    for each in exchanges:
        arm = arms_of(each.arms).get("models", "")
        if each.outcome != "answered" or not (each.question in named or arm in ONE_TEXT_ARMS):
            continue
        texts.setdefault((each.question, arm), Counter())[each.answer] += 1
        if each.is_alone:
            alone[each.question, arm] = each.answer
    wrong = {place: found for place, found in texts.items() if set(found) != {alone.get(place)}}
    words = "; ".join(
        f"question {number} {arm}: alone {alone.get((number, arm))!r}, in all "
        f"{dict(found.most_common(3))}"
        for (number, arm), found in list(wrong.items())[:3]
    )
    return Finding(
        rule="an answer is the one that the question has alone",
        wrong=f"{len(wrong)} of {len(texts)} questions have others: {words}" if wrong else "",
    )


def _judge_schemas(questions: Sequence[Question], exchanges: Sequence[Exchange]) -> Finding:
    """Hold answers that came to their own end to the schema that was asked for."""
    from jsonschema_rs import validator_for

    validators = {
        each.number: validator_for(dict(each.schema)) for each in questions if each.schema
    }
    wrong = [
        f"{each.request_id} question {each.question}: {each.answer[:200]}"
        for each in exchanges
        if each.outcome == "answered" and each.question in validators and each.finish != "length"
        and not _conforms(each, validators[each.question].is_valid)
    ]  # fmt: skip
    return Finding(
        rule="an answer and a tool's arguments conform to their schema",
        wrong=f"{len(wrong)} do not: {'; '.join(wrong[:3])}" if wrong else "",
    )


def _conforms(exchange: Exchange, is_valid: Callable[[Any], bool]) -> bool:
    try:
        if exchange.kind != "tools":
            return is_valid(json.loads(exchange.answer))
        calls = json.loads(exchange.answer)
        return bool(calls) and all(is_valid(json.loads(call["arguments"])) for call in calls)
    except (ValueError, TypeError, KeyError):
        return False


def judge_coverage(exchanges: Sequence[Exchange], kinds: Collection[str]) -> Finding:
    """Judge whether the run had what it is about: what did not happen was not tested."""
    answered = [each for each in exchanges if each.outcome == "answered" and not each.is_alone]
    missing = sorted(set(kinds) - {each.kind for each in answered})
    if not any(each.is_escalated for each in answered):
        missing.append("escalations")
    if not any(each.outcome == "left" for each in exchanges):
        missing.append("clients that left")
    return Finding(
        rule="answers of every kind, escalations and clients that left are among them",
        wrong=", ".join(missing),
    )


def judge_experiments(
    exchanges: Sequence[Exchange], ledger_arms: Mapping[str, str], counts: Counts
) -> list[Finding]:
    """Judge that users stay in their arm, and that client, ledger and report count the same.

    `ledger_arms`: of answered requests, by the request's id. A client that left may have been
    answered in full, and none was told its arm.
    """
    users: dict[str, set[str]] = {}
    for each in exchanges:
        if each.user and (arm := arms_of(each.arms).get("models")):
            users.setdefault(each.user, set()).add(arm)
    moved = {user: sorted(arms) for user, arms in users.items() if len(arms) > 1}
    answered = [each for each in exchanges if each.outcome == "answered"]
    differing = [
        f"{each.request_id} {each.arms!r}, ledger {ledger_arms.get(each.request_id)!r}"
        for each in answered
        if ledger_arms.get(each.request_id) != each.arms
    ]
    told = count_answers([each.arms for each in answered])
    num_left = sum(each.outcome == "left" for each in exchanges)
    off = [
        f"{name}/{arm}: {told[name, arm]} answered, {num_left} left, report {count}"
        for (name, arm), count in counts.items()
        if not 0 < told[name, arm] <= count.num_answered <= told[name, arm] + num_left
        or count.num_requests < count.num_answered
    ]
    missing = [place for place in told if place not in counts]
    return [
        Finding(
            rule="a user stays in the arm of an experiment",
            wrong=f"{len(moved)} of {len(users)} moved: {dict(list(moved.items())[:3])}"
            if moved
            else "",
        ),
        Finding(
            rule="the ledger has the arm that the client was told",
            wrong=f"{len(differing)} differ: {'; '.join(differing[:3])}" if differing else "",
        ),
        Finding(
            rule="an experiment's report counts the answers of each arm",
            wrong="; ".join([*off, *(f"{place} is missing" for place in missing)]),
        ),
    ]


def answered_arms(database: Path) -> dict[str, str]:
    """Return the arms of answered requests that the ledger has, by the client's id of them."""
    with sqlite3.connect(database) as connection:
        rows = connection.execute(
            "SELECT client_request_id, MAX(arm) FROM ledger WHERE num_charged_tokens > 0 "
            "GROUP BY client_request_id"
        ).fetchall()
    return dict(rows)


def judge_books(database: Path, exchanges: Sequence[Exchange], counted: float) -> list[Finding]:
    """Judge the ledger: what was answered was charged once, as its usage says.

    `counted`: tokens of local models in answers, by the gateway's counter. That counts what a
    client that left was sent, the ledger what was computed for it; and what came of an answer that
    failed, which the ledger discards.
    """
    with sqlite3.connect(database) as connection:
        rows = connection.execute(
            "SELECT client_request_id, SUM(num_charged_tokens), "
            "SUM(CASE WHEN tier IN ('small', 'large') AND kind != 'cached' "
            "THEN num_completion_tokens - num_discarded_tokens ELSE 0 END), "
            "SUM(num_charged_tokens > 0 AND kind != 'continuation'), "
            "SUM(num_charged_tokens > 0 AND kind = 'continuation'), "
            "SUM(CASE WHEN tier IN ('small', 'large') AND outcome = 'failed' "
            "THEN num_discarded_tokens ELSE 0 END) "
            "FROM ledger GROUP BY client_request_id"
        ).fetchall()
    charges = {name: (tokens, *parts) for name, tokens, _, *parts, _ in rows}
    wrong = [
        f"{each.request_id} {each.kind} usage {each.total_tokens}, "
        f"charged {charges.get(each.request_id)}"
        for each in exchanges
        if each.outcome == "answered" and not _is_charged_once(each, charges.get(each.request_id))
    ]
    left = {each.request_id for each in exchanges if each.outcome == "left"}
    most = sum(tokens + lost for _, _, tokens, *_, lost in rows)
    least = sum(tokens for name, _, tokens, *_ in rows if name not in left)
    return [
        Finding(
            rule="the ledger charges each answer once, as its usage says",
            wrong=f"{len(wrong)} differ: {'; '.join(wrong[:5])}" if wrong else "",
        ),
        Finding(
            rule="the ledger's tokens are those that the gateway counted",
            wrong="" if least <= counted <= most else f"{least} to {most}, {counted:.0f} counted",
        ),
    ]


def _is_charged_once(exchange: Exchange, charge: tuple[int, int, int] | None) -> bool:
    """Return whether a charge is right: tokens, rows with a prompt, rows that continue another.

    The usage of an answer that another server continued is that of its end.
    """
    if charge is None:
        return False
    tokens, num_prompts, num_continuations = charge
    return num_prompts == 1 and (num_continuations > 0 or tokens == exchange.total_tokens)


def judge_rest(before: Mapping[str, float], after: Mapping[str, float]) -> list[Finding]:
    """Judge what is left when all clients have gone; `before`: metrics of an idle start."""
    left = [f"{name} {after[name]:g}" for name in _AT_REST if after.get(name, 0.0) != 0.0]
    missing = [name for name in (*_AT_REST, _LOST, _GENERATED, _TASKS) if name not in after]
    first, last = (each.get(_TASKS, 0.0) for each in (before, after))
    if last > first + _SPARE_TASKS:
        left.append(f"{first:g} tasks became {last:g}")
    lost = after.get(_LOST, 0.0) - before.get(_LOST, 0.0)
    return [
        Finding(
            rule="no request, block, reservation, body or task is left",
            wrong=", ".join([*left, *(f"{name} is missing" for name in missing)]),
        ),
        Finding(rule="no row of the ledger is lost", wrong=f"{lost:g} are" if lost else ""),
    ]


def judge_growth(samples: Sequence[Sample]) -> list[Finding]:
    """Judge memory in the last fifth of the samples against the second one."""
    fifth = max(len(samples) // 5, 1)
    early, late = samples[fifth : 2 * fifth] or samples, samples[-fifth:]
    findings = []
    for name, of in (
        ("the gateway", lambda sample: sample.gateway_bytes),
        ("the engine", lambda sample: sample.engine_bytes),
    ):
        before, after = (median(map(of, part)) for part in (early, late))
        grows = after > before * _MOST_GROWTH + _SLACK_BYTES
        findings.append(
            Finding(
                rule=f"memory of {name} stays",
                wrong=f"{before / 2**20:.0f} MB became {after / 2**20:.0f}" if grows else "",
            )
        )
    return findings


def process_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 where it has gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * 4096


def judge_files(before: Mapping[str, int], after: Mapping[str, int], database: Path) -> Finding:
    """Judge what an idle gateway has open after the traffic against what it had before.

    The database's pool opens connections as they are needed and keeps up to four: that is no leak.
    """
    more = {
        name: number - before.get(name, 0)
        for name, number in after.items()
        if number > (_POOLED if name.startswith(str(database)) else before.get(name, 0))
    }
    wrong = ", ".join(f"{number} more of {Path(name).name}" for name, number in more.items())
    return Finding(
        rule="no file and no connection stays open",
        wrong=wrong if sum(more.values()) > _SPARE_FILES else "",
    )


def open_files(pid: int) -> Counter[str]:
    """Return the files that a process has open, by name; sockets, pipes and the like by kind."""
    names: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                name = os.readlink(descriptor)
                names[name if name.startswith("/") else name.partition(":")[0]] += 1
    return names


def summary(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """Return counts for the results."""
    return {
        "num_requests": len(exchanges),
        "by_outcome": dict(Counter(each.outcome for each in exchanges)),
        "by_kind": dict(Counter(each.kind for each in exchanges)),
        "num_escalated": sum(each.is_escalated for each in exchanges),
        "longest_s": max((each.took_s for each in exchanges), default=0.0),
        "refusals": dict(
            Counter(f"{each.status} {each.note}"[:100] for each in exchanges if each.note)
        ),
    }
