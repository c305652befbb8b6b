"""Server-sent events with names, as other APIs than chat have them."""

from typing import Any, Final

import msgspec

from outrider.gateway.contract.schema.line_ends import escape_line_ends

_encode: Final = msgspec.json.Encoder().encode


def one_line(value: Any) -> bytes:
    """Return JSON that no line reader can cut."""
    return escape_line_ends(_encode(value))


def named_event(name: str, document: Any) -> bytes:
    """One event. `document` is anything that msgspec writes as JSON."""
    return b"event: " + name.encode() + b"\ndata: " + one_line(document) + b"\n\n"
