"""JSON schemas as the grammar compiler can enforce them, or the reason why it cannot.

xgrammar passes over keywords that it does not know, some known ones beside others, and lets control
characters into strings of bounded length. An answer must conform to all of its schema, so a schema
is brought here into a form whose grammar allows only conforming JSON, and refused where there is
none. Keywords that constrain nothing (titles, defaults, unknown formats) are dropped, as the
specification asks (JSON Schema 2020-12, "Validation", section 4.3).
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from engine.grammar import InvalidGrammarError

MAX_DEPTH: Final = 100
"""Nesting of the schema's JSON. The compiler's time grows with its third power."""

_MAX_COUNTED_PROPERTIES: Final = 64  # the compiler unrolls all selections of them
_ANY_CHARACTER: Final = r"^[\s\S]"
_MAX_FACTOR: Final = 1000  # its automaton has a state for each remainder
_MAX_LISTED: Final = 1000
_EXACT_BELOW: Final = 2**53  # the compiler reads numbers as doubles

_NUMBER: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_TYPE: Final[Mapping[str, tuple[str, ...]]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": _NUMBER,
    "number": _NUMBER,
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
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
_COMBINING: Final = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_UNSUPPORTED: Final = (
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
_CLASS: Final = re.compile(r"(?<!\\)((?:\\\\)*)\[(?:\\.|[^\]\\])*\]")
_MIDDLE_ANCHOR: Final = re.compile(r"^(?:\\.|[^\\$])*\$(?!$)|^(?:\\.|[^\\])(?:\\.|[^\\^])*\^", re.S)
# Formats whose grammar in xgrammar lets only well-formed JSON strings through.
_FORMATS: Final = frozenset({"date", "time", "date-time", "duration", "ipv4", "ipv6", "uuid"})
_WORD: Final = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_PATTERNS: Final[Mapping[str, str]] = {
    "email": rf"^[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_WORD}(\.{_WORD})+$",
    "hostname": rf"^{_WORD}(\.{_WORD})*$",
}


def marker(number: int) -> str:
    """What stands for pattern `number` in a prepared schema."""
    return f"^outrider-pattern-{number}-$"


def prepare_schema(schema: Any, patterns: list[str]) -> dict[str, Any] | bool:
    """The schema in a form that the grammar compiler enforces entirely.

    schema: as `json.loads` gives it. Patterns are put at the end of `patterns`, and the marker of
    their number in their place. Raises InvalidGrammarError naming the place and the keyword
    that cannot be enforced. Errors in the values of keywords are left to the compiler.
    """
    _check_depth(schema)
    return _Preparation(schema, patterns).prepare(schema, "#")


def _check_depth(schema: Any) -> None:
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidGrammarError(f"the schema is nested more than {MAX_DEPTH} levels deep")
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]


class _Preparation:
    """One schema's way through; `place` is a JSON pointer, for messages."""

    def __init__(self, document: Any, patterns: list[str]) -> None:
        self._document = document
        self._patterns = patterns

    def _mark(self, pattern: str) -> str:
        self._patterns.append(pattern)
        return marker(len(self._patterns) - 1)

    def prepare(self, schema: Any, place: str) -> dict[str, Any] | bool:
        """One schema or subschema, definitions included."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise InvalidGrammarError(f"{place}: a schema is an object or a boolean")
        for name in _UNSUPPORTED:
            if name in schema:
                raise _unsupported(place, name)
        prepared = self._constraint(schema, place)
        for name in ("$defs", "definitions"):
            definitions = schema.get(name)
            if isinstance(definitions, dict):
                prepared[name] = {
                    key: self.prepare(value, f"{place}/{name}/{key}")
                    for key, value in definitions.items()
                }
        return prepared

    def _constraint(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        combining = [name for name in _COMBINING if name in schema]
        if not combining:
            return self._typed(schema, place)
        name = combining[0]
        others = [*combining[1:], *_keywords(schema)]
        if name not in {"const", "enum"} and "type" in schema:
            others.append("type")
        if others:
            raise InvalidGrammarError(
                f"{place}: {others[0]!r} beside {name!r} is not supported in structured output"
            )
        match name:
            case "$ref":
                return {"$ref": self._reference(schema["$ref"], place)}
            case "const" | "enum":
                return _values(schema, name, place)
            case _:
                return self._branches(schema[name], name, f"{place}/{name}")

    def _reference(self, reference: Any, place: str) -> str:
        """A reference, checked: the compiler takes what it cannot find for "anything"."""
        if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
            raise InvalidGrammarError(f"{place}: $ref must point into the schema itself (#/…)")
        self._resolve(reference, place)
        return reference

    def _resolve(self, reference: str, place: str) -> Any:
        here = self._document
        for part in reference.split("/")[1:]:
            if "~" in part or "%" in part:
                raise InvalidGrammarError(f"{place}: escapes in $ref are not supported")
            if not isinstance(here, dict) or part not in here:
                raise InvalidGrammarError(f"{place}: $ref {reference!r} points nowhere")
            here = here[part]
        return here

    def _branches(self, branches: Any, name: str, place: str) -> dict[str, Any]:
        if not isinstance(branches, list) or not branches:
            raise InvalidGrammarError(f"{place}: must be a list of schemas, not empty")
        prepared = [self.prepare(item, f"{place}/{i}") for i, item in enumerate(branches)]
        if len(branches) == 1:
            only = prepared[0]
            return only if isinstance(only, dict) else {"anyOf": prepared}
        if name == "allOf":
            raise InvalidGrammarError(f"{place}: allOf with several schemas is not supported")
        if name == "oneOf" and not self._are_disjoint(branches, place):
            raise InvalidGrammarError(
                f"{place}: more than one branch may fit, which oneOf forbids and a grammar cannot "
                "exclude; use anyOf, or give the branches different types or constants"
            )
        return {"anyOf": prepared}

    def _are_disjoint(self, branches: list[Any], place: str) -> bool:
        """Whether no value can fit two branches, as far as types and constants tell."""
        shapes = [self._target(branch, place) for branch in branches]
        return all(
            _differ(one, other, lambda branch: self._target(branch, place))
            for index, one in enumerate(shapes)
            for other in shapes[:index]
        )

    def _target(self, branch: Any, place: str) -> dict[str, Any]:
        """What a chain of references ends at; {} where nothing is known."""
        for _ in range(MAX_DEPTH):
            if not isinstance(branch, dict):
                return {}
            if "$ref" not in branch:
                return branch
            branch = self._resolve(self._reference(branch["$ref"], place), place)
        return {}

    def _typed(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """A schema of types and their keywords."""
        kinds = schema.get("type", _implied_types(schema, place))
        if isinstance(kinds, str):
            return self._of_type(schema, kinds, place)
        if not isinstance(kinds, list) or not kinds or not all(kind in _OF_TYPE for kind in kinds):
            raise InvalidGrammarError(f"{place}: type={kinds!r} is not a type of JSON")
        if set(kinds) == set(_OF_TYPE):
            return {}
        return {"anyOf": [self._of_type(schema, kind, place) for kind in dict.fromkeys(kinds)]}

    def _of_type(self, schema: dict[str, Any], kind: str, place: str) -> dict[str, Any]:
        if kind not in _OF_TYPE:
            raise InvalidGrammarError(f"{place}: type={kind!r} is not a type of JSON")
        own = {name: schema[name] for name in _OF_TYPE[kind] if name in schema}
        match kind:
            case "string":
                own = _string(own, place)
                if "pattern" in own and not own["pattern"].startswith(_ANY_CHARACTER):
                    own["pattern"] = self._mark(own["pattern"])
            case "integer" | "number":
                own = _number(own, kind, place)
                if "enum" in own:
                    return own
            case "array":
                own = self._array(own, schema.get("uniqueItems"), place)
            case "object":
                own = self._object(own, place)
        return {"type": kind, **own}

    def _array(self, own: dict[str, Any], unique: Any, place: str) -> dict[str, Any]:
        if unique and own.get("maxItems") not in {0, 1}:
            raise _unsupported(place, "uniqueItems")
        rest = own.pop("unevaluatedItems", None)
        own.setdefault("items", rest)
        if own["items"] is None:
            own.pop("items")
            if "prefixItems" not in own and own:
                own["items"] = True
        if "items" in own:
            own["items"] = self.prepare(own["items"], f"{place}/items")
        if isinstance(own.get("prefixItems"), list):
            own["prefixItems"] = [
                self.prepare(item, f"{place}/prefixItems/{i}")
                for i, item in enumerate(own["prefixItems"])
            ]
        return own

    def _object(self, own: dict[str, Any], place: str) -> dict[str, Any]:
        """Properties that are required but not described are described by the rest's schema."""
        rest = own.pop("unevaluatedProperties", None)
        if rest is not None:
            own.setdefault("additionalProperties", rest)
        _check_property_patterns(own, place)
        for name in ("properties", "patternProperties"):
            if isinstance(own.get(name), dict):
                own[name] = {
                    key: self.prepare(value, f"{place}/{name}/{key}")
                    for key, value in own[name].items()
                }
        if isinstance(own.get("patternProperties"), dict):
            own["patternProperties"] = {
                self._mark(_checked_pattern(key, place)): value
                for key, value in own["patternProperties"].items()
            }
        for name in ("additionalProperties", "propertyNames"):
            if name in own:
                own[name] = self.prepare(own[name], f"{place}/{name}")
        return _complete_object(own, place)


