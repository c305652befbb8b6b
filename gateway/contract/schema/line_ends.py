"""Characters that common line readers take for the end of a line, escaped in JSON."""

from typing import Final

# JSON allows U+0085, U+2028 and U+2029 in strings; readers of server-sent events may cut there.
_ESCAPES: Final = {
    char.encode(): f"\\u{ord(char):04x}".encode() for char in ("\x85", "\u2028", "\u2029")
}


def escape_line_ends(encoded: bytes) -> bytes:
    """Return the same JSON without these characters, which occur in strings only."""
    if not encoded.isascii():
        for char, escape in _ESCAPES.items():
            encoded = encoded.replace(char, escape)
    return encoded
