"""JSON schemas as the grammar compiler can enforce them, or the reason why it cannot.

xgrammar passes over keywords that it does not know, some known ones beside others, and lets control
characters into strings of bounded length. An answer must conform to all of its schema, so a schema
is brought here into a form whose grammar allows only conforming JSON, and refused where there is
none. Keywords that constrain nothing (titles, defaults, unknown formats) are dropped, as the
specification asks (JSON Schema 2020-12, "Validation", section 4.3).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from engine.grammar.grammar import InvalidGrammarError
from engine.grammar.json_disjoint import are_disjoint, types_of

MAX_DEPTH: Final = 100
"""Nesting of the schema's JSON. The compiler's time grows with its third power."""
MAX_VALUES: Final = 8192
"""JSON values in a schema, keywords included: each is at least a rule of the grammar."""
MAX_PATTERN_CHARS: Final = 2048
MAX_PATTERNS: Final = 128
"""Patterns of strings and of property names; each is compiled by itself and joined to the rest."""

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
# What the values of keywords must be, in words for messages; looked at once, by `_check_values`.
_SHAPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), "object"),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "enum", "prefixItems"), "list"),
    "required": "list of names",
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), "whole number"),
    **dict.fromkeys(("minProperties", "maxProperties"), "whole number"),
    **dict.fromkeys(("pattern", "$ref", "format"), "text"),
    "uniqueItems": "boolean",
    "type": "type",
}
# Formats whose grammar in xgrammar lets only well-formed JSON strings through.
_FORMATS: Final = frozenset({"date", "time", "date-time", "duration", "ipv4", "ipv6", "uuid"})
_WORD: Final = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_PATTERNS: Final[Mapping[str, str]] = {
    "email": rf"^[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_WORD}(\.{_WORD})+$",
    "hostname": rf"^{_WORD}(\.{_WORD})*$",
}


def marker(number: int) -> str:
    """Return what stands for pattern `number` in a prepared schema."""
    return f"^outrider-pattern-{number}-$"


def prepare_schema(schema: Any, patterns: list[str]) -> dict[str, Any] | bool:
    """The schema in a form that the grammar compiler enforces entirely.

    schema: as `json.loads` gives it. Patterns are put at the end of `patterns`, and the marker of
    their number in their place. Raises InvalidGrammarError naming the place and the keyword
    that cannot be enforced. Errors in the values of keywords are left to the compiler.
    """
    _check_size(schema)
    return _Preparation(schema, patterns).prepare(schema, "#")


def _check_size(schema: Any) -> None:
    """Raise for a schema that is nested too deeply or has too many values."""
    level, depth, num_values = [schema], 0, 0
    while level:
        depth += 1
        num_values += len(level)
        if num_values > MAX_VALUES:
            raise InvalidGrammarError(f"the schema has more than {MAX_VALUES} values")
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

    def _mark(self, pattern: str, place: str) -> str:
        if len(self._patterns) == MAX_PATTERNS:
            raise InvalidGrammarError(f"{place}: more than {MAX_PATTERNS} patterns in one request")
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
        _check_values(schema, place)
        prepared = self._constraint(schema, place)
        for name in ("$defs", "definitions"):
            if name in schema:
                prepared[name] = {
                    key: self.prepare(value, f"{place}/{name}/{key}")
                    for key, value in schema[name].items()
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

    def _reference(self, reference: str, place: str) -> str:
        """A reference, checked: the compiler takes what it cannot find for "anything"."""
        if not (reference + "/").startswith("#/"):
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

    def _branches(self, branches: list[Any], name: str, place: str) -> dict[str, Any]:
        if not branches:
            raise InvalidGrammarError(f"{place}: must be a list of schemas, not empty")
        prepared = [self.prepare(item, f"{place}/{i}") for i, item in enumerate(branches)]
        if len(branches) == 1:
            only = prepared[0]
            return only if isinstance(only, dict) else {"anyOf": prepared}
        if name == "allOf":
            raise InvalidGrammarError(f"{place}: allOf with several schemas is not supported")
        if name == "oneOf" and not are_disjoint(branches, lambda b: self._target(b, place), place):
            raise InvalidGrammarError(
                f"{place}: more than one branch may fit, which oneOf forbids and a grammar cannot "
                "exclude; use anyOf, or give the branches different types or constants"
            )
        return {"anyOf": prepared}

    def _target(self, branch: Any, place: str) -> dict[str, Any]:
        """Return what a chain of references ends at; {} where nothing is known."""
        for _ in range(MAX_DEPTH):
            if not isinstance(branch, dict):
                return {}
            _check_values(branch, place)  # it may be a definition that was not looked at yet
            if "$ref" not in branch:
                return branch
            branch = self._resolve(self._reference(branch["$ref"], place), place)
        return {}

    def _typed(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """A schema of types and their keywords."""
        kinds = schema.get("type", _implied_types(schema, place))
        if isinstance(kinds, str):
            return self._of_type(schema, kinds, place)
        if set(kinds) == set(_OF_TYPE):
            return {}
        return {"anyOf": [self._of_type(schema, kind, place) for kind in dict.fromkeys(kinds)]}

    def _of_type(self, schema: dict[str, Any], kind: str, place: str) -> dict[str, Any]:
        own = {name: schema[name] for name in _OF_TYPE[kind] if name in schema}
        match kind:
            case "string":
                own = _string(own, place)
                if "pattern" in own and not own["pattern"].startswith(_ANY_CHARACTER):
                    own["pattern"] = self._mark(own["pattern"], place)
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
        if "prefixItems" in own:
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
            if name in own:
                own[name] = {
                    key: self.prepare(value, f"{place}/{name}/{key}")
                    for key, value in own[name].items()
                }
        if "patternProperties" in own:
            own["patternProperties"] = {
                self._mark(_checked_pattern(key, place), place): value
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
        if longest != "" and shortest > longest:
            raise InvalidGrammarError(f"{place}: minLength={shortest} is over maxLength={longest}")
        return {"pattern": f"{_ANY_CHARACTER}{{{shortest},{longest}}}$"}
    if isinstance(format_, str) and format_ in _PATTERNS:
        return {"pattern": _PATTERNS[format_]}
    return {"format": format_} if format_ in _FORMATS else {}


def _checked_pattern(pattern: str, place: str) -> str:
    """A pattern whose anchors the compiler does not pass over."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidGrammarError(
            f"{place}: the pattern has {len(pattern)} characters; the limit is {MAX_PATTERN_CHARS}"
        )
    last = len(pattern) - 1
    if any((c == "^" and i > 0) or (c == "$" and i < last) for i, c in _bare_characters(pattern)):
        raise _unsupported(place, "^ or $ in the middle of a pattern")
    return pattern