def _check_property_patterns(own: dict[str, Any], place: str) -> None:
    """A key may fall under one schema only: the compiler's rules for keys overlap."""
    for name in ("patternProperties", "propertyNames"):
        if name in own and len(own.keys() - {"additionalProperties"}) > 1:
            raise _unsupported(place, f"{name} beside other properties")
    if own.get("patternProperties") and own.get("additionalProperties") not in {None, False}:
        raise _unsupported(place, "patternProperties beside additionalProperties")
    if len(own.get("patternProperties") or ()) > 1:
        raise _unsupported(place, "more than one pattern in patternProperties")


def _complete_object(own: dict[str, Any], place: str) -> dict[str, Any]:
    """Describe what is required and not described; refuse counts that would be unrolled."""
    properties = own.get("properties", {})
    required = own.get("required", [])
    if isinstance(properties, dict) and isinstance(required, list):
        missing = [name for name in required if name not in properties]
        rest = own.get("additionalProperties", True)
        if missing and rest is False:
            raise InvalidGrammarError(f"{place}: {missing[0]!r} is required and not allowed")
        if missing:
            own["properties"] = properties | dict.fromkeys(missing, rest)
        is_counted = "minProperties" in own or "maxProperties" in own
        if is_counted and len(own.get("properties", ())) > _MAX_COUNTED_PROPERTIES:
            raise _unsupported(
                place, f"counting more than {_MAX_COUNTED_PROPERTIES} described properties"
            )
        if is_counted and "properties" not in own and own.get("minProperties"):
            # Keys that repeat count once for a reader and twice for a grammar.
            raise _unsupported(place, "minProperties without described properties")
    return own


