"""Signs in an answer's text alone that it is of no use; for servers that tell no log-probabilities.

Only signs that need no understanding: nothing written, the same words again and again, a beginning
that says that the model cannot answer.
"""

import re
from typing import Final

_MIN_REPEATS: Final = 4
_LONGEST_UNIT: Final = 12  # words
_TAIL_WORDS: Final = 96
_BEGINNING_CHARS: Final = 200
_GIVES_UP: Final = re.compile(
    r"\b(?:i (?:do not|don't|cannot|can't|can not|am unable to|am not able to)"
    r" (?:know|answer|help|determine|provide|say|tell|understand|assist)"
    r"|i(?:'m| am) (?:not sure|unable to)|i have no (?:idea|information))\b",
    re.IGNORECASE,
)


def text_fault(text: str, *, is_whole: bool) -> str | None:
    """Return what is wrong with an answer, or its beginning, in a few words; None for nothing."""
    if is_whole and not text.strip():
        return "it is empty"
    if _GIVES_UP.search(text[:_BEGINNING_CHARS].replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")):
        return "it says that it cannot answer"
    return "it repeats itself" if _repeats(text.split()[-_TAIL_WORDS:]) else None


def _repeats(words: list[str]) -> bool:
    """Return whether the last words are the same ones, at least four times in a row."""
    for size in range(1, min(_LONGEST_UNIT, len(words) // _MIN_REPEATS) + 1):
        unit = words[-size:]
        if all(
            words[len(words) - (i + 1) * size : len(words) - i * size] == unit
            for i in range(1, _MIN_REPEATS)
        ):
            return True
    return False
