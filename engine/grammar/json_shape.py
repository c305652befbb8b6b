"""The shape of JSON schemas: their size, where schemas lie in them, and what describes what."""

from typing import Any, Final

from outrider.engine.errors import InvalidGrammarError

TYPES: Final = ("string", "number", "integer", "boolean", "null", "array", "object")
"""The types of JSON values."""
MAX_DEPTH: Final = 100
"""Nesting of a schema's JSON."""
MAX_VALUES: Final = 8192
"""JSON values in a schema, keywords included: each is at least a symbol of the grammar."""
SCHEMA_MAPS: Final = (
    *("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"),
)
"""Keywords whose values map names to schemas."""
# Keywords: of objects, of arrays, and those that combine schemas of one value.
OBJECT: Final = (
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "unevaluatedProperties"),
)
ARRAY: Final = ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems", "uniqueItems")
_NESTING: Final = (*OBJECT, *ARRAY)
COMBINING: Final = ("$ref", "allOf", "anyOf", "oneOf")
# They describe an object or an array beside its own keywords, and no grammar enforces them.
_CONDITIONAL: Final = ("if", "dependentSchemas", "$dynamicRef", "contains")


def check_size(schema: Any) -> None:
    """Raise for a schema that is nested too deeply or has too many values."""
    level, depth, num_values = [schema], 0, 0
    while level:
        depth += 1
        num_values += len(level)
        if num_values > MAX_VALUES:
            raise InvalidGrammarError(f"the schema has more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise InvalidGrammarError(f"the schema is nested more than {MAX_DEPTH} levels deep")
        level = [child for value in level for child in children(value)]


def children(value: Any) -> list[Any]:
    """Return what lies in a value of JSON."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def combines(schema: Any) -> bool:
    """Return whether descriptions of one object lie at several places: none may close it."""
    level = [schema]
    while level:
        if any(isinstance(value, dict) and _combines(value) for value in level):
            return True
        level = [child for value in level for child in children(value)]
    return False


def _combines(schema: dict[str, Any]) -> bool:
    combining = sum(name in schema for name in COMBINING)
    parts = schema.get("allOf")
    is_several = isinstance(parts, list) and len(parts) > 1
    has_conditions = not schema.keys().isdisjoint(_CONDITIONAL)
    is_beside = (combining or has_conditions) and not schema.keys().isdisjoint(_NESTING)
    return bool(is_several or combining > 1 or is_beside)


def pointer_part(name: str | int) -> str:
    """Write a name as a part of a JSON pointer (RFC 6901)."""
    return str(name).replace("~", "~0").replace("/", "~1")
