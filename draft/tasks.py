"""Tasks whose answers a program can check: the small world in which the shipped pair is competent.

Sixteen families, each with a difficulty dial from 1 to 4. An answer is worked step by step in one
canonical style, so that greedy decoding has one right continuation, and ends in a line such as
`Answer: 42.` (small talk, which has no steps, is its own answer). Prompts vary in wording, so that
a router can learn difficulty from text alone.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from typing import Literal

from draft.task_base import Maker, Task, dressed
from draft.task_language import LANGUAGE_FAMILIES
from draft.task_numbers import NUMBER_FAMILIES

__all__ = ["DIFFICULTIES", "FAMILIES", "Split", "Task", "check", "generate", "split_of", "stream"]

Split = Literal["train", "heldout"]

_MAKERS: dict[str, Maker] = {**NUMBER_FAMILIES, **LANGUAGE_FAMILIES}

FAMILIES: tuple[str, ...] = tuple(_MAKERS)
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
    """The split a prompt belongs to, by its hash: no prompt is ever in both.

    The *wording* is held out, not the facts: a sum of two one-digit numbers seen in training can
    come back in another wording. From three digits on, almost every held-out sum is new.
    """
    digest = hashlib.sha256(prompt.encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") % _HELDOUT_MODULUS == 0 else "train"


def stream(
    seed: int,
    split: Split,
    families: Sequence[str] = FAMILIES,
    difficulties: Sequence[int] = DIFFICULTIES,
) -> Iterator[Task]:
    """Endless tasks of one split, family and difficulty drawn uniformly; same seed, same tasks."""
    rng = random.Random(f"{seed}/{split}")
    while True:
        task = generate(rng.choice(families), rng.choice(difficulties), rng)
        if split_of(task.prompt) == split:
            yield task


def check(task: Task, answer_text: str) -> bool:
    """Whether a model's answer is right: its last `Answer:` line, compared exactly.

    JSON is compared as parsed, small talk as the whole text. The steps are not judged.
    """
    if task.family == "chat":
        return answer_text.strip() == task.expected
    lines = [line for line in answer_text.strip().splitlines() if line.startswith("Answer:")]
    if not lines:
        return False
    final = lines[-1].removeprefix("Answer:").strip()
    if task.family == "json":
        try:
            return bool(json.loads(final) == json.loads(task.expected))
        except json.JSONDecodeError:
            return False
    return final.removesuffix(".") == task.expected
