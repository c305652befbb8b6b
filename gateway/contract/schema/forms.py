"""Forms (multipart/form-data, RFC 7578): read once, within bounds, and written anew.

A form that is passed on as it came can be read by its server otherwise than here: names may be
quoted, escaped, padded or repeated in many ways. So parts are read strictly and written in one way,
behind a boundary that the client cannot know.
"""

import asyncio
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from outrider.gateway.contract.errors.tree import BadRequestError

FORM_TYPE: Final = "multipart/form-data"
MAX_PARTS: Final = 64
MAX_HEAD_BYTES: Final = 4096
_MAX_BOUNDARY_CHARS: Final = 70  # RFC 2046, section 5.1.1
_SEARCHED_BYTES: Final = 1 << 20
"""Bytes that are searched for a boundary before other requests have their turn."""
_TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PARAMETER: Final = re.compile(
    rf'[ \t]*;[ \t]*({_TOKEN})[ \t]*=[ \t]*(?:({_TOKEN})|"([^"\\]*+(?:\\.[^"\\]*+)*+)")'
)
_ESCAPED: Final = re.compile(r"\\(.)")
_HEADER_NAME: Final = re.compile(_TOKEN.encode())
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_FIELD_NAME: Final = re.compile(r"[A-Za-z0-9_.\[\]-]{1,128}")
_AS_IT_IS: Final = frozenset({"", "7bit", "8bit", "binary"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FormPart:
    """One field of a form."""

    name: str
    content: bytes | memoryview
    filename: str | None = None  # None: a text field
    content_type: str = ""  # empty: none is declared


def header_parameters(text: str) -> tuple[str, dict[str, str]]:
    """Return a header's value and its parameters; value and names in lower case.

    Raises ValueError for anything that two readers could take for different parameters.
    """
    text = text.rstrip(" \t;")
    value = text.partition(";")[0]
    found: dict[str, str] = {}
    at = len(value)
    while at < len(text):
        parameter = _PARAMETER.match(text, at)
        if parameter is None:
            raise ValueError("its parameters are not well-formed")
        name, token, quoted = parameter.groups()
        if name.lower() in found:
            raise ValueError(f"the parameter {name[:32]} is given twice")
        found[name.lower()] = token or _ESCAPED.sub(r"\1", quoted or "")
        at = parameter.end()
    return value.strip(" \t").lower(), found


async def read_form(content_type: str, body: bytes) -> tuple[FormPart, ...]:
    """Return the parts of a form; their contents are views of the body.

    Raises BadRequestError for anything but 1 to 64 well-formed parts.
    """
    mark = b"--" + read_boundary(content_type)
    if not body.startswith(mark):
        raise no_form()
    parts: list[FormPart] = []
    at = len(mark)
    while not body.startswith(b"--", at):
        head_end = body.find(b"\r\n\r\n", at, at + MAX_HEAD_BYTES)
        end = -1 if head_end < 0 else await _find(body, b"\r\n" + mark, head_end + 4)
        if end < 0 or not body.startswith(b"\r\n", at) or len(parts) == MAX_PARTS:
            raise no_form()
        parts.append(read_part(body[at + 2 : head_end], memoryview(body)[head_end + 4 : end]))
        at = end + 2 + len(mark)
    if not parts:
        raise no_form()
    return tuple(parts)


def write_form(parts: Iterable[FormPart]) -> tuple[str, bytes]:
    """Return a form's content type and body."""
    boundary = secrets.token_hex(16)  # unknown to the client: no content can hold it
    pieces: list[bytes | memoryview] = []
    for part in parts:
        pieces += (f"--{boundary}\r\n{_head(part)}\r\n\r\n".encode(), part.content, b"\r\n")
    pieces.append(f"--{boundary}--\r\n".encode())
    return f"{FORM_TYPE}; boundary={boundary}", b"".join(pieces)


def no_form() -> BadRequestError:
    """Return the error of a form that is not well-formed."""
    return BadRequestError(
        f"body: 1 to {MAX_PARTS} parts are required, each with headers of at most "
        f"{MAX_HEAD_BYTES} bytes, between the boundaries of content-type, and the last boundary."
    )


def read_boundary(content_type: str) -> bytes:
    """Return the boundary between a form's parts. Raises BadRequestError."""
    try:
        kind, parameters = header_parameters(content_type)
    except ValueError as error:
        raise BadRequestError(f"content-type: {error}.") from None
    boundary = parameters.get("boundary", "")
    is_plain = boundary.isascii() and boundary.isprintable()
    if kind != FORM_TYPE or not is_plain or not 1 <= len(boundary) <= _MAX_BOUNDARY_CHARS:
        raise BadRequestError(
            f"content-type: {FORM_TYPE} with a boundary of 1 to {_MAX_BOUNDARY_CHARS} characters "
            "is required."
        )
    return boundary.encode()


async def _find(body: bytes, wanted: bytes, start: int) -> int:
    """Return the index of `wanted`, or -1, and yield to the event loop while searching."""
    while (found := body.find(wanted, start, start + _SEARCHED_BYTES + len(wanted))) < 0:
        start += _SEARCHED_BYTES
        if start >= len(body):
            break
        await asyncio.sleep(0)
    return found


def read_part(head: bytes, content: memoryview) -> FormPart:
    """Return a part by its headers. Raises BadRequestError."""
    try:
        headers = _headers(head)
        kind, parameters = header_parameters(headers.get("content-disposition", ""))
    except ValueError as error:
        raise BadRequestError(f"body: a part's headers cannot be read: {error}.") from None
    name = parameters.get("name", "")
    if kind != "form-data" or not _FIELD_NAME.fullmatch(name):
        raise BadRequestError(
            "body: each part needs content-disposition: form-data with a name of 1 to 128 letters, "
            "digits, and any of _ . - [ ]."
        )
    content_type = headers.get("content-type", "")
    encoding = headers.get("content-transfer-encoding", "").lower()
    if encoding not in _AS_IT_IS or content_type.lower().startswith("multipart/"):
        raise BadRequestError(f"{name}: send this part's bytes as they are.", param=name)
    return FormPart(
        name=name, content=content, filename=_filename(parameters), content_type=content_type
    )


def _headers(head: bytes) -> dict[str, str]:
    """Return a part's headers; names in lower case. Raises ValueError."""
    found: dict[str, str] = {}
    for line in head.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        text = value.decode("utf-8", "replace").strip(" \t")
        key = name.decode("latin-1").lower()
        if not colon or not _HEADER_NAME.fullmatch(name) or _CONTROL.search(text):
            raise ValueError("a line is no header")
        if key in found:
            raise ValueError(f"{key[:32]} is given twice")
        found[key] = text
    return found


def _filename(parameters: Mapping[str, str]) -> str | None:
    """Return the file's name, also where an old client writes it as RFC 5987 does."""
    extended = parameters.get("filename*")
    if extended is None:
        return parameters.get("filename")
    return _CONTROL.sub("_", unquote(extended.rpartition("'")[2]))


def _head(part: FormPart) -> str:
    """Write a part's headers as browsers do (HTML, section 4.10.21.8)."""
    head = f'Content-Disposition: form-data; name="{part.name}"'
    if part.filename is not None:
        escaped = part.filename.replace("\\", "\\\\").replace('"', "%22")
        head += f'; filename="{escaped}"'
    return f"{head}\r\nContent-Type: {part.content_type}" if part.content_type else head
