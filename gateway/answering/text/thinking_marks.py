"""The tokens in which a tokenizer writes the marks around thinking."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from outrider.gateway.answering.text.reasoning_formats import ReasoningFormat

# Texts beside a mark that tokenizers may join with it in one token. A mark that is written on
# purpose stands behind a line's end, as models write it.
_BEFORE: Final = ("\n", "", " ", ".", ".\n", "\n\n")
_BEFORE_ANSWER: Final = ("", "\n", "\n\n", " ")
_AFTER: Final = ("", "\n", "\n\n", " ")

_Spellings = tuple[tuple[int, ...], ...]


class ThinkingMarks(msgspec.Struct, frozen=True, kw_only=True):
    """The spellings of the marks, as `ThinkingBudget` has them."""

    opens: _Spellings
    closes: _Spellings


def spell_marks(backend: Any, form: ReasoningFormat) -> ThinkingMarks:
    """Return the marks of a format in the tokens of a fast tokenizer's `backend`."""
    opens: dict[tuple[int, ...], bool] = {}
    closes: dict[tuple[int, ...], bool] = {}
    for mark in form.opens:
        for before in _BEFORE_ANSWER:
            opens |= dict(_spelt(backend, before + mark, after) for after in _AFTER)
    for mark in form.closes:
        for before in _BEFORE:
            closes |= dict(_spelt(backend, mark, after, before) for after in _AFTER)
    opens.pop((), None)
    closes.pop((), None)
    # One that is the mark and nothing else comes first: it is the one that is written.
    return ThinkingMarks(
        opens=tuple(opens), closes=tuple(sorted(closes, key=lambda ids: not closes[ids]))
    )


def _spelt(backend: Any, mark: str, after: str, before: str = "") -> tuple[tuple[int, ...], bool]:
    """Return the tokens that have a part of the mark, and whether they have nothing else."""
    encoding = backend.encode(before + mark + after, add_special_tokens=False)
    begin, end = len(before), len(before) + len(mark)
    spans: Sequence[tuple[int, int]] = encoding.offsets
    found = [i for i, (first, last) in enumerate(spans) if last > begin and first < end]
    token_ids = tuple(encoding.ids[i] for i in found)
    is_exact = bool(found) and spans[found[0]][0] >= begin and spans[found[-1]][1] <= end
    return token_ids, is_exact
