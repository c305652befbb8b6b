"""The lines of a batch's file: read one by one, checked before the batch begins."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from outrider.gateway.http.apis.batches.objects import BatchFault
from outrider.gateway.tenancy.ledger.row import printable

MAX_LINES: Final = 50_000
MAX_FAULTS: Final = 100
"""Faults that a batch tells: then its file is read no further."""
_MAX_ID_CHARS: Final = 512
_MAX_MODEL_CHARS: Final = 256
_ENVELOPE_BYTES: Final = 8192
"""What a line may have around its request's body."""
_LINES_AT_ONCE: Final = 64
_BYTES_AT_ONCE: Final = 2**20
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

Lines = list[tuple[int, bytes]]
"""Lines with their numbers, from 1 on."""


class BatchLine(msgspec.Struct, frozen=True):
    """One request of a batch."""

    custom_id: str
    method: str
    url: str
    body: dict[str, msgspec.Raw]


class LineFaultError(Exception):
    """A line that cannot be asked."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param

    def fault(self, line: int) -> BatchFault:
        """Return it as clients see it."""
        return BatchFault(code=self.code, message=str(self), param=self.param, line=line)


_decode: Final = msgspec.json.Decoder(BatchLine).decode


def portions(path: Path, max_body_bytes: int) -> Iterator[Lines]:
    """Yield the lines of a file that hold anything, in lists of little work. Raises OSError.

    A line that is longer than its request's body may be is cut. Of the lines that are too many,
    blank ones as well, the first is the last.
    """
    most = max_body_bytes + _ENVELOPE_BYTES
    with path.open("rb") as file:
        part: Lines = []
        number = num_bytes = 0
        while line := file.readline(most):
            number += 1
            rest = line
            while len(rest) == most and not rest.endswith(b"\n"):
                rest = file.readline(most)
            is_too_far = number > MAX_LINES
            if line.strip() or is_too_far:
                part.append((number, line.removeprefix(_BYTE_ORDER_MARK)))
            if is_too_far:
                break
            num_bytes += len(line)
            if number % _LINES_AT_ONCE == 0 or num_bytes >= _BYTES_AT_ONCE:
                yield part
                part, num_bytes = [], 0
        yield part


def read_line(line: bytes, endpoint: str) -> BatchLine:
    """Read a line. Raises LineFaultError."""
    try:
        line.decode()  # what is inside of `body` is not looked at below
        found = _decode(line)
    except msgspec.ValidationError as error:
        raise LineFaultError("missing_required_parameter", f"{error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = "This line is not parseable as valid JSON."
        raise LineFaultError("invalid_json_line", text) from None
    if not 1 <= len(found.custom_id) <= _MAX_ID_CHARS:
        text = f"custom_id: use 1 to {_MAX_ID_CHARS} characters."
        raise LineFaultError("invalid_value", text, "custom_id")
    if found.method != "POST":
        raise LineFaultError("invalid_method", "method: only POST.", "method")
    if found.url != endpoint:
        raise LineFaultError("invalid_url", f"url: the batch's endpoint is {endpoint}.", "url")
    if bytes(found.body.get("stream", b"null")) not in (b"false", b"null"):
        text = "body.stream: an answer of a batch is not streamed."
        raise LineFaultError("unsupported_parameter", text, "body.stream")
    return found


@dataclass(slots=True, kw_only=True)
class InputCheck:
    """What is known of a batch's file, as it is read."""

    endpoint: str
    num_lines: int = 0
    model: str = ""
    """Of the first request that names one."""
    faults: list[BatchFault] = field(default_factory=list)
    _seen: set[bytes] = field(default_factory=set)

    def look_at(self, lines: Lines) -> bool:
        """Check lines; return whether those that follow need none."""
        for number, line in lines:
            try:
                self._check(number, line)
            except LineFaultError as error:
                self.faults.append(error.fault(number))
            if number > MAX_LINES or len(self.faults) >= MAX_FAULTS:
                return True
        return False

    def _check(self, number: int, line: bytes) -> None:
        if number > MAX_LINES:
            text = f"The file has more than {MAX_LINES:,} lines."
            raise LineFaultError("too_many_requests", text)
        found = read_line(line, self.endpoint)
        digest = hashlib.blake2b(found.custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            text = "custom_id: an earlier line has the same."
            raise LineFaultError("duplicate_custom_id", text, "custom_id")
        self._seen.add(digest)
        self.num_lines += 1
        self.model = self.model or _model_of(found)


def request_body(line: BatchLine, slo_class: str) -> bytes:
    """Return the body of a line's request, which is of this latency class."""
    if line.url == "/v1/embeddings":
        return msgspec.json.encode(line.body)
    try:
        given = line.body.get("outrider", msgspec.Raw(b"null"))
        options: Any = msgspec.json.decode(given, type=dict[str, msgspec.Raw] | None)
    except msgspec.ValidationError:
        return msgspec.json.encode(line.body)  # to be refused by its reader
    options = {**(options or {}), "slo": {"class": slo_class}}
    return msgspec.json.encode({**line.body, "outrider": options})


def _model_of(line: BatchLine) -> str:
    try:
        model = msgspec.json.decode(line.body.get("model", b'""'), type=str)
    except msgspec.ValidationError:
        return ""
    return printable(model[:_MAX_MODEL_CHARS])
