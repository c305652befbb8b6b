"""Values of arguments that are written between tags, typed by the function's JSON schema.

Between tags a string is plain text and every other value is JSON. A text such as `null` or `5` says
by itself nothing about its type, so the schema decides; grammar and parser take it from here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

_JSON_TYPES: Final = frozenset(
    ("string", "integer", "number", "boolean", "null", "array", "object")
)
# Formats that a grammar enforces; all others constrain nothing.
_ENFORCED_FORMATS: Final = frozenset(
    ("date", "time", "date-time", "duration", "ipv4", "ipv6", "uuid", "email", "hostname")
)
_NO_CONSTRAINTS: Final = frozenset(
    ("type", "title", "description", "default", "examples", "example", "format", "deprecated")
)
_WORDS: Final = frozenset({"boolean", "null"})
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
_MAX_REFERENCES: Final = 16
_MAX_SCHEMAS: Final = 64
"""Branches that are looked at: references may make any number of few."""
MAX_LENGTH: Final = 2**31 - 1
_MAX_MIN_LENGTH: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueForm:
    """The form of one argument."""

    mode: Literal["text", "json"]
    """text: strings are written as they are, other values as JSON. json: strings are JSON, too, as
    only that can be held to the schema."""
    kinds: frozenset[str]
    """The JSON types that it may have."""

    @property
    def is_string(self) -> bool:
        """True if the value is a string, whatever is written."""
        return self.mode == "text" and self.kinds == {"string"}

    def read(self, written: str) -> str:
        """Return a written value as JSON; a string where it is no JSON of a type that it may be."""
        text = written.strip()
        text = _PYTHON.get(text, text)
        kind = _kind_of(text)
        wanted = self.kinds - {"string"} if self.mode == "text" else self.kinds
        is_value = kind in wanted or (kind == "integer" and "number" in wanted)
        return text if is_value else json.dumps(written, ensure_ascii=False)


STRING: Final = ValueForm(mode="text", kinds=frozenset({"string"}))
ANY_VALUE: Final = ValueForm(mode="text", kinds=_JSON_TYPES)


def value_forms(parameters: Mapping[str, Any] | None) -> dict[str, ValueForm]:
    """Return the forms of a function's arguments, by name; those of others are ANY_VALUE."""
    properties = (parameters or {}).get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {name: value_form(schema, parameters) for name, schema in properties.items()}


def value_form(schema: Any, document: Any) -> ValueForm:
    """Return the form of a value with this schema. `document`: what references point into."""
    leaves = _leaves(schema, document)
    if len(leaves) == 1:
        return _leaf_form(leaves[0])
    forms = [_leaf_form(leaf) for leaf in leaves]
    kinds = frozenset[str]().union(*(form.kinds for form in forms))
    is_text = all(map(_is_free, leaves)) and "string" in kinds and kinds - {"string"} <= _WORDS
    return ValueForm(mode="text" if is_text else "json", kinds=kinds)


def target(schema: Any, document: Any) -> Any:
    """Follow references into the document; return None where they lead nowhere."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        found: Any = document
        for part in schema["$ref"].split("/")[1:]:
            found = found.get(part) if isinstance(found, Mapping) else None
        schema = found
    return None


def _leaves(schema: Any, document: Any) -> list[Any]:
    """Return the schemas of which one holds; a schema that constrains nothing where too many do."""
    leaves: list[Any] = []
    waiting = [schema]
    for _ in range(_MAX_SCHEMAS):
        if not waiting:
            return leaves
        here = target(waiting.pop(), document)
        branches = [here[name] for name in ("anyOf", "oneOf") if name in here] if _is(here) else []
        if branches and isinstance(branches[0], list):
            waiting += branches[0]
        else:
            leaves.append(here)
    return [{"not": {}}]  # as JSON, of any type


def _is(schema: Any) -> bool:
    return isinstance(schema, Mapping)


def _leaf_form(schema: Any) -> ValueForm:
    """Return the form of a schema without branches."""
    if not _is(schema):
        return ANY_VALUE
    if "enum" in schema or "const" in schema:
        return _of_values(schema["enum"] if "enum" in schema else [schema["const"]])
    listed = schema.get("type", sorted(_JSON_TYPES))
    listed = listed if isinstance(listed, list) else [listed]
    kinds = frozenset(kind for kind in listed if isinstance(kind, str))
    if kinds == {"string"} and _has_only_lengths(schema):
        return STRING
    is_plain = kinds - {"string"} <= _WORDS or "type" not in schema
    is_text = "string" in kinds and _is_free(schema) and is_plain
    return ValueForm(mode="text" if is_text else "json", kinds=kinds)


def _is_free(schema: Any) -> bool:
    """Return whether a schema says nothing but the value's type."""
    if not _is(schema):
        return True
    return schema.keys() <= _NO_CONSTRAINTS and schema.get("format") not in _ENFORCED_FORMATS


def _of_values(values: Any) -> ValueForm:
    """Return the form of listed values: texts only where nothing else is listed."""
    listed = values if isinstance(values, list) else []
    if listed and all(isinstance(value, str) and _is_plain(value) for value in listed):
        return STRING
    return ValueForm(mode="json", kinds=_JSON_TYPES)


def _is_plain(text: str) -> bool:
    """Return whether a text cannot be taken for a tag or for the white space around it."""
    return "<" not in text and text == text.strip()


def _has_only_lengths(schema: Mapping[str, Any]) -> bool:
    """Return whether a string is constrained by lengths that a grammar of texts can count."""
    names = schema.keys() - _NO_CONSTRAINTS
    if not names <= {"minLength", "maxLength"} or schema.get("format") in _ENFORCED_FORMATS:
        return False
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", MAX_LENGTH)
    if type(shortest) is not int or type(longest) is not int:
        return False
    return 0 <= shortest <= min(longest, _MAX_MIN_LENGTH) and longest <= MAX_LENGTH


def _kind_of(text: str) -> str | None:
    """Return the JSON type of a text; None where it is not JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case None:
            return "null"
        case list():
            return "array"
        case _:
            return "object"


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
