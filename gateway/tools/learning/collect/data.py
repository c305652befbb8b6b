"""Files of `outrider router collect`: questions with checks in, labelled rows out.

A question is a JSON line with `prompt` or `messages`, optionally `tools`, then `expected` and
`check`: a kind of gateway/tools/learning/collect/checkers.py, or `{"kind": ..., "schema": ...}`. A
labelled row is a JSON line that `outrider router train` reads (fields: `LabelledRow`).
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from outrider.gateway.answering.text.tools import plan_tools
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.tools.learning.collect.checkers import (
    AnswerCheck,
    AnswerCheckKind,
    UncheckableError,
    make_check,
)

_DIGEST_DIGITS: Final = 16
_MAX_LINE_BYTES: Final = 8 * 2**20


class CollectError(Exception):
    """The data cannot be used, or collecting cannot go on. The message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectQuestion:
    """One prompt to be answered by both tiers, and how its answers are checked."""

    digest: str
    """Tells it from others: of the messages, the tools and the check."""
    request: ChatRequest
    check: AnswerCheck
    family: str | None = None
    """The data's own word, handed on."""
    difficulty: int | None = None
    """The data's own figure, handed on."""

    @property
    def prompt(self) -> str:
        """The text that a router sees: the last user message."""
        return self.request.last_user_text


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledRow:
    """A question as both tiers answered it."""

    id: str
    prompt: str
    messages: Sequence[Mapping[str, Any]] | None
    """The conversation, where it is more than the prompt."""
    weak_correct: int
    strong_correct: int
    weak_logprobs: Sequence[float]
    """Of the small model's tokens."""
    hidden_state: str | None
    """Of the prompt's last token in the small model: base64 of little-endian float32."""
    prompt_tokens: int
    weak_tokens: int
    strong_tokens: int
    weak_s: float
    """From submission to the last token, in a batch of one tier alone."""
    strong_s: float
    """As `weak_s`."""
    weak_answer: str
    strong_answer: str
    pair: str | None
    """The checkpoints' fingerprints, small and large; None where they are unknown."""
    small_weights: str | None
    """The type that the small model's products computed with."""
    family: str | None
    difficulty: int | None

    def to_line(self) -> str:
        """One JSON line; fields that are None are left out."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(fields, ensure_ascii=False) + "\n"


def read_questions(
    path: Path, *, default_check: AnswerCheckKind | None = None, limit: int | None = None
) -> list[CollectQuestion]:
    """The first `limit` questions of a .jsonl file; of equal ones only the first is taken.

    `default_check` is the kind for rows that name none. Raises CollectError naming file, line and
    what is wrong with it.
    """
    if path.suffix.lower() not in (".jsonl", ".ndjson"):
        raise CollectError(f"{path}: must end in .jsonl, one JSON object a line")
    if not path.is_file():
        raise CollectError(f"{path}: no such file")
    found: dict[str, CollectQuestion] = {}
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and len(found) >= limit:
                    break
                if line.strip():
                    question = _question(line, default_check, f"{path}, line {number}")
                    found.setdefault(question.digest, question)
    except UnicodeDecodeError as error:
        raise CollectError(f"{path}: not UTF-8 ({error})") from error
    if not found:
        raise CollectError(
            f"{path}: holds no questions; write a JSON object a line, such as "
            '{"prompt": "What is 17 + 25?", "expected": "42", "check": "regex"}'
        )
    return list(found.values())


def _question(line: str, default_check: AnswerCheckKind | None, place: str) -> CollectQuestion:
    row = _json_object(line, place)
    messages = row.get("messages")
    if messages is None:
        prompt = row.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise CollectError(f"{place}: prompt (or messages) is missing or empty")
        messages = [{"role": "user", "content": prompt}]
    wanted = row.get("check", default_check)
    if wanted is None:
        raise CollectError(f"{place}: has no check; give each row one, or name one with --check")
    given = wanted if isinstance(wanted, Mapping) else {"kind": wanted}
    try:
        request = ChatRequest.model_validate(
            {"model": "auto", "messages": messages, "tools": row.get("tools") or None}
        )
        plan_tools(request)
        check = make_check(str(given.get("kind")), row.get("expected"), given.get("schema"))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise CollectError(f"{place}: {field}: {first['msg'].lower()}") from error
    except (UncheckableError, BadRequestError) as error:
        raise CollectError(f"{place}: {error}") from error
    if not request.last_user_text.strip():
        raise CollectError(f"{place}: the last message of the user is empty")
    return CollectQuestion(
        digest=_digest([messages, row.get("tools"), check.kind, check.expected]),
        request=request,
        check=check,
        family=row["family"] if isinstance(row.get("family"), str) else None,
        difficulty=row["difficulty"] if isinstance(row.get("difficulty"), int) else None,
    )


def _digest(parts: object) -> str:
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(canonical).hexdigest()[:_DIGEST_DIGITS]


def _json_object(line: str, place: str) -> dict[str, Any]:
    if len(line) > _MAX_LINE_BYTES:
        raise CollectError(f"{place}: a line of {len(line)} characters is too long")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CollectError(f"{place}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise CollectError(f"{place}: must be a JSON object")
    return row


class LabelFile:
    """The file of labelled rows, appended to line by line; what is in it already is not redone."""

    def __init__(self, path: Path, *, pair: str | None, small_weights: str | None = None) -> None:
        """Read what an interrupted run left, and cut off a line that it did not finish.

        Raises CollectError where the file holds something else, or rows of another pair of models
        or another width of the small one.
        """
        if path.suffix.lower() not in (".jsonl", ".ndjson"):
            raise CollectError(f"{path}: must end in .jsonl")
        self._path = path
        self.labels: dict[str, tuple[int, int]] = {}
        """Correctness of the small and the large model's answer (0 or 1), by digest."""
        if path.exists():
            self._read(pair, small_weights)

    def _read(self, pair: str | None, small_weights: str | None) -> None:
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.decode(errors="replace").split("\n")[:-1], start=1):
            place = f"{self._path}, line {number}"
            row = _json_object(line, place)
            names = ("weak_correct", "strong_correct")
            labels = [row.get(name) for name in names]
            if not isinstance(row.get("id"), str) or any(label not in (0, 1) for label in labels):
                raise CollectError(
                    f"{place}: not a row of `outrider router collect`; name another file with --out"
                )
            if row.get("pair") != pair:
                raise CollectError(
                    f"{place}: collected with other models (pair {row.get('pair')}, now {pair}); "
                    "name another file with --out"
                )
            if row.get("small_weights", small_weights) != small_weights:
                raise CollectError(
                    f"{place}: collected with a small model in {row['small_weights']}, now "
                    f"{small_weights}; name another file with --out"
                )
            self.labels[row["id"]] = (row["weak_correct"], row["strong_correct"])
        if len(whole) < len(content):
            os.truncate(self._path, len(whole))

    def missing(self, questions: Iterable[CollectQuestion]) -> list[CollectQuestion]:
        """Those that have no row yet, in order."""
        return [question for question in questions if question.digest not in self.labels]

    def append(self, rows: Sequence[LabelledRow]) -> None:
        """Write rows in one piece: what interrupts a run leaves at most one line unfinished."""
        text = "".join(row.to_line() for row in rows)
        with self._path.open("ab", buffering=0) as file:
            file.write(text.encode())
            os.fsync(file.fileno())
        self.labels |= {row.id: (row.weak_correct, row.strong_correct) for row in rows}
