"""JSON schemas, brought into the form in which llguidance enforces all of them.

It refuses what it cannot enforce. Here a schema gets what its author means and does not write (a
type for its keywords, objects that hold what they describe and nothing else) and loses what
constrains nothing: formats that nobody enforces (JSON Schema 2020-12, "Validation", section 7.2.3).
"""

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, Final
from urllib.parse import unquote

from outrider.engine.errors import InvalidGrammarError
from outrider.engine.grammar.json_disjoint import are_disjoint
from outrider.engine.grammar.json_pattern import DATES, javascript

MAX_DEPTH: Final = 100
"""Nesting of a schema's JSON."""
MAX_VALUES: Final = 8192
"""JSON values in a schema, keywords included: each is at least a symbol of the grammar."""
MAX_PATTERN_PROPERTIES: Final = 64
"""Patterns of keys in one object; llguidance compares each with each."""

Schema = dict[str, Any]

_WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,8}"
"""Between two tokens of an answer. Without a bound a weak model writes spaces to the end."""
_EXACT_BELOW: Final = 2**53  # whole numbers that are exact as the doubles that llguidance reads
_MOST_CHARS: Final = 10**9  # no answer is longer
_STEPS: Final = (Decimal("1e-6"), Decimal("1e-9"), Decimal("1e-12"))  # of bounds of numbers
_MAX_FACTOR: Final = 1000  # the automaton of `multipleOf` has a state for each remainder
_FORMATS: Final = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OBJECT: Final = (
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "unevaluatedProperties"),
)
_ARRAY: Final = ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems", "uniqueItems")
_OF_TYPE: Final = {
    "number": _BOUNDS,
    "string": ("minLength", "maxLength", "pattern"),
    "array": _ARRAY,
    "object": _OBJECT,
}
_NESTING: Final = (*_OBJECT, *_ARRAY)
_DESCRIBING: Final = ("properties", "required", "patternProperties")
_COMBINING: Final = ("$ref", "allOf", "anyOf", "oneOf")
_NO_SCHEMAS: Final = ("const", "enum", "default", "examples", "example", "required", "type")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def prepare_schema(schema: Any, *, is_lenient: bool = False) -> Schema | bool:
    """Return the schema as llguidance is to read it.

    `schema`: as `json.loads` gives it. `is_lenient`: keywords that cannot be enforced are left out.
    Raises InvalidGrammarError naming the place of what an answer could break. Errors in the values
    of keywords are left to llguidance.
    """
    _check_size(schema)
    prepared = _Preparation(schema, is_closing=not _combines(schema)).prepare(schema, "#")
    if isinstance(prepared, bool):
        return prepared
    if not isinstance(prepared, dict):
        raise InvalidGrammarError("#: a schema is an object or a boolean")
    options: Schema = {"whitespace_pattern": _WHITESPACE}
    return prepared | {"x-guidance": options | ({"lenient": True} if is_lenient else {})}


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
        level = [child for value in level for child in _children(value)]


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _combines(schema: Any) -> bool:
    """True if descriptions of one object lie at several places: none may close it by itself."""
    if isinstance(schema, dict):
        combining = sum(name in schema for name in _COMBINING)
        parts = schema.get("allOf")
        is_several = isinstance(parts, list) and len(parts) > 1
        if is_several or combining > 1 or (combining and not schema.keys().isdisjoint(_NESTING)):
            return True
    return any(map(_combines, _children(schema)))


