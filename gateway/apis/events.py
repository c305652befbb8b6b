"""Server-sent events with names, as other APIs than chat have them."""

from typing import Any, Final

import msgspec

_encode: Final = msgspec.json.Encoder().encode
# JSON leaves these alone, but common line readers end a line at them.
_LINE_ENDS: Final = {
    char.encode(): f"\\u{ord(char):04x}".encode() for char in ("\x85", "\u2028", "\u2029")
}


def one_line(value: Any) -> bytes:
    """JSON that no line reader can cut."""
    encoded: bytes = _encode(value)
    if not encoded.isascii():
        # Outside of strings JSON is ASCII, so that only what texts say is replaced.
        for char, escape in _LINE_ENDS.items():
            if char in encoded:
                encoded = encoded.replace(char, escape)
    return encoded


def named_event(name: str, document: Any) -> bytes:
    """One event. `document` is anything that msgspec writes as JSON."""
    return b"event: " + name.encode() + b"\ndata: " + one_line(document) + b"\n\n"
