"""Checks as an operator writes them: a topic that is refused, and a word that is replaced."""

import re
from typing import Any, Final

_REFUSED: Final = "lock picking"
_WORD: Final = re.compile(r"\b(a|the)\b", re.IGNORECASE)


async def topics(question: dict[str, Any]) -> dict[str, Any]:
    """Refuse requests about one topic."""
    if any(_REFUSED in each["text"].lower() for each in question["texts"]):
        return {"verdict": "block", "reason": f"We give no advice on {_REFUSED}."}
    return {"verdict": "pass"}


def words(question: dict[str, Any]) -> dict[str, Any]:
    """Replace the articles of an answer, for everybody to see that it was checked."""
    texts = [each["text"] for each in question["texts"]]
    return {"verdict": "rewrite", "texts": [_WORD.sub("___", text) for text in texts]}
