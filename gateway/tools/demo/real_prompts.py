"""Ten prompts for a public model: some answers repeat what is in the prompt, others do not."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class RealPrompt:
    """A prompt, the kind of work that it asks for, and how long its answer may be."""

    kind: str
    prompt: str
    max_tokens: int = 120


_NOTICE: Final = (
    "The Harbour Library will be closed from Monday 3 June to Friday 7 June, because the reading "
    "room on the second floor gets new windows. Books can be returned at any time through the "
    "box beside the main door. Nobody has to pay a fine for books that are due in that week. The "
    "children's hour on Wednesday moves to the town hall, and begins at three o'clock as usual."
)
_CODE: Final = """\
def total_price(items):
    total = 0
    for item in items:
        total = total + item["price"] * item["count"]
    return total"""

REAL_PROMPTS: Final = (
    RealPrompt(kind="question", prompt="Why is the sky blue? Answer in two sentences."),
    RealPrompt(kind="list", prompt="List five things to pack for a weekend by the sea."),
    RealPrompt(kind="summary", prompt=f"Summarise this notice in one sentence.\n\n{_NOTICE}"),
    RealPrompt(
        kind="extraction",
        prompt=f"{_NOTICE}\n\nWhere does the children's hour take place, and when does it begin?",
    ),
    RealPrompt(
        kind="rewrite",
        prompt=(
            "Rewrite this message so that it is polite and formal: hey, the report is late again, "
            "send it to me today or the client will be angry."
        ),
    ),
    RealPrompt(
        kind="correction",
        prompt=f"Repeat this text and correct nothing but its line breaks.\n\n{_NOTICE}",
        max_tokens=160,
    ),
    RealPrompt(
        kind="code",
        prompt="Write a Python function that returns the largest number of a list. Only the code.",
        max_tokens=160,
    ),
    RealPrompt(
        kind="code change",
        prompt=f"Rename the variable total to amount in this code:\n\n{_CODE}",
        max_tokens=160,
    ),
    RealPrompt(kind="story", prompt="Tell a short story about a fox that learns to swim."),
    RealPrompt(
        kind="explanation",
        prompt="Explain to a child what a library is, and why people borrow books there.",
    ),
)
"""All different: an answer is remembered and would draft itself the next time."""
