"""Bounds on a JSON body, checked in one pass over its bytes before anything parses it.

A parser holds the interpreter while it works, and takes the longer the more values there are. Only
bytes are counted here, by functions that take about a millisecond for a megabyte.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from gateway.errors.tree import BodyTooComplexError

_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_COUNTED: Final = {
    "max_json_strings": "texts and names",
    "max_json_objects": "objects and lists",
    "max_json_fields": "fields of objects",
    "max_json_values": "values",
    "max_json_nesting": "objects and lists in one another",
}
_STEPS: Final = {**dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", -1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonBounds:
    """Bounds of one request body. See LimitSettings."""

    max_values: int = 200_000
    max_strings: int = 100_000
    max_fields: int = 25_000
    max_objects: int = 10_000
    max_nesting: int = 200


def check_json_bounds(body: bytes, bounds: JsonBounds) -> None:
    """Raise BodyTooComplexError for a body that passes a bound; it need not be valid JSON."""
    if may_exceed(body, bounds):
        check_exactly(body, bounds)


def check_exactly(body: bytes, bounds: JsonBounds) -> None:
    """Raise BodyTooComplexError; the slow part, for a body that `may_exceed` a bound."""
    # What is left of an escape cannot end a string.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check("max_json_strings", plain.count(b'"') // 2, bounds.max_strings)
    outside = b"".join(plain.split(b'"')[::2])
    num_objects = outside.count(b"{") + outside.count(b"[")
    _check("max_json_objects", num_objects, bounds.max_objects)
    _check("max_json_fields", outside.count(b":"), bounds.max_fields)
    _check("max_json_values", num_objects + outside.count(b","), bounds.max_values)
    if num_objects > bounds.max_nesting:
        _check("max_json_nesting", _depth(outside), bounds.max_nesting)


def may_exceed(body: bytes, bounds: JsonBounds) -> bool:
    """Return whether a bound may be passed; signs in texts count as well, so it is cheap."""
    num_objects = body.count(b"{") + body.count(b"[")
    return (
        num_objects > min(bounds.max_objects, bounds.max_nesting)
        or body.count(b'"') // 2 > bounds.max_strings
        or body.count(b":") > bounds.max_fields
        or num_objects + body.count(b",") > bounds.max_values
    )


def _depth(outside: bytes) -> int:
    """Return the nesting depth of objects and lists; `outside` is a body without its strings."""
    brackets = outside.translate(None, delete=_NOT_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def _check(setting: str, count: int, limit: int) -> None:
    if count > limit:
        raise BodyTooComplexError(_COUNTED[setting], setting, count=count, limit=limit)