def _string(own: dict[str, Any], place: str) -> dict[str, Any]:
    """Lengths become a pattern: the compiler's own form of them lets raw tabs through."""
    bounds = {name: own[name] for name in ("minLength", "maxLength") if name in own}
    format_ = own.get("format")
    if "pattern" in own:
        if bounds:
            raise _unsupported(place, f"{min(bounds)} beside pattern")
        return {"pattern": _checked_pattern(own["pattern"], place)}
    if bounds:
        shortest, longest = bounds.get("minLength", 0), bounds.get("maxLength", "")
        for name, value in bounds.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidGrammarError(f"{place}: {name}={value!r} must be a whole number")
        if longest != "" and shortest > longest:
            raise InvalidGrammarError(f"{place}: minLength={shortest} is over maxLength={longest}")
        return {"pattern": f"{_ANY_CHARACTER}{{{shortest},{longest}}}$"}
    if isinstance(format_, str) and format_ in _PATTERNS:
        return {"pattern": _PATTERNS[format_]}
    return {"format": format_} if format_ in _FORMATS else {}


def _checked_pattern(pattern: Any, place: str) -> str:
    """A pattern whose anchors the compiler does not pass over."""
    if not isinstance(pattern, str):
        raise InvalidGrammarError(f"{place}: pattern must be a text")
    if _MIDDLE_ANCHOR.search(_CLASS.sub("a", pattern)):
        raise _unsupported(place, "^ or $ in the middle of a pattern")
    return pattern


def _number(own: dict[str, Any], kind: str, place: str) -> dict[str, Any]:
    for name, value in own.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or abs(value) >= _EXACT_BELOW:
            raise InvalidGrammarError(f"{place}: {name}={value!r} must be a number below 2**53")
    if kind == "integer":
        return _integer(own, place)
    if "multipleOf" in own:
        raise _unsupported(place, "multipleOf of a number that is no integer")
    low, high = own.get("minimum"), own.get("maximum")
    if low is not None and own.get("exclusiveMinimum", low - 1) >= low:
        del own["minimum"]
    elif low is not None:
        own.pop("exclusiveMinimum", None)
    if high is not None and own.get("exclusiveMaximum", high + 1) <= high:
        del own["maximum"]
    elif high is not None:
        own.pop("exclusiveMaximum", None)
    return own


