"""JSON schemas as the grammar compiler can enforce them, or the reason why it cannot.

xgrammar passes over keywords that it does not know, some known ones beside others, and lets control
characters into strings of bounded length. An answer must conform to all of its schema, so a schema
is brought here into a form whose grammar allows only conforming JSON, and refused where there is
none. Keywords that constrain nothing (titles, defaults, unknown formats) are dropped, as the
specification asks (JSON Schema 2020-12, "Validation", section 4.3).
"""

import re
from typing import Any, Final
from urllib.parse import unquote

from outrider.engine.grammar.grammar import InvalidGrammarError
from outrider.engine.grammar.json_disjoint import are_disjoint
from outrider.engine.grammar.json_keywords import (
    COMBINING,
    OF_TYPE,
    UNSUPPORTED,
    check_values,
    constraining_keywords,
    implied_types,
    unsupported,
)
from outrider.engine.grammar.json_scalars import (
    StringRule,
    checked_pattern,
    prepare_number,
    prepare_string,
    prepare_values,
)

MAX_DEPTH: Final = 100
"""Nesting of the schema's JSON. The compiler's time grows with its third power."""
MAX_VALUES: Final = 8192
"""JSON values in a schema, keywords included: each is at least a rule of the grammar."""
MAX_PATTERNS: Final = 128
"""Patterns of strings and of property names; each is compiled by itself and joined to the rest."""

# Names with escapes, and places in lists (which look like names that are numbers), are no such.
_PLAIN_REFERENCE: Final = re.compile(r"#(/(?!\d+(/|$))[^/~%]*)*")
_MAX_NAMED: Final = 64  # each has its definition prepared once more

_MAX_COUNTED_PROPERTIES: Final = 64  # the compiler unrolls all selections of them


def marker(number: int) -> str:
    """Return what stands for pattern `number` in a prepared schema."""
    return f"^outrider-pattern-{number}-$"


def prepare_schema(schema: Any, patterns: list[StringRule]) -> dict[str, Any] | bool:
    """The schema in a form that the grammar compiler enforces entirely.

    schema: as `json.loads` gives it. Patterns are put at the end of `patterns`, and the marker of
    their number in their place. Raises InvalidGrammarError naming the place and the keyword
    that cannot be enforced. Errors in the values of keywords are left to the compiler.
    """
    _check_size(schema)
    return _Preparation(schema, patterns).whole()


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

    def __init__(self, document: Any, patterns: list[StringRule]) -> None:
        self._document = document
        self._patterns = patterns
        self._named: dict[str, str] = {}  # references that the compiler cannot follow, by name

    def whole(self) -> dict[str, Any] | bool:
        """The document, with a definition for each reference that the compiler cannot follow."""
        prepared = self.prepare(self._document, "#")
        done: dict[str, Any] = {}
        while len(done) < len(self._named):
            name, reference = list(self._named.items())[len(done)]
            done[name] = self.prepare(self._resolve(reference, reference), reference)
        if done and isinstance(prepared, dict):
            prepared["$defs"] = prepared.get("$defs", {}) | done
        return prepared

    def _mark(self, pattern: StringRule, place: str) -> str:
        if pattern in self._patterns:
            return marker(self._patterns.index(pattern))
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
        for name in UNSUPPORTED:
            if name in schema:
                raise unsupported(place, name)
        check_values(schema, place)
        prepared = self._constraint(schema, place)
        for name in ("$defs", "definitions"):
            if name in schema:
                prepared[name] = {
                    key: self.prepare(value, f"{place}/{name}/{key}")
                    for key, value in schema[name].items()
                }
        return prepared

    def _constraint(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        combining = [name for name in COMBINING if name in schema]
        if not combining:
            return self._typed(schema, place)
        name = combining[0]
        others = [*combining[1:], *constraining_keywords(schema)]
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
                return prepare_values(schema, name, place)
            case _:
                return self._branches(schema[name], name, f"{place}/{name}")

    def _reference(self, reference: str, place: str) -> str:
        """A reference, checked: the compiler takes what it cannot find for "anything"."""
        self._resolve(reference, place)
        if _PLAIN_REFERENCE.fullmatch(reference):
            return reference
        known = {reference: name for name, reference in self._named.items()}
        name = known.get(reference, f"outrider-reference-{len(known)}")
        if len(self._named | {name: reference}) > _MAX_NAMED:
            raise InvalidGrammarError(f"{place}: more than {_MAX_NAMED} references with escapes")
        self._named[name] = reference
        return f"#/$defs/{name}"

    def _resolve(self, reference: str, place: str) -> Any:
        if not (reference + "/").startswith("#/"):
            raise InvalidGrammarError(f"{place}: $ref must point into the schema itself (#/…)")
        here = self._document
        for part in unquote(reference).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(here, list) and name.isdecimal() and int(name[:9]) < len(here):
                here = here[int(name)]
            elif isinstance(here, dict) and name in here:
                here = here[name]
            else:
                raise InvalidGrammarError(f"{place}: $ref {reference!r} points nowhere")
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
            check_values(branch, place)  # it may be a definition that was not looked at yet
            if "$ref" not in branch:
                return branch
            branch = self._resolve(branch["$ref"], place)
        return {}

    def _typed(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """A schema of types and their keywords."""
        kinds = schema.get("type", implied_types(schema, place))
        if isinstance(kinds, str):
            return self._of_type(schema, kinds, place)
        if set(kinds) == set(OF_TYPE) and not constraining_keywords(schema):
            return {}
        return {"anyOf": [self._of_type(schema, kind, place) for kind in dict.fromkeys(kinds)]}

    def _of_type(self, schema: dict[str, Any], kind: str, place: str) -> dict[str, Any]:
        own = {name: schema[name] for name in OF_TYPE[kind] if name in schema}
        match kind:
            case "string":
                text = prepare_string(own, place)
                own = text if isinstance(text, dict) else {"pattern": self._mark(text, place)}
            case "integer" | "number":
                own = prepare_number(own, kind, place)
                if "enum" in own:
                    return own
            case "array":
                own = self._array(own, place)
            case "object":
                own = self._object(own, place)
        return {"type": kind, **own}

    def _array(self, own: dict[str, Any], place: str) -> dict[str, Any]:
        if own.pop("uniqueItems", False) and own.get("maxItems") not in {0, 1}:
            raise unsupported(place, "uniqueItems")
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
                self._mark(checked_pattern(key, place), place): value
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
            raise unsupported(place, f"{name} beside other properties")
    if own.get("patternProperties") and own.get("additionalProperties") not in (None, False):
        raise unsupported(place, "patternProperties beside additionalProperties")
    if len(own.get("patternProperties") or ()) > 1:
        raise unsupported(place, "more than one pattern in patternProperties")


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
        raise unsupported(
            place, f"counting more than {_MAX_COUNTED_PROPERTIES} described properties"
        )
    if is_counted and "properties" not in own and own.get("minProperties"):
        # Keys that repeat count once for a reader and twice for a grammar.
        raise unsupported(place, "minProperties without described properties")
    if own.keys() == {"maxProperties"}:  # it describes nothing, so it closes nothing
        own["additionalProperties"] = True
    return own
