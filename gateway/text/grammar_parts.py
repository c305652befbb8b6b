"""Parts of xgrammar's structural tags, written by hand: this process does without xgrammar."""

import re
from collections.abc import Mapping
from typing import Any

from outrider.gateway.text.tool_formats import ANY_ID

GrammarPart = dict[str, Any]


class Literals:
    """Texts of a format as parts of a grammar: a special token is no text and goes by its id."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        texts = [f"({re.escape(text)})" for text in special_ids]
        self._pattern = re.compile("|".join([*texts, f"({ANY_ID})"]))

    def parts(self, text: str) -> list[GrammarPart]:
        """Split a text at its special tokens; ANY_ID stands for any id of a call."""
        return [self._part(part) for part in self._pattern.split(text) if part]

    def mark(self, text: str) -> str | GrammarPart:
        """Return a text that is one special token, or none, as tags begin and end with it."""
        token_id = self._special_ids.get(text)
        return text if token_id is None else {"type": "token", "token": token_id}

    def is_special(self, text: str) -> bool:
        """Return whether the text is one special token."""
        return text in self._special_ids

    def _part(self, text: str) -> GrammarPart:
        if text == ANY_ID:
            return {"type": "regex", "pattern": "[a-zA-Z0-9]{1,9}"}
        mark = self.mark(text)
        return const(mark) if isinstance(mark, str) else mark


def const(text: str) -> GrammarPart:
    """Match a text."""
    return {"type": "const_string", "value": text}


def tag(begin: str | GrammarPart, content: GrammarPart, end: str | GrammarPart) -> GrammarPart:
    """Match `begin content end`; text in the content ends where `end` does."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(elements: list[GrammarPart]) -> GrammarPart:
    """Match parts that follow one another."""
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def any_of(elements: list[GrammarPart]) -> GrammarPart:
    """Match one of several parts."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def optional(content: GrammarPart) -> GrammarPart:
    """Match a part, or nothing."""
    return {"type": "optional", "content": content}


def star(content: GrammarPart) -> GrammarPart:
    """Match a part any number of times."""
    return {"type": "star", "content": content}
