"""Questions of the demo whose right answers are known."""

import json
from dataclasses import dataclass
from typing import Final

from outrider.draft.training.tasks.base import CheckKind
from outrider.draft.training.tasks.families import is_right


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoQuestion:
    """A prompt with its right answer; `kind`: exact, regex or json, as `is_right` compares them."""

    prompt: str
    right: str
    kind: CheckKind = "regex"

    def is_right(self, answer: str) -> bool:
        """Compare the last line of an answer, `Answer: ...`, or all of it."""
        pattern = rf"Answer: {self.right}\.?"
        return is_right(answer, self.kind, pattern if self.kind == "regex" else self.right)


def _asked(prompt: str, right: str, kind: CheckKind = "regex") -> DemoQuestion:
    return DemoQuestion(prompt=prompt, right=right, kind=kind)


ROUTED: Final = (
    _asked(
        "Who are you?",
        "I am Outrider, a small assistant. A small model rides ahead of a large one here.",
        "exact",
    ),
    _asked("What is 6 + 3?", "9"),
    _asked("Which is larger, 71 or 38?", "71"),
    _asked("Reverse the word lamp.", "p-m-a-l"),
    _asked("Sort these words alphabetically: river, apple, moon.", "apple, moon, river"),
    _asked("What is 4786 + 3957?", "8743"),
    _asked("Compute 409 * 2.", "818"),
    _asked("What weekday comes 225 days after a Sunday?", "Monday"),
    _asked("How many days are there between June 17 and October 20?", "125 days"),
    _asked(
        'Turn this into a JSON object that follows {"name": "string", "age": "integer", '
        '"city": "string"}: Maria works as a writer, is 34 years old and lives in Lisbon.',
        json.dumps({"name": "Maria", "age": 34, "city": "Lisbon"}),
        "json",
    ),
)
"""Easy and hard ones, for `model: auto`."""

FRESH: Final = (
    _asked("How much is 724 plus 121?", "845"),
    _asked("What is the product of 876 and 3?", "2628"),
    _asked("How many days lie between September 21 and November 23?", "63 days"),
    _asked("Subtract 447 from 990.", "543"),
    _asked("It is Friday. My trip starts in 83 days. On which weekday is that?", "Thursday"),
    _asked("Order from A to Z: ice, octopus, glass, jam, bird.", "bird, glass, ice, jam, octopus"),
    _asked("Continue the sequence 137, 110, 83, 56.", "29"),
    _asked("How many hours are 7 days?", "168 hours"),
)
"""For the large model with and without speculation: none is asked twice with it."""

SAMPLED: Final = _asked(
    "Sam has 12 apples. Sam buys 9. Sam doubles the number of apples. How many now?", "42 apples"
)
