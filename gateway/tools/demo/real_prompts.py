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

REAL_PROMPTS: Final = (
    RealPrompt(kind="question", prompt="Why is the sky blue? Answer in two sentences."),
    RealPrompt(kind="list", prompt="List the steps to make a cup of tea."),
    RealPrompt(kind="summary", prompt=f"Summarise this text in one sentence.\n\n{_NOTICE}"),
    RealPrompt(
        kind="copy",
        prompt=f"Repeat this text and correct nothing but its line breaks.\n\n{_NOTICE}",
    ),
    RealPrompt(
        kind="rewrite",
        prompt=(
            "Rewrite this sentence in the past tense: The boy runs to the station and buys a "
            "ticket."
        ),
    ),
    RealPrompt(
        kind="JSON",
        prompt=(
            "Give me a JSON object with the name, the age and the city of Maria, who is 34 and "
            "lives in Lisbon."
        ),
    ),
    RealPrompt(
        kind="code",
        prompt="Write a Python function that returns the largest number in a list.",
        max_tokens=160,
    ),
    RealPrompt(
        kind="page",
        prompt="Write an HTML page with a heading and a list of three animals.",
        max_tokens=160,
    ),
    RealPrompt(kind="email", prompt="Write an email that invites a friend to dinner on Friday."),
    RealPrompt(
        kind="explanation",
        prompt="Explain to a child what a library is, and why people borrow books there.",
    ),
)
"""All different: an answer is remembered and would draft itself the next time."""
