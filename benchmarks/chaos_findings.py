"""Checks of `benchmarks.chaos`: answers, ledger, leftovers and memory of a gateway."""

import re
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.chaos_traffic import BAD, Exchange, Question

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
    """Judge how requests ended, and whether each question had one text."""
    bad = [each for each in exchanges if each.outcome in BAD]
    words = "; ".join(
        f"{each.request_id} {each.kind} {each.outcome} {each.status} {each.note[:120]}"
        for each in bad[:5]
    )
    texts: dict[int, Counter[str]] = {}
    named = {each.number for each in questions if each.has_one_text}
    for each in exchanges:
        if each.outcome == "answered" and each.question in named:
            texts.setdefault(each.question, Counter())[each.answer] += 1
    several = {number: found for number, found in texts.items() if len(found) > 1}
    differing = "; ".join(
        f"question {number}: {dict(found.most_common(3))}"
        for number, found in list(several.items())[:3]
    )
    return [
        Finding(
            rule="every request ends, in an answer or in an error as the API promises",
            wrong=f"{len(bad)} do not: {words}" if bad else "",
        ),
        Finding(
            rule="an answer is the one that the question has alone",
            wrong=f"{len(several)} of {len(texts)} questions have several: {differing}"
            if several
            else "",
        ),
    ]


def judge_books(database: Path, exchanges: Sequence[Exchange], counted: float) -> list[Finding]:
    """Judge the ledger: what was answered was charged once, as its usage says.

    counted: tokens of local models in answers, by the gateway's counter. That counts what a client
    that left was sent, the ledger what was computed for it.
    """
    with sqlite3.connect(database) as connection:
        rows = connection.execute(
            "SELECT client_request_id, SUM(num_charged_tokens), "
            "SUM(CASE WHEN tier IN ('small', 'large') AND kind != 'cached' "
            "THEN num_completion_tokens - num_discarded_tokens ELSE 0 END), "
            "SUM(num_charged_tokens > 0 AND kind != 'continuation'), "
            "SUM(num_charged_tokens > 0 AND kind = 'continuation') "
            "FROM ledger GROUP BY client_request_id"
        ).fetchall()
    charges = {name: (tokens, *parts) for name, tokens, _, *parts in rows}
    wrong = [
        f"{each.request_id} {each.kind} usage {each.total_tokens}, "
        f"charged {charges.get(each.request_id)}"
        for each in exchanges
        if each.outcome == "answered" and not _is_charged_once(each, charges.get(each.request_id))
    ]
    left = {each.request_id for each in exchanges if each.outcome == "left"}
    most = sum(tokens for _, _, tokens, *_ in rows)
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
    missing = [name for name in (*_AT_REST, _LOST, _GENERATED) if name not in after]
    lost = after.get(_LOST, 0.0) - before.get(_LOST, 0.0)
    return [
        Finding(
            rule="no request, block, reservation or body is left",
            wrong=", ".join([*left, *(f"{name} is missing" for name in missing)]),
        ),
        Finding(rule="no row of the ledger is lost", wrong=f"{lost:g} are" if lost else ""),
    ]


def judge_growth(samples: Sequence[Sample], idle: tuple[int, int]) -> list[Finding]:
    """Judge memory in the last fifth against the second one; idle: open files before and after."""
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
    first, last = idle
    findings.append(
        Finding(
            rule="no file and no connection stays open",
            wrong=f"{first} open files became {last}" if last > first + 4 else "",
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


def num_open_files(pid: int) -> int:
    """Return how many files, sockets and pipes a process has open."""
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return 0


def summary(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """Return counts for the results."""
    return {
        "num_requests": len(exchanges),
        "by_outcome": dict(Counter(each.outcome for each in exchanges)),
        "by_kind": dict(Counter(each.kind for each in exchanges)),
        "refusals": dict(
            Counter(f"{each.status} {each.note}"[:100] for each in exchanges if each.note)
        ),
    }
