"""The schemas of an answer, and a check of what was written against them.

A grammar steers each token, so an answer that does not conform shows a fault of ours. The check is
independent of the grammar and bounded for all parts of an answer together: types, constants, names,
counts, lengths and ranges, not patterns and formats, each schema once for each value. As in Python,
`true` equals 1.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal
from urllib.parse import unquote

SchemaVerdict = Literal["conforms", "differs", "unchecked"]

_MAX_STEPS: Final = 10_000  # pairs of a schema and a value, or listed names: 60 ms at most
_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "string": str, "number": (int, float), "integer": (int, float), "boolean": bool,
    "null": type(None), "array": list, "object": dict,
}  # fmt: skip

_OBJECT: Final = ("additionalProperties", "unevaluatedProperties")
_ARRAY: Final = ("items", "additionalItems", "unevaluatedItems")
_CLOSING: Final[Mapping[str, Sequence[str]]] = {
    "properties": _OBJECT, "patternProperties": _OBJECT, "prefixItems": _ARRAY, "items": _ARRAY,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSchema:
    """The form that an answer must have."""

    content: str | None = None
    """The schema of the whole content, as JSON text; None where it is free."""
    arguments: Mapping[str, Any] | None = None
    """The schema of each function's arguments."""
    place: str = ""
    """The request's field that holds the schema of the content."""
    places: Mapping[str, str] = field(default_factory=dict)
    """The fields that hold the schemas of arguments, by function."""

    def enforced(self, left_out: Sequence[str]) -> "AnswerSchema":
        """Return the schemas without what a grammar does not enforce (`place#pointer`)."""
        if not left_out:
            return self
        pointers: dict[str, list[str]] = {}
        for name in left_out:
            place, _, pointer = name.partition("#")
            pointers.setdefault(place, []).append(pointer)
        content, arguments = self.content, self.arguments
        if content is not None and self.place in pointers:
            content = json.dumps(_without(json.loads(content), pointers[self.place]))
        if arguments is not None:
            arguments = {
                name: _without(schema, pointers.get(self.places.get(name, ""), ()))
                for name, schema in arguments.items()
            }
        return replace(self, content=content, arguments=arguments)

    def verdict(self, text: str, calls: Iterable[tuple[str, str]]) -> SchemaVerdict:
        """Check a whole answer: its content, and (name, arguments) of its calls."""
        pairs = [] if self.content is None else [(json.loads(self.content), text)]
        if self.arguments is not None:
            pairs += [(self.arguments.get(name, False), arguments) for name, arguments in calls]
        steps = _Steps()
        verdicts = {_verdict(schema, text, steps) for schema, text in pairs}
        worst: tuple[SchemaVerdict, ...] = ("differs", "unchecked")
        return next((verdict for verdict in worst if verdict in verdicts), "conforms")


def _without(schema: Any, pointers: Iterable[str]) -> Any:
    """Return a schema without keywords; any value where one of them cannot be found."""
    kept = deepcopy(schema)
    for pointer in pointers:
        parts = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")]
        if len(parts) < 2 or not _is_removed(kept, parts[1:]):
            return True
    return kept


def _is_removed(schema: Any, parts: Sequence[str]) -> bool:
    """Remove a keyword, and what would close its object to it; False where it is not found."""
    if "patternProperties" in parts[:-1]:
        return False
    here = schema
    for part in parts[:-1]:
        here = _at(here, part)
    name = parts[-1]
    if not isinstance(here, dict):
        return False
    for beside in _CLOSING.get(name, ()):
        here.pop(beside, None)
    here.pop(name, None)
    return True


def _at(value: Any, part: str) -> Any:
    if isinstance(value, list):
        return value[int(part)] if part.isdecimal() and int(part) < len(value) else None
    return value.get(part) if isinstance(value, dict) else None


def _verdict(schema: Any, text: str, steps: "_Steps") -> SchemaVerdict:
    try:
        value = json.loads(text)
        return "conforms" if _Check(schema, steps).fits(schema, value) else "differs"
    except json.JSONDecodeError:
        return "differs"
    except (RecursionError, _UncheckableError, ValueError):  # an integer of 5,000 digits, say
        return "unchecked"
    except (TypeError, AttributeError, LookupError):  # odd values of keywords that do not matter
        return "unchecked"


