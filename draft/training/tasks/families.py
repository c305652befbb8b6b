"""Tasks whose answers a program can check: the small world in which the shipped pair is competent.

Nineteen families, each with a difficulty dial from 1 to 4. An answer is worked step by step in one
canonical style, so that greedy decoding has one right continuation, and ends in a line such as
`Answer: 42.` (small talk has no steps and is its own answer, so is a tool call). Prompts vary in
wording, so that a router can learn difficulty from text alone.
"""

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from outrider.draft.training.tasks.base import CheckKind, Maker, Task, dressed
from outrider.draft.training.tasks.facts import FACT_FAMILIES
from outrider.draft.training.tasks.language import LANGUAGE_FAMILIES
from outrider.draft.training.tasks.numbers import NUMBER_FAMILIES
from outrider.draft.training.tasks.tool_calls import TOOL_FAMILIES
from outrider.draft.training.tasks.turns import TURN_FAMILIES

__all__ = [
    "DIFFICULTIES",
    "FAMILIES",
    "PLAIN_FAMILIES",
    "CheckKind",
    "Split",
    "Task",
    "check",
    "expected_by",
    "generate",
    "is_right",
    "split_of",
    "stream",
]

Split = Literal["train", "heldout"]

_MAKERS: dict[str, Maker] = {
    **NUMBER_FAMILIES,
    **LANGUAGE_FAMILIES,
    **FACT_FAMILIES,
    **TURN_FAMILIES,
    **TOOL_FAMILIES,
}

FAMILIES: tuple[str, ...] = tuple(_MAKERS)
# One prompt of a few hundred tokens at most: no long text, no history, no tools.
PLAIN_FAMILIES: tuple[str, ...] = tuple(
    family for family in FAMILIES if family not in ("passage", *TURN_FAMILIES, *TOOL_FAMILIES)
)
DIFFICULTIES: tuple[int, ...] = (1, 2, 3, 4)

# One prompt in this many is held out.
_HELDOUT_MODULUS = 20


def generate(family: str, difficulty: int, rng: random.Random) -> Task:
    """Draw one task; raises ValueError for an unknown family or difficulty."""
    if family not in _MAKERS:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
    if difficulty not in DIFFICULTIES:
        raise ValueError(f"difficulty must be one of {DIFFICULTIES}, not {difficulty}")
    return dressed(_MAKERS[family](difficulty, rng), family, difficulty, rng)


def split_of(prompt: str) -> Split:
    """The split a prompt (a task's `split_key`) belongs to, by its hash: none is ever in both.

    The *wording* is held out, not the facts: a sum of two one-digit numbers seen in training can
    come back in another wording. From three digits on, almost every held-out sum is new.
    """
    digest = hashlib.sha256(prompt.encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") % _HELDOUT_MODULUS == 0 else "train"


def stream(
    seed: int,
    split: Split,
    families: Sequence[str] = PLAIN_FAMILIES,
    difficulties: Sequence[int] = DIFFICULTIES,
) -> Iterator[Task]:
    """Endless tasks of one split, family and difficulty drawn uniformly; same seed, same tasks."""
    rng = random.Random(f"{seed}/{split}")
    while True:
        task = generate(rng.choice(families), rng.choice(difficulties), rng)
        if split_of(task.split_key) == split:
            yield task


def check(task: Task, answer_text: str) -> bool:
    """Return whether a model's answer is right; the steps are not checked."""
    return is_right(answer_text, task.kind, expected_by(task))


def expected_by(task: Task) -> str:
    """Return the expected text for `is_right`: a pattern for `Answer: X.`, else the task's own."""
    return rf"^Answer: {re.escape(task.expected)}\.?$" if task.kind == "regex" else task.expected


def is_right(answer_text: str, kind: CheckKind, expected: str) -> bool:
    """Compare an answer by one of the four exact rules.

    exact: the stripped answer equals `expected`. regex: `expected` matches the whole last line.
    json: the last line, after an optional `Answer:`, parses to what `expected` parses to.
    tool_call: the answer holds one hermes call whose name and arguments equal the expected JSON's.
    """
    text = answer_text.strip()
    if kind == "exact":
        return text == expected
    last_line = text.rpartition("\n")[2].strip()
    if kind == "regex":
        return re.fullmatch(expected, last_line) is not None
    if kind == "json":
        return _is_same_json(last_line.removeprefix("Answer:"), expected)
    calls = _TOOL_CALL.findall(text)
    return len(calls) == 1 and _is_same_json(calls[0], expected)


_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def _is_same_json(text: str, expected: str) -> bool:
    try:
        found: Any = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return False
    # 1 == 1.0 == True in Python; in JSON text they differ.
    return json.dumps(found, sort_keys=True) == json.dumps(json.loads(expected), sort_keys=True)
