"""The protocol of a dialect: writing a call for a server, and reading its answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from outrider.gateway.contract.errors.http import INVALID_REQUEST
from outrider.gateway.contract.errors.tree import UpstreamError
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.contract.schema.line_ends import escape_line_ends
from outrider.gateway.settings.server_traits import ContinuationStrategy, ServerTraits
from outrider.gateway.upstream.call import Chunk, UpstreamCall, WholeAnswer

DONE: Final = b"[DONE]"

_MAX_MESSAGE_CHARS: Final = 500
_MAX_REFUSAL_BYTES: Final = 65_536
_MOST: Final = 2**53 - 1
# 4xx that do not concern the request itself: our key, our credit, our rate, a transient fault.
_NO_REFUSALS: Final = frozenset({401, 402, 403, 407, 408, 409, 425, 429})


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The delivered part of an answer that broke off, and the way to ask for its rest."""

    text: str
    """Its content without reasoning."""
    num_tokens: int
    """The count of all of it against max_tokens."""
    strategy: ContinuationStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRefusal:
    """A server's refusal of the request: its message, and an OpenAI error body with it."""

    message: str
    body: bytes


class ReportedError(UpstreamError):
    """The server reports an error in the middle of its answer.

    `refusal` is set where it blames the request: another attempt would not help,
    and the server is not to blame.
    """

    def __init__(
        self, message: str, *, status: int | None = None, refusal: ServerRefusal | None = None
    ) -> None:
        failure = "throttled" if status == 429 else "reported"
        super().__init__(message, failure=failure, status=status)  # type: ignore[arg-type]
        self.refusal = refusal

    @property
    def is_retryable(self) -> bool:
        """False where the request is at fault."""
        return self.refusal is None

    @property
    def blames_server(self) -> bool:
        """False where the request is at fault, and where there are too many."""
        return self.refusal is None and super().blames_server


class ChunkReader(Protocol):
    """Reads the events of one attempt's stream, in order."""

    @property
    def is_complete(self) -> bool:
        """Return whether the answer is complete, so that the rest of the stream does not matter."""

    def read(self, event: bytes) -> Chunk:
        """Read one whole server-sent event, with its blank line.

        Raises UpstreamError: `garbage` where it cannot be read, `reported` (ReportedError) where it
        reports an error.
        """


class Dialect(Protocol):
    """One kind of API: writes requests, reads answers."""

    def path(self, endpoint: Endpoint) -> str:
        """Return the path below the base URL. Raises BadRequestError for a missing endpoint."""

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Return the headers of every request."""

    def body(self, call: UpstreamCall, traits: ServerTraits, resume: Resume | None = None) -> bytes:
        """Return the request's body. Raises BadRequestError for a field that this API lacks."""

    def chunk_reader(self, call: UpstreamCall) -> ChunkReader:
        """Return a reader for one attempt's stream."""

    def whole(self, call: UpstreamCall, body: bytes) -> WholeAnswer:
        """Read an answer that is not streamed. Raises UpstreamError `garbage` or `reported`."""

    def refusal(self, status: int, body: bytes) -> ServerRefusal:
        """Read a 4xx answer; never raises."""


def is_refusal(status: int | None) -> bool:
    """Return whether an HTTP status means that the request itself is at fault."""
    return status is not None and 400 <= status < 500 and status not in _NO_REFUSALS


def to_event(body: bytes) -> bytes:
    """Return one server-sent event of JSON."""
    return b"data: " + escape_line_ends(body) + b"\n\n"


def error_body(message: str, *, kind: str = INVALID_REQUEST, code: str | None = None) -> bytes:
    """Return OpenAI's error object."""
    detail = {"message": message, "type": kind, "param": None, "code": code}
    return msgspec.json.encode({"error": detail})


def garbage(tier: str, what: str) -> UpstreamError:
    """Return the error for an unreadable answer; `what` ends the sentence."""
    return UpstreamError(f"The {tier} tier sent {what}.", failure="garbage")


def message_of(detail: object) -> str | None:
    """Return the message of an error, however it is wrapped; None where there is none."""
    if isinstance(detail, Mapping):
        for key in ("message", "error", "detail"):
            if words := message_of(detail.get(key)):
                return words
        return None
    if isinstance(detail, str) and detail.strip():
        return detail.strip()[:_MAX_MESSAGE_CHARS]
    return None


def status_of(detail: object) -> int | None:
    """Return the HTTP status in an error object's `code` or `status`."""
    if isinstance(detail, Mapping):
        for key in ("code", "status", "status_code", "http_status_code"):
            value = detail.get(key)
            if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) == 3:
                value = int(value)
            if isinstance(value, int) and 400 <= value < 600:
                return value
    return None


def reported(tier: str, detail: object, status: int | None = None) -> ReportedError:
    """Return the error that an event or a body reports; `detail` is its error object."""
    status = status_of(detail) if status is None else status
    words = message_of(detail)
    message = f"The {tier} tier reported an error" + (f": {words}" if words else ".")
    refusal = None
    if is_refusal(status):
        whole = isinstance(detail, Mapping) and isinstance(detail.get("message"), str)
        body = msgspec.json.encode({"error": detail}) if whole else error_body(words or message)
        refusal = ServerRefusal(message=words or message, body=body)
    return ReportedError(message, status=status, refusal=refusal)


def read_refusal(tier: str, status: int, body: bytes) -> ServerRefusal:
    """Read a 4xx answer's message; keep its body if it is an OpenAI error already."""
    document: Any = None
    if len(body) <= _MAX_REFUSAL_BYTES:
        try:
            document = msgspec.json.decode(body)
        except (ValueError, RecursionError):
            document = None
    words = message_of(document)
    if words is None:
        words = f"The {tier} tier refused the request with status {status}."
        return ServerRefusal(message=words, body=error_body(words))
    if isinstance(document, dict) and isinstance(document.get("error"), dict):
        return ServerRefusal(message=words, body=body)
    return ServerRefusal(message=words, body=error_body(words))


def whole_number(value: float | None) -> int:
    """Return a count; 0 for invalid values. Too large ones become the most that every reader
    takes."""
    return 0 if value is None else min(max(int(value), 0), _MOST)
