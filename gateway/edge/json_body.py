"""Read the body of a JSON request within its bounds, without parsing it."""

import re
from typing import Final

from starlette.requests import ClientDisconnect, Request

from gateway.edge.bodies import HeldBody
from gateway.errors.tree import (
    BadRequestError,
    BodyTooLargeError,
    ContentEncodingError,
    MediaTypeError,
)
from gateway.schema.json_bounds import JsonBounds, check_json_bounds

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
