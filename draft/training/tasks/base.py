"""Parts that all task families share: the task, its raw draft, and the wording around a prompt."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

# How an answer is compared with what is expected; draft/training/tasks/files.py says the same to
# others.
CheckKind = Literal["regex", "exact", "json", "tool_call"]

# A tool as an OpenAI request has it: {"type": "function", "function": {"name": ...}}.
TaskTool = Mapping[str, Any]


class TaskMessage(TypedDict):
    """One chat message: role (system, user or assistant) and content."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Task:
    """One prompt with its canonical answer."""

    family: str
    difficulty: int
    prompt: str
    answer: str
    expected: str
    """What the checker compares: the text after `Answer: ` (regex), the whole answer (exact), or
    JSON (json, tool_call)."""
    kind: CheckKind = "regex"
    history: tuple[TaskMessage, ...] = ()
    """The chat before the prompt."""
    tools: tuple[TaskTool, ...] = ()
    """The functions that the model may call."""

    @property
    def messages(self) -> list[TaskMessage]:
        """The chat that ends with the prompt."""
        return [*self.history, {"role": "user", "content": self.prompt}]

    @property
    def split_key(self) -> str:
        """All that the user says: what the held-out split is drawn by."""
        return "\n".join(said["content"] for said in self.messages if said["role"] == "user")


@dataclass(frozen=True, kw_only=True)
class TaskDraft:
    """A family's output before dressing."""

    prompt: str
    """Bare, unless `is_dressed`."""
    steps: Sequence[str]
    """Worked steps."""
    final: str
    """The final answer."""
    kind: CheckKind = "regex"
    """"regex" and "json" get an `Answer: ` line after the steps; "exact" and "tool_call" answer
    with `final` alone."""
    expected: str | None = None
    """What a "tool_call" is compared by, where it is given."""
    history: tuple[TaskMessage, ...] = ()
    tools: tuple[TaskTool, ...] = ()
    is_dressed: bool = False
    """The prompt brings its own greeting."""


Maker = Callable[[int, random.Random], TaskDraft]

# Words around a prompt carry no difficulty; a router has to learn to look past them.
_OPENINGS = (
    "", "", "", "", "", "Hi! ", "Hello, ", "Please help me. ", "Quick question: ", "Hey, ",
    "Hello! ", "Hi there! ",
)  # fmt: skip
_CLOSINGS = ("", "", "", "", "", " Thanks!", " Please show the steps.", " Work step by step.")


def answer_text(draft: TaskDraft) -> str:
    """The answer as the model is to write it."""
    if draft.kind in ("exact", "tool_call"):
        return draft.final
    period = "" if draft.kind == "json" else "."
    return "\n".join((*draft.steps, f"Answer: {draft.final}{period}"))


def dressed(draft: TaskDraft, family: str, difficulty: int, rng: random.Random) -> Task:
    """Put an opening and a closing around a bare prompt and lay out the answer."""
    prompt = draft.prompt
    if not draft.is_dressed:
        closings = _CLOSINGS if draft.steps else _CLOSINGS[:6]
        prompt = rng.choice(_OPENINGS) + prompt + rng.choice(closings)
    return Task(
        family=family,
        difficulty=difficulty,
        prompt=prompt,
        answer=answer_text(draft),
        expected=draft.final if draft.expected is None else draft.expected,
        kind=draft.kind,
        history=draft.history,
        tools=draft.tools,
    )


def turns(*pairs: tuple[str, str]) -> tuple[TaskMessage, ...]:
    """A chat of (user, assistant) pairs."""
    return tuple(
        message
        for asked, answered in pairs
        for message in (
            TaskMessage(role="user", content=asked),
            TaskMessage(role="assistant", content=answered),
        )
    )


NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Kira",
    "Leo", "Maria", "Nils", "Olga", "Paul", "Rosa", "Sam", "Tara", "Uma", "Viktor", "Wanda",
    "Yusuf", "Zoe", "Amir", "Bea", "Carlos", "Dina", "Elif", "Finn", "Hana", "Ivan", "Julia",
    "Kofi", "Lena", "Mateo", "Nora", "Omar", "Priya", "Ravi",
)  # fmt: skip
CITIES = (
    "Oslo", "Paris", "Rome", "Lima", "Cairo", "Tokyo", "Delhi", "Quito", "Bern", "Dublin",
    "Madrid", "Prague", "Vienna", "Warsaw", "Athens", "Havana", "Lisbon", "Nairobi",
)  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
