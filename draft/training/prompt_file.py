"""Prompts for a drafter from a file: JSON lines, CSV or plain text."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_JSON_LINES: Final = (
    'a JSON object a line, such as {"prompt": "What is 17 + 25?"} or {"messages": [...]}'
)
_CONTENTS: Final = {
    ".jsonl": _JSON_LINES,
    ".ndjson": _JSON_LINES,
    ".csv": "a line of column names, such as prompt,answer, and a row for each prompt",
    ".txt": "a prompt a line",
}
SUFFIXES: Final = tuple(_CONTENTS)
_ANSWER_FIELDS: Final = ("answer", "completion", "response")


class PromptDataError(ValueError):
    """The data cannot be used. The message names file, row and what it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One prompt: either chat messages or plain text to be continued, and its answer if given."""

    messages: tuple[tuple[str, str], ...] = ()
    """(role, content) pairs; the last one is not the assistant's."""
    text: str = ""
    """As it stands."""
    answer: str | None = None


def read_prompts(path: Path) -> list[PromptRow]:
    """Read .jsonl, .ndjson, .csv (columns as the JSON fields) or .txt (a prompt a line), UTF-8.

    A row has `messages` (a chat; a last message of the assistant is its answer), `prompt` (the
    user's one message, with `answer`, `completion` or `response` if known) or `text` (to be
    continued without a chat template). Other fields are ignored.

    Raises PromptDataError for a missing or unreadable file, a row without a prompt, no rows.
    """
    readers = {".csv": _csv_rows, ".jsonl": _jsonl_rows, ".ndjson": _jsonl_rows, ".txt": _lines}
    reader = readers.get(path.suffix.lower())
    if not path.is_file():
        raise PromptDataError(f"{path}: no such file")
    if reader is None:
        raise PromptDataError(f"{path}: the name must end in one of {', '.join(SUFFIXES)}")
    try:
        rows = [_prompt_row(row, place) for place, row in reader(path)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PromptDataError(f"{path}: {error}") from error
    if not rows:
        raise PromptDataError(f"{path} is empty; write {_CONTENTS[path.suffix.lower()]}")
    return rows


def _csv_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=1):
            yield f"{path}, row {number}", row


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise PromptDataError(f"{place}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise PromptDataError(f"{place}: must be a JSON object")
            yield place, row


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}, line {number}", {"prompt": line.strip()}


def _prompt_row(row: Mapping[str, Any], place: str) -> PromptRow:
    if row.get("messages"):
        return _chat_row(row["messages"], place)
    answer = next((row[name] for name in _ANSWER_FIELDS if _is_text(row.get(name))), None)
    if _is_text(row.get("prompt")):
        return PromptRow(messages=(("user", row["prompt"]),), answer=answer)
    if _is_text(row.get("text")):
        return PromptRow(text=row["text"], answer=answer)
    found = ", ".join(sorted(str(name) for name in row)) or "nothing"
    raise PromptDataError(f"{place}: no messages, prompt or text; it has {found}")


def _chat_row(messages: Any, place: str) -> PromptRow:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise PromptDataError(f"{place}: messages must be a list")
    turns: list[tuple[str, str]] = []
    for message in messages:
        is_turn = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_turn or not isinstance(message.get("content"), str):
            raise PromptDataError(f"{place}: each message needs a role and a content, both text")
        turns.append((message["role"], message["content"]))
    answer = turns.pop()[1] if turns[-1][0] == "assistant" else None
    if not any(role == "user" for role, _ in turns):
        raise PromptDataError(f"{place}: messages hold no message of the user")
    return PromptRow(messages=tuple(turns), answer=answer)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
