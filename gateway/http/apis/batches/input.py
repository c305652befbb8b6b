"""The lines of a batch's file: read one by one, checked before the batch begins."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from outrider.gateway.http.apis.batches.objects import BatchFault
from outrider.gateway.settings.slo import IDLE

MAX_ID_CHARS: Final = 512
_ENVELOPE_BYTES: Final = 8192
"""What a line may have around its request's body."""
_LINES_AT_ONCE: Final = 64
_BYTES_AT_ONCE: Final = 2**20


class BatchLine(msgspec.Struct, frozen=True):
    """One request of a batch."""

    custom_id: str
    method: str
    url: str
    body: dict[str, msgspec.Raw]


class LineFaultError(Exception):
    """A line that cannot be asked. `custom_id`: the line's, where it can be read."""

    def __init__(self, fault: BatchFault, custom_id: str | None = None) -> None:
        super().__init__(fault.message)
        self.fault = fault
        self.custom_id = custom_id


_read_line: Final = msgspec.json.Decoder(BatchLine).decode


def numbered_lines(path: Path, max_body_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that hold anything, with numbers from 1 on. Raises OSError.

    A line that is longer than its request's body may be is cut.
    """
    most = max_body_bytes + _ENVELOPE_BYTES
    with path.open("rb") as file:
        number = 0
        while line := file.readline(most):
            number += 1
            rest = line
            while len(rest) == most and not rest.endswith(b"\n"):
                rest = file.readline(most)
            if line.strip():
                yield number, line


def portions(lines: Iterator[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    """Yield lines in lists that hold little: few lines, or one long one."""
    part: list[tuple[int, bytes]] = []
    num_bytes = 0
    for number, line in lines:
        part.append((number, line))
        num_bytes += len(line)
        if len(part) == _LINES_AT_ONCE or num_bytes >= _BYTES_AT_ONCE:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


def read_line(number: int, line: bytes, endpoint: str) -> BatchLine:
    """Read a line. Raises LineFaultError."""
    try:
        line.decode()  # what is inside of `body` is not looked at below
        found = _read_line(line)
    except msgspec.ValidationError as error:
        raise _fault(number, "missing_required_parameter", f"{error}.", _id_in(line)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = "This line is not parseable as valid JSON."
        raise _fault(number, "invalid_json_line", text) from None
    custom_id, said = found.custom_id, found.body.get("stream")
    if not 1 <= len(custom_id) <= MAX_ID_CHARS:
        text = f"custom_id: use 1 to {MAX_ID_CHARS} characters."
        raise _fault(number, "invalid_value", text, None, "custom_id")
    if found.method != "POST":
        raise _fault(number, "invalid_method", "method: only POST.", custom_id, "method")
    if found.url != endpoint:
        text = f"url: the batch's endpoint is {endpoint}."
        raise _fault(number, "invalid_url", text, custom_id, "url")
    if said is not None and bytes(said) not in (b"false", b"null"):
        text = "body.stream: an answer of a batch is not streamed."
        raise _fault(number, "unsupported_parameter", text, custom_id, "body.stream")
    return found


def checked_lines(
    path: Path, endpoint: str, *, max_lines: int, max_body_bytes: int
) -> Iterator[BatchLine | LineFaultError]:
    """Yield each line, or what is wrong with it. Ends behind the first line too many."""
    seen: set[bytes] = set()
    count = 0
    for count, (number, line) in enumerate(numbered_lines(path, max_body_bytes), 1):
        if count > max_lines:
            text = f"The file has more than {max_lines:,} requests."
            yield _fault(number, "too_many_requests", text)
            return
        try:
            found = read_line(number, line, endpoint)
        except LineFaultError as error:
            yield error
            continue
        digest = hashlib.blake2b(found.custom_id.encode(), digest_size=16).digest()
        if digest in seen:
            text = "custom_id: an earlier line has the same."
            yield _fault(number, "duplicate_custom_id", text, found.custom_id, "custom_id")
        else:
            seen.add(digest)
            yield found
    if not count:
        yield LineFaultError(BatchFault(code="empty_file", message="The file has no request."))


def request_body(line: BatchLine) -> bytes:
    """Return the body of a line's request, which waits for what others leave idle."""
    if line.url == "/v1/embeddings":
        return msgspec.json.encode(line.body)
    try:
        given = line.body.get("outrider", msgspec.Raw(b"null"))
        options: Any = msgspec.json.decode(given, type=dict[str, msgspec.Raw] | None)
    except msgspec.ValidationError:
        return msgspec.json.encode(line.body)  # to be refused by its reader
    options = {**(options or {}), "slo": {"class": IDLE}}
    return msgspec.json.encode({**line.body, "outrider": options})


def _fault(
    number: int, code: str, message: str, custom_id: str | None = None, param: str | None = None
) -> LineFaultError:
    fault = BatchFault(code=code, message=message, param=param, line=number)
    return LineFaultError(fault, custom_id)


class _OnlyId(msgspec.Struct):
    custom_id: str


def _id_in(line: bytes) -> str | None:
    try:
        return msgspec.json.decode(line, type=_OnlyId).custom_id[:MAX_ID_CHARS]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
