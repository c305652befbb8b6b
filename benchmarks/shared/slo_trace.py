"""Arrivals of a public trace, made to fit a small model, and what came of them."""

import csv
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Literal

TraceClass = Literal["short-chat", "batch"]

DEFAULT_TRACE = Path("traces/azure_2023_conv_first_half.csv")
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request: seconds after the first one, tokens of its prompt and of its answer."""

    at_s: float
    num_prompt: int
    num_answer: int
    trace_class: TraceClass = "short-chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Objectives: of short chats by token, of batch the time from arrival to the end."""

    ttft_s: float
    inter_token_s: float
    batch_end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """When a request's tokens came, in seconds after its arrival; None where none came."""

    trace_class: TraceClass
    ttft_s: float | None
    end_s: float | None
    num_tokens: int

    @property
    def inter_token_s(self) -> float:
        """The mean between two tokens; 0 for a single one."""
        if self.ttft_s is None or self.end_s is None or self.num_tokens < 2:
            return 0.0
        return (self.end_s - self.ttft_s) / (self.num_tokens - 1)

    def meets(self, wanted: Objectives) -> bool:
        """Return whether all of its class's objectives were met."""
        if self.ttft_s is None or self.end_s is None:
            return False
        if self.trace_class == "batch":
            return self.end_s <= wanted.batch_end_s
        return self.ttft_s <= wanted.ttft_s and self.inter_token_s <= wanted.inter_token_s


def find_trace(named: Path) -> Path:
    """The file itself, or under $OUTRIDER_DATA. Raises SystemExit with a sentence."""
    data = os.environ.get("OUTRIDER_DATA")
    candidates = [named, *([Path(data) / named] if data else [])]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    hint = "" if data else " (OUTRIDER_DATA is not set)"
    raise SystemExit(f"--trace {named}: no such file{hint}; nothing was measured.")


def read_trace(path: Path, *, first_s: float) -> list[Arrival]:
    """The first seconds of an Azure trace, in order of time.

    Columns: TIMESTAMP, ContextTokens, GeneratedTokens. Raises SystemExit naming the bad line.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if not set(_COLUMNS) <= set(rows.fieldnames or ()):
            raise SystemExit(f"{path.name}: the first line must name {', '.join(_COLUMNS)}.")
        found = sorted(
            (_parsed(row, f"{path.name}:{rows.line_num}") for row in rows),
            key=lambda arrival: arrival.at_s,
        )
    if not found:
        raise SystemExit(f"{path.name}: there is no request in it.")
    begun_s = found[0].at_s
    shifted = (replace(arrival, at_s=arrival.at_s - begun_s) for arrival in found)
    return [arrival for arrival in shifted if arrival.at_s < first_s]


def _parsed(row: dict[str, str], place: str) -> Arrival:
    try:
        arrival = Arrival(
            at_s=datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(),
            num_prompt=int(row["ContextTokens"]),
            num_answer=int(row["GeneratedTokens"]),
        )
    except (TypeError, ValueError) as error:
        raise SystemExit(f"{place}: {error}") from None
    if arrival.num_prompt < 1 or arrival.num_answer < 1:
        raise SystemExit(f"{place}: a prompt and an answer have at least one token.")
    return arrival


def scaled(arrivals: Sequence[Arrival], *, context: int, rate: float) -> list[Arrival]:
    """Lengths so that the longest request fits into a context, times to a mean rate per second.

    The shape of both stays: all lengths, and all gaps, shrink by one factor each.
    """
    longest = max(arrival.num_prompt + arrival.num_answer for arrival in arrivals)
    shrink = min(context / longest, 1.0)
    span_s = max(arrivals[-1].at_s, 1e-9)
    faster = rate * span_s / len(arrivals)
    return [
        replace(
            arrival,
            at_s=arrival.at_s / faster,
            num_prompt=max(int(arrival.num_prompt * shrink), 1),
            num_answer=max(int(arrival.num_answer * shrink), 1),
        )
        for arrival in arrivals
    ]


def thinned(arrivals: Sequence[Arrival], *, share: float, seed: int) -> list[Arrival]:
    """Each with this chance; the first one always."""
    rng = random.Random(f"thin/{seed}")
    return [arrivals[0], *(one for one in arrivals[1:] if rng.random() < share)]


def classed(arrivals: Sequence[Arrival], *, batch_share: float, seed: int) -> list[Arrival]:
    """Each is batch with this chance, else short chat."""
    rng = random.Random(f"class/{seed}")
    return [
        replace(arrival, trace_class="batch" if rng.random() < batch_share else "short-chat")
        for arrival in arrivals
    ]


def attainment(outcomes: Sequence[Outcome], wanted: Objectives) -> float:
    """The share that met its objectives; NaN of none."""
    if not outcomes:
        return float("nan")
    return sum(outcome.meets(wanted) for outcome in outcomes) / len(outcomes)


def rate_at(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """The highest rate at which a target is attained, from (rate, attainment) by ascending rate.

    Straight lines between the points. None where it is missed from the first point on; the last
    rate where it is never missed.
    """
    if points[0][1] < target:
        return None
    crossings = [
        low_rate + (high_rate - low_rate) * (low - target) / (low - high)
        for (low_rate, low), (high_rate, high) in pairwise(points)
        if low >= target > high
    ]
    return crossings[0] if crossings else points[-1][0]


def prompt_tokens(arrivals: Sequence[Arrival], corpus: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Text for each prompt: cut from a corpus, the next one where the last one ended."""
    start = 0
    for arrival in arrivals:
        start = (start + arrival.num_prompt) % len(corpus)
        tokens = tuple(corpus[start : start + arrival.num_prompt])
        while len(tokens) < arrival.num_prompt:
            tokens += tuple(corpus[: arrival.num_prompt - len(tokens)])
        yield tokens
