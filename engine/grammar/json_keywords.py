"""Keywords of JSON Schema: those that are enforced, by type, and the values that they may have."""

from collections.abc import Mapping
from typing import Any, Final

from outrider.engine.grammar.grammar import InvalidGrammarError

EXACT_BELOW: Final = 2**53
"""The compiler reads numbers as doubles, which are exact up to here."""

_NUMBER: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_TYPE: Final[Mapping[str, tuple[str, ...]]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": _NUMBER,
    "number": _NUMBER,
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems", "uniqueItems"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "unevaluatedProperties",
    ),
    "boolean": (),
    "null": (),
}
COMBINING: Final = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
UNSUPPORTED: Final = (
    "not",
    "if",
    "contains",
    "minContains",
    "maxContains",
    "additionalItems",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
# What the values of keywords must be, in words for messages; looked at once, by `check_values`.
_SHAPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), "object"),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "enum", "prefixItems"), "list"),
    "required": "list of names",
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), "whole number"),
    **dict.fromkeys(("minProperties", "maxProperties"), "whole number"),
    **dict.fromkeys(("pattern", "$ref", "format"), "text"),
    "uniqueItems": "boolean",
    **dict.fromkeys(("items", "additionalProperties", "propertyNames"), "schema"),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), "schema"),
    "type": "type",
}


def constraining_keywords(schema: dict[str, Any]) -> list[str]:
    """Return the keywords of a schema that constrain values of some type."""
    known = {name for names in OF_TYPE.values() for name in names if name != "format"}
    return [name for name in schema if name in known]


def implied_types(schema: dict[str, Any], place: str) -> list[str] | str:
    """Return the type whose keywords stand in a schema without one; all types where none does."""
    names = set(constraining_keywords(schema))
    if not names:
        return list(OF_TYPE)
    kinds = [kind for kind, own in OF_TYPE.items() if names <= set(own)]
    if not kinds:
        raise InvalidGrammarError(f"{place}: set the `type` that has {', '.join(sorted(names))}")
    return "number" if "number" in kinds else kinds[0]


def check_values(schema: dict[str, Any], place: str) -> None:
    """Raise where a keyword has a value of a kind that this module does not expect."""
    for name in schema.keys() & _SHAPES.keys():
        shape = _SHAPES[name]
        if not _has_shape(schema[name], shape):
            raise InvalidGrammarError(
                f"{place}: {name}={shown(schema[name])} must be "
                + (f"one of {', '.join(OF_TYPE)}, or a list of them" if shape == "type" else shape)
            )


def _has_shape(value: Any, shape: str) -> bool:
    match shape:
        case "object":
            return isinstance(value, dict)
        case "list":
            return isinstance(value, list)
        case "list of names":
            return isinstance(value, list) and all(isinstance(name, str) for name in value)
        case "whole number":
            return type(value) is int and 0 <= value < EXACT_BELOW
        case "text":
            return isinstance(value, str)
        case "schema":  # looked into where it counts
            return isinstance(value, dict | bool)
        case "boolean":
            return isinstance(value, bool)
        case _:
            kinds = [value] if isinstance(value, str) else value
            return (
                isinstance(kinds, list)
                and bool(kinds)
                and all(isinstance(kind, str) and kind in OF_TYPE for kind in kinds)
            )


def shown(value: Any) -> str:
    """Write a value for a message: JSON that a client sent, shortened."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return "an integer of more than 40 digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def unsupported(place: str, name: str) -> InvalidGrammarError:
    """Return the error for a keyword, or a use of one, that cannot be enforced."""
    return InvalidGrammarError(f"{place}: {name} is not supported in structured output")
