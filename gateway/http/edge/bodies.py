"""Request bodies: a budget for their bytes, and reading them unparsed, within bounds."""

import re
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from starlette.requests import Request

from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    BodiesFullError,
    BodyTooLargeError,
    ContentEncodingError,
    KeyBodiesFullError,
    MediaTypeError,
)
from outrider.gateway.contract.schema.parsing import (
    JsonBounds,
    check_exactly,
    may_exceed,
    yield_if_long,
)
from outrider.gateway.http.edge.edge_metrics import EdgeMetrics


@dataclass(slots=True, kw_only=True)
class BodyBudget:
    """Counts the bytes of all bodies that are held. For one event loop."""

    max_bytes: int
    max_bytes_per_owner: int
    """An owner is a key, or the address of a client without one. This keeps one of them from taking
    all of `max_bytes`."""
    metrics: EdgeMetrics | None = None
    num_bytes: int = 0
    _by_owner: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Let the gauge read the bytes."""
        if self.metrics is not None:
            self.metrics.body_bytes.set_function(lambda: self.num_bytes)

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
        self.num_bytes += num_bytes

    def give_back(self, owner: str, num_bytes: int) -> None:
        """Count fewer bytes; owners that hold none are forgotten."""
        self._by_owner[owner] -= num_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        self.num_bytes -= num_bytes


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
    read = await _read_bytes(request, limit_bytes=limit_bytes, held=held)
    if may_exceed(read, bounds):
        await yield_if_long(read)
        check_exactly(read, bounds)
    await yield_if_long(read)
    return read


async def read_form_body(request: Request, *, limit_bytes: int, held: HeldBody) -> bytes:
    """Return the body of a request in parts, unparsed. Raises as `read_json_body`."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if media_type.lower() != "multipart/form-data":
        raise BadRequestError("content-type: multipart/form-data is required here.")
    return await _read_bytes(request, limit_bytes=limit_bytes, held=held)


async def _read_bytes(request: Request, *, limit_bytes: int, held: HeldBody) -> bytes:
    encoding = ",".join(request.headers.getlist("content-encoding")).strip()
    if encoding.lower() not in ("", "identity"):
        raise ContentEncodingError(encoding)
    declared = request.headers.get("content-length", "")
    if declared.isdigit():
        if len(declared) > _MAX_DIGITS or int(declared) > limit_bytes:
            raise BodyTooLargeError(limit_bytes=limit_bytes)
        held.reserve(int(declared))
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise BadRequestError("The body ended early.")
        part: bytes = message.get("body", b"")
        num_bytes = len(body) + len(part)
        if num_bytes > limit_bytes:
            raise BodyTooLargeError(limit_bytes=limit_bytes)
        held.reserve(num_bytes)
        is_last = not message.get("more_body", False)
        if is_last and not body:  # by far the most bodies
            return part
        body += part
        if is_last:
            return bytes(body)
