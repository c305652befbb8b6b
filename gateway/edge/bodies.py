"""Request bodies: a budget for their bytes, bounds on their JSON, and reading them unparsed.

A parser holds the interpreter while it works, and takes the longer the more values there are. So
JSON is bounded before anything parses it: only bytes are counted, in one pass, by functions that
take about a millisecond for a megabyte.
"""

import re
from dataclasses import dataclass, field
from itertools import accumulate
from types import TracebackType
from typing import Final

from starlette.requests import ClientDisconnect, Request

from gateway.edge.metrics import EdgeMetrics
from gateway.errors.tree import (
    BadRequestError,
    BodiesFullError,
    BodyTooComplexError,
    BodyTooLargeError,
    ContentEncodingError,
    KeyBodiesFullError,
    MediaTypeError,
)

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
    """What one body may hold. See LimitSettings."""

    max_values: int = 200_000
    max_strings: int = 100_000
    max_fields: int = 25_000
    max_objects: int = 10_000
    max_nesting: int = 200


def check_json_bounds(body: bytes, bounds: JsonBounds) -> None:
    """Raise BodyTooComplexError for a body that passes a bound; it need not be valid JSON."""
    if not _may_exceed(body, bounds):
        return
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


def _may_exceed(body: bytes, bounds: JsonBounds) -> bool:
    """Whether a bound could be passed; counts signs in texts as well, which makes it cheap."""
    num_objects = body.count(b"{") + body.count(b"[")
    return (
        num_objects > min(bounds.max_objects, bounds.max_nesting)
        or body.count(b'"') // 2 > bounds.max_strings
        or body.count(b":") > bounds.max_fields
        or num_objects + body.count(b",") > bounds.max_values
    )


def _depth(outside: bytes) -> int:
    """How deeply objects and lists lie in each other; `outside` is a body without its strings."""
    brackets = outside.translate(None, delete=_NOT_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def _check(setting: str, count: int, limit: int) -> None:
    if count > limit:
        raise BodyTooComplexError(_COUNTED[setting], setting, count=count, limit=limit)


@dataclass(slots=True, kw_only=True)
class BodyBudget:
    """Counts the bytes of all bodies that are held. For one event loop.

    `owner` is a key, or the address of a client without one: `max_bytes_per_owner` keeps one of
    them from taking all of `max_bytes`.
    """

    max_bytes: int
    max_bytes_per_owner: int
    metrics: EdgeMetrics | None = None
    num_bytes: int = 0
    _by_owner: dict[str, int] = field(default_factory=dict)

    def hold(self, owner: str) -> "HeldBody":
        """Return a context manager for one request's body, which holds no bytes yet."""
        return HeldBody(self, owner)

    def num_bytes_of(self, owner: str) -> int:
        """Return how many bytes one owner's bodies hold."""
        return self._by_owner.get(owner, 0)

    def take(self, owner: str, num_bytes: int) -> None:
        """Count more bytes. Raises KeyBodiesFullError or BodiesFullError, and counts nothing."""
        held = self.num_bytes_of(owner) + num_bytes
        if held > self.max_bytes_per_owner:
            raise KeyBodiesFullError(limit_bytes=self.max_bytes_per_owner)
        if self.num_bytes + num_bytes > self.max_bytes:
            raise BodiesFullError
        self._by_owner[owner] = held
        self._count(num_bytes)

    def give_back(self, owner: str, num_bytes: int) -> None:
        """Count fewer bytes; owners that hold none are forgotten."""
        self._by_owner[owner] -= num_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        self._count(-num_bytes)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.metrics is not None:
            self.metrics.body_bytes.set(self.num_bytes)


class HeldBody:
    """The bytes of one request's body in the budget, given back when the context ends."""

    __slots__ = ("_budget", "_num_bytes", "_owner")

    def __init__(self, budget: BodyBudget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self._num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Hold so many bytes in all, or the held ones if more. Raises as `BodyBudget.take`."""
        more = num_bytes - self._num_bytes
        if more > 0:
            self._budget.take(self._owner, more)
            self._num_bytes = num_bytes

    def __enter__(self) -> "HeldBody":
        """Begin with no bytes."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give all of it back, once."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        if num_bytes:
            self._budget.give_back(self._owner, num_bytes)


_JSON_TYPE: Final = re.compile(r"application/([\w.+-]+\+)?json", re.IGNORECASE | re.ASCII)


_MAX_DIGITS: Final = 20
"""Digits of a length; int() refuses numbers of thousands of digits by another error."""


async def read_json_body(
    request: Request, *, limit_bytes: int, held: HeldBody, bounds: JsonBounds
) -> bytes:
    """Return the body of a JSON request, unparsed, with its bytes reserved in `held`.

    A declared length is reserved before any byte is read, so a client that waits for "100 Continue"
    is refused before it sends; bytes of a body in chunks are reserved as they come.

    Raises BodyTooLargeError as soon as the limit is passed, MediaTypeError where JSON is not
    declared (a browser may send other types across sites without asking), ContentEncodingError for
    a compressed body, BodyTooComplexError for JSON that passes `bounds`, and what `held.reserve`
    raises.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if not _JSON_TYPE.fullmatch(media_type):
        raise MediaTypeError(media_type)
    encoding = ",".join(request.headers.getlist("content-encoding")).strip()
    if encoding.lower() not in ("", "identity"):
        raise ContentEncodingError(encoding)
    declared = request.headers.get("content-length", "")
    if declared.isdigit():
        if len(declared) > _MAX_DIGITS or int(declared) > limit_bytes:
            raise BodyTooLargeError(limit_bytes=limit_bytes)
        held.reserve(int(declared))
    body = bytearray()
    try:
        async for chunk in request.stream():
            if len(body) + len(chunk) > limit_bytes:
                raise BodyTooLargeError(limit_bytes=limit_bytes)
            held.reserve(len(body) + len(chunk))
            body += chunk
    except ClientDisconnect:
        raise BadRequestError("The body ended early.") from None
    read = bytes(body)
    check_json_bounds(read, bounds)
    return read