def _bare_characters(pattern: str) -> Iterator[tuple[int, str]]:
    """Places and characters outside classes that no backslash escapes, in one walk."""
    is_escaped = is_in_class = False
    for index, char in enumerate(pattern):
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = True
        elif is_in_class:
            is_in_class = char != "]"
        elif char == "[":
            is_in_class = True
        else:
            yield index, char


def _number(own: dict[str, Any], kind: str, place: str) -> dict[str, Any]:
    for name, value in own.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared, not converted: an integer of 400 digits is no float. NaN is below nothing.
        if not is_number or not abs(value) < _EXACT_BELOW:
            raise InvalidGrammarError(
                f"{place}: {name}={_shown(value)} must be a number below 2**53"
            )
    if kind == "integer":
        return _integer(own, place)
    if "multipleOf" in own:
        raise _unsupported(place, "multipleOf of a number that is not an integer")
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
        raise _unsupported(place, f"multipleOf={_shown(factor)} (only 1 to {_MAX_FACTOR}, whole)")
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
    if not values:
        raise InvalidGrammarError(f"{place}: enum must be a list, not empty")
    kinds = schema.get("type")
    if kinds is not None:
        wanted = {kinds} if isinstance(kinds, str) else set(kinds)
        values = [value for value in values if types_of(value) & wanted]
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
        raise InvalidGrammarError(f"{place}: the number {_shown(value)} must be below 2**53")


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
        raise InvalidGrammarError(f"{place}: set the `type` that has {', '.join(sorted(names))}")
    return "number" if "number" in kinds else kinds[0]


def _check_values(schema: dict[str, Any], place: str) -> None:
    """Raise where a keyword has a value of a kind that this module does not expect."""
    for name in schema.keys() & _SHAPES.keys():
        shape = _SHAPES[name]
        if not _has_shape(schema[name], shape):
            raise InvalidGrammarError(
                f"{place}: {name}={_shown(schema[name])} must be "
                + (f"one of {', '.join(_OF_TYPE)}, or a list of them" if shape == "type" else shape)
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
            return type(value) is int and 0 <= value < _EXACT_BELOW
        case "text":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case _:
            kinds = [value] if isinstance(value, str) else value
            return (
                isinstance(kinds, list)
                and bool(kinds)
                and all(isinstance(kind, str) and kind in _OF_TYPE for kind in kinds)
            )


def _shown(value: Any) -> str:
    """A value for a message: JSON that a client sent, shortened."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return "an integer of more than 40 digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _unsupported(place: str, name: str) -> InvalidGrammarError:
    return InvalidGrammarError(f"{place}: {name} is not supported in structured output")
