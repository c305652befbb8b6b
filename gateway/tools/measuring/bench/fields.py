"""Fields of a request's body from the command line: `outrider.max_draft_nodes=32`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

RequestFields = Mapping[str, Any]

_OURS: Final = frozenset({"messages", "stream", "model"})


class FieldError(Exception):
    """A field cannot be set; the message says what is right."""


def parse_fields(texts: Sequence[str]) -> dict[str, Any]:
    """`a.b=VALUE` to nested objects. A value is JSON, else a text.

    Raises FieldError for what is none, is set twice or is the benchmark's own.
    """
    fields: dict[str, Any] = {}
    for text in texts:
        path, separator, value = text.partition("=")
        names = path.strip().split(".")
        if not separator or not all(names):
            raise FieldError(f"{text!r} is not a field; write NAME=VALUE, as in temperature=0.7")
        if names[0] in _OURS:
            raise FieldError(f"{names[0]} is set by the benchmark itself; use its flag")
        _put(fields, names, _value(value), text)
    return fields


def _put(fields: dict[str, Any], names: Sequence[str], value: Any, text: str) -> None:
    for name in names[:-1]:
        fields = fields.setdefault(name, {})
        if not isinstance(fields, dict):
            raise FieldError(f"{text!r}: {name} has a value already")
    if names[-1] in fields:
        raise FieldError(f"{text!r}: {names[-1]} is set twice")
    fields[names[-1]] = value


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def merge_fields(base: RequestFields, more: RequestFields) -> dict[str, Any]:
    """`more` over `base`; objects are merged, everything else replaced."""
    merged = dict(base)
    for name, value in more.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[name] = merge_fields(old, value)
        else:
            merged[name] = value
    return merged
