"""The grammar of arguments that are written between tags (gateway/answering/text/xml_values.py)."""

import json
from collections.abc import Mapping
from typing import Any, Final

from outrider.engine.request import MAX_GRAMMAR_BYTES
from outrider.gateway.answering.text.grammar_parts import (
    ANY_TEXT,
    GrammarPart,
    Literals,
    any_of,
    const,
    json_schema,
    note,
    optional,
    sequence,
    star,
)
from outrider.gateway.answering.text.tool_formats import XmlArguments
from outrider.gateway.answering.text.xml_values import target, value_form
from outrider.gateway.contract.errors.tree import BadRequestError

_OTHER_KEY: Final = "[a-zA-Z_][a-zA-Z0-9_-]{0,63}"
_MAX_LISTED: Final = 256
_MAX_REASON_CHARS: Final = 120
_DEFINITIONS: Final = ("$defs", "definitions")
# Each argument is enforced by itself, so nothing that speaks of several can be.
_UNSUPPORTED: Final = (
    *("$ref", "anyOf", "oneOf", "allOf", "not", "if", "enum", "const", "patternProperties"),
    *("propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
)


def xml_arguments_grammar(
    schema: Mapping[str, Any],
    name: str,
    xml: XmlArguments,
    literals: Literals,
    place: str,
    *,
    is_lenient: bool,
) -> list[GrammarPart]:
    """Return the parts for the arguments of function `name`: in the schema's order, none twice.

    Undescribed arguments come last, where the schema mentions them or describes none. `is_lenient`:
    what cannot be enforced is left out, and named by `place`, the schema's field. Raises
    BadRequestError for another schema that speaks of several arguments at once.
    """
    left_out = _unenforceable(schema) if is_lenient else []
    if is_lenient and _is_too_long(schema):
        left_out = list(schema)
    parts = note(place, [f"/{name}" for name in left_out])
    schema = {name: value for name, value in schema.items() if name not in left_out}
    if "additionalProperties" in left_out:
        schema["additionalProperties"] = True
    _check(schema, name)
    properties = schema.get("properties") or {}
    required = [key for key in schema.get("required") or () if isinstance(key, str)]
    others = schema.get("additionalProperties", not properties)
    rest = schema.get("additionalProperties", True)
    described = {**properties, **{key: rest for key in required if key not in properties}}
    for key, value in [*described.items(), ("additionalProperties", others)]:
        if not isinstance(value, Mapping | bool) or (value is False and key in required):
            raise _refusal(name, f"{key!r} with the schema {value!r}"[:_MAX_REASON_CHARS])
    builder = _Builder(schema, name, xml, literals, place, is_lenient=is_lenient)
    for key, value in described.items():
        part = builder.argument(literals.parts(xml.key_begin + key + xml.key_end), value, key)
        if value is not False:
            parts.append(part if key in required else optional(part))
    if others is not False:
        key_parts = [
            *literals.parts(xml.key_begin),
            {"type": "regex", "pattern": _OTHER_KEY},
            *literals.parts(xml.key_end),
        ]
        parts.append(star(builder.argument(key_parts, others, "")))
    return parts


def _check(schema: Mapping[str, Any], name: str) -> None:
    """Raise BadRequestError for a schema that speaks of several arguments at once."""
    if not isinstance(schema.get("properties", {}), Mapping | None):
        raise _refusal(name, "'properties' that are no object")
    if not isinstance(schema.get("required", []), list | None):
        raise _refusal(name, "'required' that is no list")
    for keyword in _UNSUPPORTED:
        if keyword in schema:
            raise _refusal(name, f"{keyword!r} at the top of a function's parameters")


def _unenforceable(schema: Mapping[str, Any]) -> list[str]:
    """Name the keywords at the top of a lenient schema that are left out."""
    properties = schema.get("properties", {})
    names = [keyword for keyword in _UNSUPPORTED if keyword in schema]
    is_described = isinstance(properties, Mapping) and all(map(_is_schema, properties.values()))
    if not is_described:
        names.append("properties")
    required = schema.get("required", [])
    is_listed = isinstance(required, list) and all(isinstance(key, str) for key in required)
    if not is_listed or (is_described and any(properties.get(key) is False for key in required)):
        names.append("required")
        required = []
    others = schema.get("additionalProperties", True)
    described = properties if is_described else {}
    has_others = any(key not in described for key in required)
    if not _is_schema(others) or (others is False and (has_others or not is_described)):
        names.append("additionalProperties")
    return names


def _is_too_long(schema: Mapping[str, Any]) -> bool:
    """Return whether a function has more arguments than a grammar can list."""
    listed = [schema.get("properties"), schema.get("required")]
    return sum(len(each) for each in listed if isinstance(each, Mapping | list)) > _MAX_LISTED


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _refusal(name: str, reason: str) -> BadRequestError:
    return BadRequestError(
        f"tools: function {name!r}: {reason} cannot be enforced in this model's format of tools.",
        param="tools",
    )


class _Builder:
    """Grammars of single arguments of one function."""

    def __init__(
        self,
        schema: Mapping[str, Any],
        name: str,
        xml: XmlArguments,
        literals: Literals,
        place: str,
        *,
        is_lenient: bool,
    ) -> None:
        self._document = schema
        self._name = name
        self._definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
        self._size_definitions = len(json.dumps(self._definitions))
        self._num_chars = 0  # of definitions, each time that an argument takes them along
        self._xml = xml
        self._literals = literals
        self._place = place
        self._is_lenient = is_lenient

    def argument(self, key_parts: list[GrammarPart], schema: Any, key: str) -> GrammarPart:
        """Build `key value`, with their tags and the line end behind them; key "": any other."""
        xml, parts = self._xml, self._literals.parts
        begin = parts(xml.value_begin + xml.pad)
        place = f"properties.{key}" if key else "additionalProperties"
        value = self._value(schema, f"{self._place}.{place}")
        return sequence([*key_parts, *begin, *value, *parts(xml.between)])

    def _value(self, schema: Any, place: str) -> list[GrammarPart]:
        """Build a value with the tag behind it."""
        xml = self._xml
        form = value_form(schema, self._document)
        resolved = target(schema, self._document)
        if form.mode == "json":
            whole = self._with_definitions(schema)
            value = json_schema(whole, place, is_lenient=self._is_lenient)
            return [value, *self._literals.parts(xml.pad + xml.value_end)]
        listed = _listed(resolved)
        if listed:
            return [any_of([*map(const, listed)]), *self._literals.parts(xml.pad + xml.value_end)]
        return self._text(resolved if isinstance(resolved, Mapping) else {})

    def _text(self, schema: Mapping[str, Any]) -> list[GrammarPart]:
        """Build any text of the schema's length up to its end.

        The characters that must be there are no `<`, so that the end cannot come among them.
        """
        xml = self._xml
        shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
        room = {} if longest is None else {"max_chars": longest - shortest}
        first = [{"type": "regex", "pattern": f"[^<]{{{shortest}}}"}] if shortest else []
        if self._literals.is_special(xml.value_end):
            text = {**ANY_TEXT, **room, "suffix": xml.pad}
            return [*first, text, *self._literals.parts(xml.value_end)]
        end = xml.pad + xml.value_end
        return [*first, *self._literals.until(end, excludes=xml.value_end, **room)]

    def _with_definitions(self, schema: Any) -> Any:
        """Take along the definitions that references in the schema point to."""
        if not isinstance(schema, Mapping) or '"$ref"' not in json.dumps(schema):
            return schema
        self._num_chars += self._size_definitions
        if self._num_chars > MAX_GRAMMAR_BYTES:  # before it is written out
            if self._is_lenient:  # references lead nowhere, and are left out by name
                return schema
            raise _refusal(self._name, "so many references to so large definitions")
        return {**self._definitions, **schema}


def _listed(schema: Any) -> list[str]:
    if not isinstance(schema, Mapping):
        return []
    return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))
