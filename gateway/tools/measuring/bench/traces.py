"""Traces of requests: when each came, how long it was, and which beginnings were shared.

Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens; Patel et al., Splitwise, ISCA 2024) and
Mooncake's JSON lines (timestamp in ms, input_length, output_length, hash_ids; Qin et al., Mooncake,
FAST 2025). Equal hash ids stand for equal blocks of 512 tokens with equal beginnings.
"""

import csv
import gzip
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

MOONCAKE_BLOCK_TOKENS: Final = 512
# Longer silences are named: a replay at a low rate spends its time in them.
_LONG_GAP_S: Final = 60.0
_MOST_TOKENS: Final = 10_000_000
_MOST_BAD_SHOWN: Final = 3
_TIME_NAMES: Final = ("timestamp", "arrival_s", "arrival_time", "time")
_PROMPT_NAMES: Final = ("contexttokens", "input_length", "prompt_tokens", "input_tokens")
_ANSWER_NAMES: Final = ("generatedtokens", "output_length", "completion_tokens", "output_tokens")


class WorkloadError(Exception):
    """Raised for an unreadable or inconsistent workload; the message names place and remedy."""


class BadLineError(Exception):
    """One line of a file is wrong; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """A request. `at_s`: since the first one. `block_ids`: of its prompt, from the beginning."""

    at_s: float
    num_prompt_tokens: int
    num_completion_tokens: int
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in the order of their times. `notes`: what was mended, in words."""

    name: str
    rows: Sequence[TraceRow]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    notes: tuple[str, ...] = ()


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file, gzipped or not, with their numbers; blank ones are left out.

    Raises WorkloadError where it cannot be read.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path} is not UTF-8 text (byte {error.start})") from error
    for number, line in enumerate(io.StringIO(text), start=1):
        if line.strip():
            yield number, line.strip()


def load_trace(path: Path, *, skips_bad: bool = False) -> Trace:
    """Read a trace. Times are put in order and begin at 0.

    `skips_bad`: leave out lines that are wrong instead of refusing the file. Raises WorkloadError.
    """
    lines = list(read_lines(path))
    if not lines:
        raise WorkloadError(f"{path} is empty: a trace needs a request a line")
    is_json = lines[0][1].startswith("{")
    rows, bad = [], []
    parsed = _json_rows(lines) if is_json else _csv_rows(path, lines)
    for number, row in parsed:
        if isinstance(row, str):
            bad.append(f"line {number}: {row}")
        else:
            rows.append(row)
    if bad and not skips_bad:
        shown = "\n".join(bad[:_MOST_BAD_SHOWN])
        more = f"\n… and {len(bad) - _MOST_BAD_SHOWN} more" if len(bad) > _MOST_BAD_SHOWN else ""
        raise WorkloadError(
            f"{path}:\n{shown}{more}\nFix these lines, or skip them with --skip-bad"
        )
    if not rows:
        raise WorkloadError(f"{path} has no request that can be read")
    return _ordered(path, rows, num_bad=len(bad))


def _ordered(path: Path, rows: Sequence[TraceRow], *, num_bad: int) -> Trace:
    """In the order of time, from 0, with notes on what was not as it should be."""
    notes = []
    if num_bad:
        notes.append(f"{num_bad} lines of the trace could not be read and were left out")
    pairs = itertools.pairwise(rows)
    if num_unsorted := sum(later.at_s < earlier.at_s for earlier, later in pairs):
        notes.append(f"the trace is not in the order of time at {num_unsorted} lines: sorted")
    if num_silent := sum(row.num_completion_tokens == 0 for row in rows):
        notes.append(
            f"{num_silent} requests of the trace have an empty answer; one token is requested "
            "instead"
        )
    in_order = sorted(rows, key=lambda row: row.at_s)
    begin_s = in_order[0].at_s
    gap_s = max(
        (later.at_s - row.at_s for row, later in itertools.pairwise(in_order)),
        default=0.0,
    )
    if gap_s > _LONG_GAP_S:
        notes.append(
            f"the trace has gaps, the longest of {gap_s:.0f} s: kept (--max-gap shortens them)"
        )
    moved = tuple(
        TraceRow(
            at_s=row.at_s - begin_s,
            num_prompt_tokens=row.num_prompt_tokens,
            num_completion_tokens=max(1, row.num_completion_tokens),
            block_ids=row.block_ids,
        )
        for row in in_order
    )
    return Trace(name=path.name, rows=moved, notes=tuple(notes))


