"""JSON schemas, brought into the form in which llguidance enforces all of them.

It refuses what it cannot enforce. Here a schema gets what its author means and does not write (a
type for its keywords, objects that hold what they describe and nothing else) and loses what
constrains nothing: formats that nobody enforces (JSON Schema 2020-12, "Validation", section 7.2.3).
A lenient reading leaves out keywords that cannot be enforced, and names them.
"""

from typing import Any, Final
from urllib.parse import unquote

from outrider.engine.errors import InvalidGrammarError
from outrider.engine.grammar.json_bounds import BOUNDS, is_exact, round_bounds
from outrider.engine.grammar.json_disjoint import are_disjoint
from outrider.engine.grammar.json_pattern import DATES, is_regular, javascript
from outrider.engine.grammar.json_shape import (
    ARRAY,
    COMBINING,
    MAX_DEPTH,
    OBJECT,
    SCHEMA_MAPS,
    check_size,
    combines,
    pointer_part,
)

MAX_PATTERN_PROPERTIES: Final = 64
"""Patterns of keys in one object; llguidance compares each with each."""

Schema = dict[str, Any]

_WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,8}"
"""Between two tokens of an answer. Without a bound a weak model writes spaces to the end."""
_MOST_CHARS: Final = 10**9  # no answer is longer
_MAX_FACTOR: Final = 1000  # the automaton of `multipleOf` has a state for each remainder
_FORMATS: Final = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
_OF_TYPE: Final = {
    "number": BOUNDS,
    "string": ("minLength", "maxLength", "pattern"),
    "array": ARRAY,
    "object": OBJECT,
}
_DESCRIBING: Final = ("properties", "required", "patternProperties")
_NO_SCHEMAS: Final = ("const", "enum", "default", "examples", "example", "required", "type")
_UNENFORCED: Final = (
    *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
    *("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)
# What a keyword was called before `prepare` renamed it.
_WRITTEN: Final = {
    "anyOf": "oneOf",
    "prefixItems": "items",
    "items": "unevaluatedItems",
    "additionalProperties": "unevaluatedProperties",
}


def prepare_schema(
    schema: Any,
    *,
    left_out: list[str] | None = None,
    is_closing: bool | None = None,
    keeps_one_of: bool = True,
) -> Schema | bool:
    """Return the schema as llguidance is to read it.

    `schema`: as `json.loads` gives it. `left_out`: keywords that cannot be enforced are left out,
    and their JSON pointers are added to it. `is_closing`: objects hold what they describe and
    nothing else; None: unless the schema describes one object at several places. `keeps_one_of`:
    the compiler says whether branches of `oneOf` exclude each other where we cannot tell. Raises
    InvalidGrammarError naming the place of what an answer could break. Errors in the values of
    keywords are left to llguidance.
    """
    check_size(schema)
    if is_closing is None:
        is_closing = not combines(schema)
    preparation = _Preparation(
        schema, is_closing=is_closing, left_out=left_out, keeps_one_of=keeps_one_of
    )
    prepared = preparation.prepare(schema, "#")
    if isinstance(prepared, bool):
        return prepared
    if not isinstance(prepared, dict):
        raise InvalidGrammarError("#: a schema is an object or a boolean")
    return prepared | {"x-guidance": {"whitespace_pattern": _WHITESPACE}}


class _Preparation:
    """One schema's way through. `place` is a JSON pointer, for messages."""

    def __init__(
        self, document: Any, *, is_closing: bool, left_out: list[str] | None, keeps_one_of: bool
    ) -> None:
        self._document = document
        self._is_closing = is_closing
        self._left_out = left_out
        self._keeps_one_of = keeps_one_of

    def prepare(self, schema: Any, place: str) -> Any:
        """Prepare a schema or subschema; what is none is left for llguidance to refuse."""
        if not isinstance(schema, dict):
            return schema
        own = {name: value for name, value in schema.items() if name != "x-guidance"}
        self._check_numbers(own, place)
        self._check_reference(own, place)
        _modernise(own)
        round_bounds(own, place)
        self._describe_keys(own, place)
        self._drop_irregular(own, place)
        self._complete(own)
        _drop_counts(own)
        self._exclude(own, place)
        _describe_text(own)
        if self._left_out is not None:
            for name in _UNENFORCED:
                self._leave_out(own, place, name)
        return {
            name: self._within(name, value, f"{place}/{_written(name, schema)}")
            for name, value in own.items()
        }

    def _leave_out(self, own: Schema, place: str, name: str) -> None:
        """Leave a keyword out of a lenient schema, where it has it."""
        if self._left_out is not None and name in own:
            del own[name]
            self._left_out.append(f"{place.removeprefix('#')}/{name}")

    def _refuse(self, own: Schema, place: str, name: str, error: InvalidGrammarError) -> None:
        """Leave a keyword out, or raise the error where all are to be enforced."""
        if self._left_out is None:
            raise error
        self._leave_out(own, place, name)

    def _within(self, name: str, value: Any, place: str) -> Any:
        """The value of a keyword."""
        if name in _NO_SCHEMAS:
            return value
        if name in SCHEMA_MAPS and isinstance(value, dict):
            return {
                key: self.prepare(item, f"{place}/{pointer_part(key)}")
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.prepare(item, f"{place}/{i}") for i, item in enumerate(value)]
        return self.prepare(value, place)

    def _exclude(self, own: Schema, place: str) -> None:
        """Say `anyOf` for a `oneOf` whose branches exclude each other; llguidance sees few such."""
        branches = own.get("oneOf")
        if not isinstance(branches, list):
            return
        if "anyOf" not in own and self._are_disjoint(branches, place):
            own["anyOf"] = own.pop("oneOf")
        elif not self._keeps_one_of:
            self._leave_out(own, place, "oneOf")
            own.setdefault("anyOf", branches)

    def _are_disjoint(self, branches: list[Any], place: str) -> bool:
        try:
            return are_disjoint(branches, self._target, place)
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            if isinstance(error, InvalidGrammarError) and self._left_out is None:
                raise
            return False  # keywords with odd values: llguidance names them

    def _target(self, branch: Any) -> Schema:
        """Return what a chain of references ends at; {} where nothing is known."""
        for _ in range(MAX_DEPTH):
            if not isinstance(branch, dict):
                return {}
            if "$ref" not in branch:
                return branch
            branch = self._resolve(branch["$ref"])
        return {}

    def _at(self, reference: str) -> Any:
        """Return what lies at `#` or `#/…`; None where nothing does, or it is no such reference."""
        if not f"{reference}/".startswith("#/"):
            return None
        try:
            return self._resolve(reference)
        except (ValueError, LookupError, TypeError):
            return None

    def _resolve(self, reference: str) -> Any:
        """Return what lies at `#/…`. Raises LookupError or ValueError where nothing does."""
        here = self._document
        for part in unquote(reference.removeprefix("#")).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            here = here[int(name) if isinstance(here, list) else name]
        return here

    def _complete(self, own: Schema) -> None:
        """Write out what keywords imply: their type, and that nothing else is in it."""
        if own.keys().isdisjoint((*COMBINING, "const", "enum", "type")):
            kinds = [kind for kind, names in _OF_TYPE.items() if not own.keys().isdisjoint(names)]
            if kinds:
                own["type"] = kinds if len(kinds) > 1 else kinds[0]
        if not self._is_closing:
            return
        for rest, closed, describing in (
            ("unevaluatedProperties", "additionalProperties", _DESCRIBING),
            ("unevaluatedItems", "items", ("prefixItems",)),
        ):
            if isinstance(own.get(rest), dict | bool):
                own.setdefault(closed, own.pop(rest))
            if closed not in own and not own.keys().isdisjoint(describing):
                own[closed] = False
                _describe_required(own)

    def _check_numbers(self, own: Schema, place: str) -> None:
        """Refuse what an answer under the grammar could break, or what takes too long."""
        for name in ("const", "enum", *BOUNDS):
            if name in own and not is_exact(own[name]):
                error = InvalidGrammarError(f"{place}/{name}: numbers must be below 2**53")
                self._refuse(own, place, name, error)
        factor = own.get("multipleOf")
        if isinstance(factor, int | float) and factor > _MAX_FACTOR:
            error = _refusal(place, f"multipleOf={factor:g} (at most {_MAX_FACTOR})")
            self._refuse(own, place, "multipleOf", error)
        least = own.get("minProperties")
        if isinstance(least, int) and least > 1 and _num_required(own) < least:
            # Undescribed keys may repeat: they count once for a reader and twice for a grammar.
            error = _refusal(place, "minProperties over the number of required properties")
            self._refuse(own, place, "minProperties", error)
        patterns = own.get("patternProperties")
        if isinstance(patterns, dict) and len(patterns) > MAX_PATTERN_PROPERTIES:
            error = _refusal(
                place, f"patternProperties with over {MAX_PATTERN_PROPERTIES} patterns"
            )
            self._refuse(own, place, "patternProperties", error)
            own["additionalProperties"] = True

    def _check_reference(self, own: Schema, place: str) -> None:
        """Refuse a reference that leads back to itself before any value."""
        here, seen = own, set()
        while isinstance(reference := here.get("$ref"), str) and reference not in seen:
            seen.add(reference)
            target = self._at(reference)
            if not isinstance(target, dict):
                return
            here = target
        if "$ref" not in here:
            return
        error = InvalidGrammarError(f"{place}: no text conforms to a $ref that leads to itself")
        self._refuse(own, place, "$ref", error)

    def _drop_irregular(self, own: Schema, place: str) -> None:
        """Leave out patterns that are no regular expressions; llguidance names them otherwise."""
        if self._left_out is None:
            return
        if isinstance(own.get("pattern"), str) and not is_regular(own["pattern"]):
            self._leave_out(own, place, "pattern")
        keys = own.get("patternProperties")
        irregular = [key for key in keys if not is_regular(key)] if isinstance(keys, dict) else []
        if isinstance(keys, dict) and irregular:
            own["patternProperties"] = {
                key: value for key, value in keys.items() if key not in irregular
            }
            own["additionalProperties"] = True
            start = f"{place.removeprefix('#')}/patternProperties/"
            self._left_out += [start + pointer_part(key) for key in irregular]

    def _describe_keys(self, own: Schema, place: str) -> None:
        """Bring `propertyNames` into the form of patterns or properties, where they stand alone."""
        names = own.get("propertyNames")
        if not isinstance(names, dict) or names == {"type": "string"} or not names:
            if isinstance(names, dict):
                del own["propertyNames"]
            return
        described = None
        what = "propertyNames beside other descriptions of properties"
        if not own.keys() & {"properties", "patternProperties", "required"}:
            described, what = _keys_described(names), "this schema of propertyNames"
        if described is None:
            self._refuse(own, place, "propertyNames", _refusal(place, what))
            return
        keyword, keys = described
        rest = own.pop("unevaluatedProperties", True)
        own[keyword] = dict.fromkeys(keys, own.pop("additionalProperties", rest))
        del own["propertyNames"]
        own["additionalProperties"] = False


def _describe_required(own: Schema) -> None:
    """Let in what is required and not described, in an object that its author did not close."""
    described, named = own.get("properties", {}), own.get("required")
    is_plain = isinstance(described, dict) and "patternProperties" not in own
    if is_plain and isinstance(named, list):
        missing = [name for name in named if isinstance(name, str) and name not in described]
        own["properties"] = described | dict.fromkeys(missing, True)


def _written(name: str, schema: Schema) -> str:
    return name if name in schema else _WRITTEN.get(name, name)


def _num_required(own: Schema) -> int:
    named = own.get("required")
    return len(set(map(str, named))) if isinstance(named, list) else 0


def _num_in(described: Any) -> int:
    return len(described) if isinstance(described, dict) else 0


def _drop_counts(own: Schema) -> None:
    """Drop counts of keys that hold anyhow; llguidance refuses them beside optional keys."""
    least, most = own.get("minProperties"), own.get("maxProperties")
    described = own.get("properties", {})
    if isinstance(least, int) and _num_required(own) >= least:
        del own["minProperties"]
    is_closed = own.get("additionalProperties") is False and "patternProperties" not in own
    if isinstance(most, int) and is_closed and _num_in(described) <= most:
        del own["maxProperties"]


def _modernise(own: Schema) -> None:
    """Read what drafts before 2020-12 said: lists of `items`, and `exclusiveMinimum: true`."""
    if isinstance(own.get("items"), list) and "prefixItems" not in own:
        own["prefixItems"] = own.pop("items")
        own["items"] = own.pop("additionalItems", True)
    for bound in ("Minimum", "Maximum"):
        if isinstance(own.get(f"exclusive{bound}"), bool):
            is_excluded = own.pop(f"exclusive{bound}")
            if is_excluded and bound.lower() in own:
                own[f"exclusive{bound}"] = own.pop(bound.lower())


def _describe_text(own: Schema) -> None:
    """Write patterns and dates as expressions of llguidance; drop what constrains nothing."""
    format_ = own.get("format")
    is_text = not own.keys().isdisjoint(("type", "const", "enum"))
    if isinstance(format_, str) and not (is_text and format_ in _FORMATS):
        format_ = None
        del own["format"]
    if own.get("uniqueItems") is False:
        del own["uniqueItems"]
    if isinstance(own.get("maxLength"), int | float) and own["maxLength"] > _MOST_CHARS:
        del own["maxLength"]
    if isinstance(own.get("pattern"), str):
        own["pattern"] = javascript(own["pattern"], is_quoted=True)
    if isinstance(own.get("patternProperties"), dict):
        own["patternProperties"] = {
            javascript(key, is_quoted=True): value
            for key, value in own["patternProperties"].items()
        }
    if isinstance(format_, str) and format_ in DATES:
        del own["format"]
        if "pattern" in own:
            own["allOf"] = [*own.get("allOf", ()), {"pattern": own["pattern"]}]
        own["pattern"] = DATES[format_]


def _keys_described(names: Schema) -> tuple[str, list[str]] | None:
    """A keyword, and its keys, that describe the same keys as `propertyNames`; None for none."""
    match {name: names[name] for name in names if name not in ("type", "title", "description")}:
        case {"enum": [*listed], **others} if not others and all(map(_is_text, listed)):
            return "properties", listed
        case {"pattern": str(pattern), **others} if not others:
            return "patternProperties", [pattern]
        case {"minLength": _} | {"maxLength": _} as lengths if lengths.keys() <= _LENGTHS:
            least, most = lengths.get("minLength", 0), lengths.get("maxLength", "")
            return "patternProperties", [rf"^[\s\S]{{{least},{most}}}$"]
        case _:
            return None


_LENGTHS: Final = frozenset(("minLength", "maxLength"))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _refusal(place: str, what: str) -> InvalidGrammarError:
    return InvalidGrammarError(f"{place}: {what} is not supported in structured output")
