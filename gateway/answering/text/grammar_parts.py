"""Parts of a grammar for an answer, as engine/grammar/grammar_parts.py reads them."""

import re
from collections.abc import Mapping
from typing import Any, Final

from outrider.gateway.answering.text.tool_formats import ANY_ID

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

    def is_special(self, text: str) -> bool:
        """Return whether the text is one special token."""
        return text in self._special_ids

    def until(self, mark: str, **options: Any) -> list[GrammarPart]:
        """Match any text up to the first mark, and the mark. `options`: of the text."""
        token_id = self._special_ids.get(mark)
        if token_id is None:
            return [{"type": "text_until", "end": mark, **options}]
        return [{"type": "text", **options}, {"type": "token", "token": token_id}]

    def _part(self, text: str) -> GrammarPart:
        if text == ANY_ID:
            return {"type": "regex", "pattern": "[a-zA-Z0-9]{1,9}"}
        token_id = self._special_ids.get(text)
        return const(text) if token_id is None else {"type": "token", "token": token_id}


ANY_TEXT: Final[GrammarPart] = {"type": "text"}


def const(text: str) -> GrammarPart:
    """Match a text."""
    return {"type": "const", "value": text}


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


def separated(content: GrammarPart, separator: list[GrammarPart]) -> GrammarPart:
    """Match a part once or more often, with a separator between."""
    return sequence([content, star(sequence([*separator, content]))])


def not_beginning_with(mark: str, part: GrammarPart) -> GrammarPart:
    """Match the part, but no text in front of it, or that it is, that begins with the mark.

    A lexer would read the mark as such a text otherwise, where both are possible.
    """
    match part["type"]:
        case "text" | "text_until":
            return {**part, "not_before": mark}
        case "sequence":
            first, *rest = part["elements"]
            is_optional = first["type"] in ("optional", "star")
            if is_optional and rest:
                rest = [not_beginning_with(mark, rest[0]), *rest[1:]]
            return sequence([not_beginning_with(mark, first), *rest])
        case "or":
            return any_of([not_beginning_with(mark, each) for each in part["elements"]])
        case "optional" | "star":
            return {**part, "content": not_beginning_with(mark, part["content"])}
        case _:
            return part
