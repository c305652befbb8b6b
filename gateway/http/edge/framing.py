"""Checks of a request's line and headers, before anything acts on them."""

import re
import urllib.parse
from collections.abc import Sequence
from typing import Final

from outrider.gateway.http.edge import refusals
from outrider.gateway.http.edge.cors import Header
from outrider.gateway.http.edge.refusals import EdgeRefusal

_MAX_HEADERS: Final = 128
_ONCE: Final = frozenset(
    {b"authorization", b"x-api-key", b"api-key", b"content-type", b"idempotency-key", b"origin"}
)
"""Headers that must not be repeated: a proxy might obey another copy than this gateway."""
_HOST: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?")
_CONTROL: Final = re.compile("[\x00-\x1f\x7f]")
_VERSIONS: Final = frozenset({"1.0", "1.1"})


def complaint(
    url: bytes, headers: Sequence[Header], version: str, *, max_bytes: int
) -> EdgeRefusal | None:
    """Return the reason to refuse the request; None if it is valid. Names are in lower case.

    The parser has checked the characters already, and content-length against transfer-encoding.
    """
    num_bytes = len(url) + sum(len(name) + len(value) + 4 for name, value in headers)
    if len(url) > max_bytes:
        return refusals.LONG_URL
    if num_bytes > max_bytes or len(headers) > _MAX_HEADERS:
        return refusals.LARGE_HEADERS
    if version not in _VERSIONS:
        return refusals.WRONG_VERSION
    path = url.partition(b"?")[0]
    if b"%" in path and _CONTROL.search(urllib.parse.unquote(path.decode("latin-1"))):
        return refusals.BAD_PATH
    return _ambiguity(headers, version)


def _ambiguity(headers: Sequence[Header], version: str) -> EdgeRefusal | None:
    """Find what another server on the way might read otherwise (RFC 9112, sections 3.2 and 6.1)."""
    num_hosts = 0
    seen: set[bytes] = set()
    for name, value in headers:
        if name == b"host":
            num_hosts += 1
            if _HOST.fullmatch(value) is None:
                return refusals.BAD_HOST
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked" or version == "1.0":
                return refusals.BAD_FRAMING
        elif name in _ONCE:
            if name in seen:
                return refusals.AMBIGUOUS
            seen.add(name)
    if num_hosts > 1 or (not num_hosts and version == "1.1"):
        return refusals.BAD_HOST
    return None
