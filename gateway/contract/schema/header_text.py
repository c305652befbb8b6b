"""Text from requests and servers, made fit for a response header."""

from functools import lru_cache
from typing import Final

_CONTROLS_TO_SPACES: Final = bytes.maketrans(bytes([*range(32), 127]), b" " * 33)


@lru_cache(maxsize=256)  # most are the names of tiers and reasons
def header_text(text: str) -> str:
    """Write a text as one line of printable ASCII."""
    encoded = text.encode("ascii", "replace").translate(_CONTROLS_TO_SPACES)
    return " ".join(encoded.decode().split())
