"""Parts of a grammar for an answer, as engine/grammar/grammar_parts.py reads them."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from outrider.engine.request import MAX_PARTS_BYTES
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


MAX_READ_BYTES: Final = 2 * MAX_PARTS_BYTES
"""Longer schemas are not read, as that takes time in which nothing else is answered."""
_NOTES: Final = frozenset(
    {"description", "title", "$comment", "default", "example", "examples", "deprecated"}
)
_NO_SCHEMAS: Final = frozenset({"const", "enum", "required", "type"})
_MAPS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
ANY_TEXT: Final[GrammarPart] = {"type": "text"}


def json_schema(schema: Any, place: str, *, is_lenient: bool) -> GrammarPart:
    """Match JSON under a schema. `is_lenient`: of it what can be enforced; `place`: its field."""
    part = {"type": "json_schema", "json_schema": schema}
    return {**part, "lenient": True, "place": place} if is_lenient else part


def note(place: str, pointers: list[str]) -> list[GrammarPart]:
    """Match nothing, and say what is not enforced of the schema in a field; no part for nothing."""
    names = [f"{place}#{pointer}" for pointer in pointers]
    return [{"type": "note", "left_out": names}] if names else []


def without_notes(schema: Any) -> Any:
    """Return a schema without what describes it and constrains nothing."""
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without_notes(name, value) for name, value in schema.items() if name not in _NOTES
    }


def _without_notes(name: str, value: Any) -> Any:
    if name in _NO_SCHEMAS:
        return value
    if name in _MAPS and isinstance(value, dict):
        return {key: without_notes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_notes(item) for item in value]
    return without_notes(value)


def dumps(whole: GrammarPart) -> str:
    """Write a grammar as text; where it is too long, with less of its lenient schemas.

    They lose what describes them, and then, the largest first, all but their type.
    """
    text, num_over = _sized(whole)
    if 0 < num_over <= MAX_READ_BYTES:
        for part in _lenient_in(whole):
            part["json_schema"] = without_notes(part["json_schema"])
        text, num_over = _sized(whole)
    if num_over <= 0:
        return text
    sized = [(len(json.dumps(part["json_schema"])), part) for part in _lenient_in(whole)]
    for size, part in sorted(sized, key=lambda pair: -pair[0]):
        if num_over > 0:
            num_over -= size
            kind = (
                part["json_schema"].get("type") if isinstance(part["json_schema"], dict) else None
            )
            part["json_schema"] = {"type": kind} if isinstance(kind, str) else {}
            part["left_out"] = [f"{part['place']}#"]
    return _sized(whole)[0]


def _sized(whole: GrammarPart) -> tuple[str, int]:
    """Return a grammar as text, and by how many bytes it is too long."""
    text = json.dumps(whole, ensure_ascii=False)
    return text, len(text.encode(errors="replace")) - MAX_PARTS_BYTES


def _lenient_in(part: GrammarPart) -> Iterator[GrammarPart]:
    waiting = [part]
    while waiting:
        here = waiting.pop()
        if here.get("lenient"):
            yield here
        waiting += here.get("elements", ())
        waiting += [here["content"]] if isinstance(here.get("content"), dict) else []


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
