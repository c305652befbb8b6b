"""What every task family shares: the task, its raw draft, and the wording around a prompt."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Task:
    """One prompt with its canonical answer; `expected` is what the checker compares."""

    family: str
    difficulty: int
    prompt: str
    answer: str
    expected: str


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A family's output before dressing: bare prompt, worked steps, final answer."""

    prompt: str
    steps: Sequence[str]
    final: str


Maker = Callable[[int, random.Random], Draft]

# Words around a prompt carry no difficulty; a router has to learn to look past them.
_OPENINGS = ("", "", "", "", "Hi! ", "Hello, ", "Please help me. ", "Quick question: ", "Hey, ")
_CLOSINGS = ("", "", "", "", "", " Thanks!", " Please show the steps.", " Work step by step.")


def dressed(draft: Draft, family: str, difficulty: int, rng: random.Random) -> Task:
    """Put an opening and a closing around a bare prompt and lay out the answer."""
    opening = rng.choice(_OPENINGS)
    if family == "chat":
        # Small talk brings its own greeting and asks for no steps.
        answer = draft.final
        prompt = draft.prompt
    else:
        prompt = opening + draft.prompt + rng.choice(_CLOSINGS)
        period = "" if family == "json" else "."
        answer = "\n".join((*draft.steps, f"Answer: {draft.final}{period}"))
    return Task(
        family=family, difficulty=difficulty, prompt=prompt, answer=answer, expected=draft.final
    )


NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Kira",
    "Leo", "Maria", "Nils", "Olga", "Paul", "Rosa", "Sam", "Tara", "Uma", "Viktor", "Wanda",
    "Yusuf", "Zoe", "Amir", "Bea", "Carlos", "Dina", "Elif", "Finn", "Hana", "Ivan", "Julia",
    "Kofi", "Lena", "Mateo", "Nora", "Omar", "Priya", "Ravi",
)  # fmt: skip
