"""Questions of `benchmarks.chaos.chaos`: bodies of requests that are asked again and again.

Every question has a seed, so its answer is one text whenever and beside whatever it is asked.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal

from benchmarks.chaos.fuzzed_schemas import random_object, random_schema
from outrider.draft.training.tasks.families import stream

Kind = Literal["chat", "schema", "tools", "auto", "chain", "experiment", "limited"]

CHAIN: Final = "robust"
"""The alias of a chain: the upstream server, then a local model."""
TRIED: Final = "app"
"""The alias whose models are in the experiment of benchmarks/chaos/chaos_experiments.py."""

_SHARES: Final[Mapping[Kind, float]] = {
    "chat": 0.32, "schema": 0.12, "tools": 0.08, "auto": 0.2, "chain": 0.11, "experiment": 0.12,
    "limited": 0.05,
}  # fmt: skip
_MODELS: Final[Mapping[Kind, str]] = {"auto": "auto", "chain": CHAIN, "experiment": TRIED}
_ROUTING: Final[Sequence[Mapping[str, Any]]] = (
    {},
    {},
    {"threshold": 0.6},
    {"min_quality": 0.95},
    {"hold_back_tokens": 4},
    {"quality": {"cascade": 0.2}},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One of the questions. `body`: without `stream`.

    `schema`: of the answer, or of the arguments of the tool that it has to call.
    """

    number: int
    kind: Kind
    body: Mapping[str, Any]
    schema: Mapping[str, Any] | None = None

    @property
    def has_one_text(self) -> bool:
        """True where the tier is named: others may be answered by either."""
        return self.kind in ("chat", "schema", "tools")


def make_questions(number: int, seed: int) -> list[Question]:
    """Return questions of all kinds, the same for the same seed."""
    chance = random.Random(seed)
    tasks = [task for task in islice(stream(seed, "heldout"), 4 * number) if not task.tools]
    kinds = chance.choices(list(_SHARES), weights=list(_SHARES.values()), k=number)
    return [
        _question(kind, index, tasks[index].messages, chance) for index, kind in enumerate(kinds)
    ]


def _question(
    kind: Kind, index: int, messages: Sequence[Mapping[str, Any]], chance: random.Random
) -> Question:
    asked = [{"role": each["role"], "content": each["content"]} for each in messages]
    while asked[-1]["role"] != "user":
        asked.pop()
    body: dict[str, Any] = {
        "model": _MODELS.get(kind) or chance.choice(("small", "large")),
        "messages": asked,
        "seed": index,
        "temperature": chance.choice((0.0, 0.7, 1.0)),
        "max_tokens": chance.choice((24, 64, 160)),
    }
    schema = None
    if kind == "schema":
        schema = random_schema(chance)
        described = {"name": "answer", "strict": True, "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": described}
        body["max_tokens"] = 200
    if kind == "tools":
        schema = random_object(chance, depth=1)
        body["tools"] = [{"type": "function", "function": {"name": "act", "parameters": schema}}]
        body |= {"tool_choice": "required", "max_tokens": 200}
    if kind == "auto":
        body["outrider"] = chance.choice(_ROUTING)
    if chance.random() < 0.2:
        body["service_tier"] = chance.choice(("priority", "default", "flex"))
    return Question(number=index, kind=kind, body=body, schema=schema)