class _UncheckableError(Exception):
    """The check takes too many steps, or goes round in a circle."""


class _Steps:
    """The steps that an answer's check has left."""

    def __init__(self) -> None:
        self._left = _MAX_STEPS

    def spend(self, number: int) -> None:
        self._left -= number
        if self._left < 0:
            raise _UncheckableError


class _Check:
    """One value against one schema, whose keywords the grammar's compiler has checked."""

    def __init__(self, document: Any, steps: _Steps) -> None:
        self._document = document
        self._spend = steps.spend
        self._known: dict[tuple[int, int], bool | None] = {}  # None: being found out

    def fits(self, schema: Any, value: Any) -> bool:
        """True if a value conforms to a schema or subschema."""
        if isinstance(schema, bool):
            return schema
        key = (id(schema), id(value))
        if key not in self._known:
            self._spend(1)
            self._known[key] = None
            self._known[key] = self._conforms(schema, value)
        known = self._known[key]
        if known is None:  # a reference leads back to where it is asked for
            raise _UncheckableError
        return known

    def _conforms(self, schema: Mapping[str, Any], value: Any) -> bool:
        if "$ref" in schema and not self.fits(self._target(schema["$ref"]), value):
            return False
        if "const" in schema and value != schema["const"]:
            return False
        if "enum" in schema:
            self._spend(len(schema["enum"]))
            if value not in schema["enum"]:
                return False
        kinds = schema.get("type", [])
        if isinstance(kinds, str):
            kinds = [kinds]
        else:
            self._spend(len(kinds))
        if kinds and not any(_is(value, kind) for kind in kinds):
            return False
        branches = [schema[name] for name in ("anyOf", "oneOf") if name in schema]
        if not all(any(self.fits(branch, value) for branch in each) for each in branches):
            return False
        return all(
            self.fits(each, value) for each in schema.get("allOf", ())
        ) and self._conforms_by_type(schema, value)

    def _conforms_by_type(self, schema: Mapping[str, Any], value: Any) -> bool:
        match value:
            case bool() | None:
                return True
            case str():
                return _within(schema, len(value), "Length")
            case list():
                return _within(schema, len(value), "Items") and self._items(schema, value)
            case dict():
                return self._is_counted(schema, value) and self._fields(schema, value)
            case _:
                return _in_range(schema, value)

    def _is_counted(self, schema: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
        """True if an object has as many keys as it may; beside optional ones none need count."""
        if schema.keys().isdisjoint(("minProperties", "maxProperties")):
            return True
        described, required = schema.get("properties", {}), schema.get("required", ())
        self._spend(len(described) + len(required))
        return not described.keys() <= set(required) or _within(schema, len(value), "Properties")

    def _items(self, schema: Mapping[str, Any], values: list[Any]) -> bool:
        first = schema.get("prefixItems", [])
        rest = schema.get("items", schema.get("unevaluatedItems", True))
        if isinstance(rest, list):  # of a draft before 2020-12
            first, rest = rest, schema.get("additionalItems", True)
        schemas = [*first[: len(values)], *[rest] * (len(values) - len(first))]
        return all(map(self.fits, schemas, values))

    def _fields(self, schema: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
        required = schema.get("required", ())
        self._spend(len(required))
        if not all(name in value for name in required):
            return False
        described = schema.get("properties", {})
        rest = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
        rest = True if "patternProperties" in schema else rest
        return all(self.fits(described.get(name, rest), item) for name, item in value.items())

    def _target(self, reference: str) -> Any:
        here = self._document
        for part in unquote(reference).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            here = here[int(name)] if isinstance(here, list) else here[name]
        return here


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _within(schema: Mapping[str, Any], number: int, what: str) -> bool:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    return bool(least <= number and (most is None or number <= most))


def _in_range(schema: Mapping[str, Any], value: float) -> bool:
    return (
        value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        and ("multipleOf" not in schema or value % schema["multipleOf"] == 0)
    )