def close_gaps(trace: Trace, max_gap_s: float) -> Trace:
    """The same with no silence longer than this."""
    rows: list[TraceRow] = []
    closed_s = 0.0
    num_closed = 0
    before_s = 0.0
    for row in trace.rows:
        if (over_s := row.at_s - before_s - max_gap_s) > 0.0:
            closed_s += over_s
            num_closed += 1
        before_s = row.at_s
        rows.append(
            TraceRow(
                at_s=row.at_s - closed_s,
                num_prompt_tokens=row.num_prompt_tokens,
                num_completion_tokens=row.num_completion_tokens,
                block_ids=row.block_ids,
            )
        )
    kept = tuple(note for note in trace.notes if "has gaps" not in note)
    if num_closed:
        kept += (f"{num_closed} gaps of the trace were shortened to {max_gap_s:g} s",)
    return Trace(name=trace.name, rows=rows, block_tokens=trace.block_tokens, notes=kept)


# ---- lines ------------------------------------------------------------------------------------


def _json_rows(lines: Sequence[tuple[int, str]]) -> Iterator[tuple[int, TraceRow | str]]:
    for number, line in lines:
        try:
            document = msgspec.json.decode(line)
            if not isinstance(document, dict):
                raise BadLineError("is not a JSON object")
            row = _row(document, scale=1e-3)
        except (msgspec.DecodeError, BadLineError) as error:
            yield number, str(error)
        else:
            yield number, row


def _csv_rows(path: Path, lines: Sequence[tuple[int, str]]) -> Iterator[tuple[int, TraceRow | str]]:
    names = [name.strip().lower() for name in next(csv.reader([lines[0][1]]))]
    if not (
        set(_TIME_NAMES) & set(names)
        and set(_PROMPT_NAMES) & set(names)
        and set(_ANSWER_NAMES) & set(names)
    ):
        raise WorkloadError(
            f"{path}: its first line names {', '.join(names)}; a trace has TIMESTAMP, "
            "ContextTokens and GeneratedTokens (Azure), or is JSON lines with timestamp, "
            "input_length and output_length (Mooncake)"
        )
    for number, line in lines[1:]:
        try:
            values = next(csv.reader([line]))
            if len(values) != len(names):
                raise BadLineError(f"has {len(values)} values for {len(names)} columns")
            row = _row(dict(zip(names, values, strict=True)), scale=1.0)
        except (csv.Error, BadLineError) as error:
            yield number, str(error)
        else:
            yield number, row


def _row(document: Mapping[str, Any], *, scale: float) -> TraceRow:
    """`scale`: seconds in a unit of a time that is a number. Raises BadLineError."""
    prompt = _whole("prompt", _first(document, _PROMPT_NAMES))
    if prompt == 0:
        raise BadLineError("a prompt needs at least one token")
    return TraceRow(
        at_s=_time_s(_first(document, _TIME_NAMES), scale),
        num_prompt_tokens=prompt,
        num_completion_tokens=_whole("answer", _first(document, _ANSWER_NAMES)),
        block_ids=_ids(document.get("hash_ids", [])),
    )


def _first(document: Mapping[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        if name in document:
            return document[name]
    raise BadLineError(f"has none of {', '.join(names)}")


def _whole(what: str, value: Any) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise BadLineError(f"the {what}'s length is {value!r}, not a number") from None
    if not 0.0 <= number <= _MOST_TOKENS or number != int(number):
        raise BadLineError(f"the {what}'s length is {value}, not from 0 to {_MOST_TOKENS}")
    return int(number)


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise BadLineError("hash_ids is not a list of whole numbers")
    return tuple(value)


def _time_s(value: Any, scale: float) -> float:
    """A number, or a date, which is one of UTC where it names no zone."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadLineError(f"the time is {value!r}")
    try:
        number = float(value)
    except ValueError:
        pass
    else:
        if not abs(number) < 1e15:  # not a number, too
            raise BadLineError(f"the time is {value}")
        return number * scale
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        raise BadLineError(f"the time is {value!r}, neither a number nor a date") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