class _Preparation:
    """One schema's way through. `place` is a JSON pointer, for messages."""

    def __init__(self, document: Any, *, is_closing: bool) -> None:
        self._document = document
        self._is_closing = is_closing

    def prepare(self, schema: Any, place: str) -> Any:
        """Prepare a schema or subschema; what is none is left for llguidance to refuse."""
        if not isinstance(schema, dict):
            return schema
        own = {name: value for name, value in schema.items() if name != "x-guidance"}
        _check_numbers(own, place)
        _modernise(own)
        _round_bounds(own, place)
        _describe_keys(own, place)
        self._complete(own)
        _drop_counts(own)
        self._exclude(own, place)
        _describe_text(own)
        return {name: self._within(name, value, f"{place}/{name}") for name, value in own.items()}

    def _within(self, name: str, value: Any, place: str) -> Any:
        """The value of a keyword."""
        if name in _NO_SCHEMAS:
            return value
        if name in _MAPS and isinstance(value, dict):
            return {key: self.prepare(item, f"{place}/{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [self.prepare(item, f"{place}/{i}") for i, item in enumerate(value)]
        return self.prepare(value, place)

    def _exclude(self, own: Schema, place: str) -> None:
        """Say `anyOf` for a `oneOf` whose branches exclude each other; llguidance sees few such."""
        branches = own.get("oneOf")
        if not isinstance(branches, list) or "anyOf" in own:
            return
        try:
            is_plain = are_disjoint(branches, self._target, place)
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            if isinstance(error, InvalidGrammarError):
                raise
            return  # keywords with odd values: llguidance names them
        if is_plain:
            own["anyOf"] = own.pop("oneOf")

    def _target(self, branch: Any) -> Schema:
        """Return what a chain of references ends at; {} where nothing is known."""
        for _ in range(MAX_DEPTH):
            if not isinstance(branch, dict):
                return {}
            if "$ref" not in branch:
                return branch
            branch = self._resolve(branch["$ref"])
        return {}

    def _resolve(self, reference: str) -> Any:
        """Return what lies at `#/…`. Raises LookupError or ValueError where nothing does."""
        here = self._document
        for part in unquote(reference.removeprefix("#")).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            here = here[int(name) if isinstance(here, list) else name]
        return here

    def _complete(self, own: Schema) -> None:
        """Write out what keywords imply: their type, and that nothing else is in it."""
        if own.keys().isdisjoint((*_COMBINING, "const", "enum", "type")):
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


def _describe_required(own: Schema) -> None:
    """Let in what is required and not described, in an object that its author did not close."""
    described, named = own.get("properties", {}), own.get("required")
    is_plain = isinstance(described, dict) and "patternProperties" not in own
    if is_plain and isinstance(named, list):
        missing = [name for name in named if isinstance(name, str) and name not in described]
        own["properties"] = described | dict.fromkeys(missing, True)


def _check_numbers(own: Schema, place: str) -> None:
    """Raise for what an answer under the grammar could break, or what takes too long."""
    for name in ("const", "enum", *_BOUNDS):
        if name in own and not _is_exact(own[name]):
            raise InvalidGrammarError(f"{place}/{name}: numbers must be below 2**53")
    factor = own.get("multipleOf")
    if isinstance(factor, int | float) and factor > _MAX_FACTOR:
        raise _refusal(place, f"multipleOf={factor:g} (at most {_MAX_FACTOR})")
    least = own.get("minProperties")
    if isinstance(least, int) and least > 1 and _num_required(own) < least:
        # Undescribed keys may repeat: they count once for a reader and twice for a grammar.
        raise _refusal(place, "minProperties over the number of required properties")
    patterns = own.get("patternProperties")
    if isinstance(patterns, dict) and len(patterns) > MAX_PATTERN_PROPERTIES:
        raise _refusal(place, f"patternProperties with over {MAX_PATTERN_PROPERTIES} patterns")


def _round_bounds(own: Schema, place: str) -> None:
    """Replace bounds of many decimals by ones of fewer within them.

    Numbers are read as doubles: one of sixteen digits may lie beyond a bound that its text keeps.
    """
    ends = {name: own[name] for name in _BOUNDS if name != "multipleOf" and name in own}
    if own.get("type") == "integer" or not all(map(_is_number, ends.values())):
        return
    found = {name: Decimal(str(value)) for name, value in ends.items()}
    lows = [value for name, value in found.items() if name.endswith("inimum")]
    highs = [value for name, value in found.items() if name.endswith("aximum")]
    width = abs(min(highs) - max(lows)) if lows and highs else Decimal(1)
    step = next((step for step in _STEPS if step * 100 <= width), _STEPS[-1])
    for name, value in found.items():
        is_low = name.endswith("inimum")
        rounded = value.quantize(step, ROUND_CEILING if is_low else ROUND_FLOOR)
        if rounded == value:
            continue
        del own[name]
        bound, bounded = ("minimum", max) if is_low else ("maximum", min)
        own[bound] = bounded(float(rounded), own.get(bound, float(rounded)))
    if "minimum" in own and "maximum" in own and own["minimum"] > own["maximum"]:
        raise InvalidGrammarError(f"{place}: no number of twelve decimals lies within the bounds")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


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


def _is_exact(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_exact, _children(value)))
    return not isinstance(value, int | float) or abs(value) < _EXACT_BELOW


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


def _describe_keys(own: Schema, place: str) -> None:
    """Bring `propertyNames` into the form of patterns or properties, where they stand alone."""
    names = own.get("propertyNames")
    if not isinstance(names, dict) or names == {"type": "string"} or not names:
        if isinstance(names, dict):
            del own["propertyNames"]
        return
    if own.keys() & {"properties", "patternProperties", "required"}:
        raise _refusal(place, "propertyNames beside other descriptions of properties")
    rest = own.pop("unevaluatedProperties", True)
    value = own.pop("additionalProperties", rest)
    match {name: names[name] for name in names if name not in ("type", "title", "description")}:
        case {"enum": [*listed], **others} if not others and all(map(_is_text, listed)):
            own["properties"] = dict.fromkeys(listed, value)
        case {"pattern": str(pattern), **others} if not others:
            own["patternProperties"] = {pattern: value}
        case {"minLength": _} | {"maxLength": _} as lengths if lengths.keys() <= _LENGTHS:
            least, most = lengths.get("minLength", 0), lengths.get("maxLength", "")
            own["patternProperties"] = {rf"^[\s\S]{{{least},{most}}}$": value}
        case _:
            raise _refusal(place, "this schema of propertyNames")
    del own["propertyNames"]
    own["additionalProperties"] = False


_LENGTHS: Final = frozenset(("minLength", "maxLength"))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _refusal(place: str, what: str) -> InvalidGrammarError:
    return InvalidGrammarError(f"{place}: {what} is not supported in structured output")