def _integer(own: dict[str, Any], place: str) -> dict[str, Any]:
    """Whole bounds, both included; multiples within bounds are listed."""
    lows = [math.ceil(own["minimum"])] if "minimum" in own else []
    lows += [math.floor(own["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in own else []
    highs = [math.floor(own["maximum"])] if "maximum" in own else []
    highs += [math.ceil(own["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in own else []
    bounds = ({"minimum": max(lows)} if lows else {}) | ({"maximum": min(highs)} if highs else {})
    if lows and highs and max(lows) > min(highs):
        raise InvalidGrammarError(f"{place}: no integer lies between minimum and maximum")
    factor = own.get("multipleOf", 1)
    if factor == 1:
        return bounds
    if factor != int(factor) or not 1 <= factor <= _MAX_FACTOR:
        raise _unsupported(place, f"multipleOf={factor!r} (only 1 to {_MAX_FACTOR}, whole)")
    factor = int(factor)
    if not bounds:
        return {"multipleOf": factor}
    if len(bounds) < 2 or (bounds["maximum"] - bounds["minimum"]) // factor > _MAX_LISTED:
        raise _unsupported(place, f"multipleOf beside bounds with over {_MAX_LISTED} multiples")
    first = -(-bounds["minimum"] // factor) * factor
    values = list(range(first, bounds["maximum"] + 1, factor))
    if not values:
        raise InvalidGrammarError(f"{place}: no multiple of {factor} lies within the bounds")
    return {"enum": values}


def _values(schema: dict[str, Any], name: str, place: str) -> dict[str, Any]:
    """A constant or the values of an enum that are of the schema's type."""
    values = [schema["const"]] if name == "const" else schema["enum"]
    if not isinstance(values, list) or not values:
        raise InvalidGrammarError(f"{place}: enum must be a list, not empty")
    kinds = schema.get("type")
    if kinds is not None:
        wanted = {kinds} if isinstance(kinds, str) else set(kinds)
        values = [value for value in values if _types_of(value) & wanted]
        if not values:
            raise InvalidGrammarError(f"{place}: no value of {name} has the type {kinds!r}")
    for value in values:
        _check_exact(value, place)
    return {"enum": values}


def _check_exact(value: Any, place: str) -> None:
    """Raise for a number that the compiler would write otherwise than the schema does."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_exact(item, place)
    elif isinstance(value, int | float) and not abs(value) < _EXACT_BELOW:
        raise InvalidGrammarError(f"{place}: the number {value!r} must be below 2**53")


def _types_of(value: Any) -> set[str]:
    """The types of JSON that a value has; a whole number has two."""
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"integer", "number"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case None:
            return {"null"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def _keywords(schema: dict[str, Any]) -> list[str]:
    """The keywords of a schema that constrain values of some type."""
    known = {name for names in _OF_TYPE.values() for name in names if name != "format"}
    return [name for name in schema if name in known or name == "uniqueItems"]


def _implied_types(schema: dict[str, Any], place: str) -> list[str] | str:
    """The type whose keywords stand in a schema without one; all types where none does."""
    names = set(_keywords(schema))
    if not names:
        return list(_OF_TYPE)
    kinds = [kind for kind, own in _OF_TYPE.items() if names <= {*own, "uniqueItems"}]
    if not kinds:
        raise InvalidGrammarError(f"{place}: say which `type` has {', '.join(sorted(names))}")
    return "number" if "number" in kinds else kinds[0]


def _differ(
    one: dict[str, Any], other: dict[str, Any], target: Callable[[Any], dict[str, Any]]
) -> bool:
    """Whether two branches have no value in common, by their types or a tag that both require."""
    left, right = _possible(one), _possible(other)
    if left is not None and right is not None:
        return not any(value == item for value in left for item in right)
    types = [_branch_types(branch) for branch in (one, other)]
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    for name in shared:
        tags = [_possible(target(b.get("properties", {}).get(name))) for b in (one, other)]
        if tags[0] is not None and tags[1] is not None and not any(t in tags[1] for t in tags[0]):
            return types[0] == types[1] == {"object"}
    return False


def _possible(branch: dict[str, Any]) -> list[Any] | None:
    """The values of a constant or an enum."""
    if "const" in branch:
        return [branch["const"]]
    values = branch.get("enum")
    return values if isinstance(values, list) else None


def _branch_types(branch: dict[str, Any]) -> set[str]:
    """The types that a branch allows; empty where it does not say. Integers are numbers."""
    values = _possible(branch)
    if values is not None:
        types = {kind for value in values for kind in _types_of(value)}
    else:
        kinds = branch.get("type", [])
        types = {kinds} if isinstance(kinds, str) else set(kinds)
    return types | {"number"} if "integer" in types else types


def _unsupported(place: str, name: str) -> InvalidGrammarError:
    return InvalidGrammarError(f"{place}: {name} is not supported in structured output")
