"""Check of the strength of secrets that operators choose, before a gateway relies on them."""

import math
import re
from typing import Final

from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.tenancy.keys.keys import id_in

MAX_TOKEN_CHARS: Final = 512

_MIN_CHARS: Final = 16
_MIN_DISTINCT: Final = 6
"""A random token of 16 hexadecimal digits has fewer once in a million."""
_WANTED_BITS: Final = 128
_VISIBLE: Final = re.compile(r"[!-~]+")
_ALPHABETS: Final = (
    (re.compile(r"[0-9]+"), 10),
    (re.compile(r"[0-9a-f]+|[0-9A-F]+"), 16),
    (re.compile(r"[a-z]+|[A-Z]+"), 26),
    (re.compile(r"[0-9a-z]+|[0-9A-Z]+"), 36),
    (re.compile(r"[0-9A-Za-z]+"), 62),
)
_ADVICE: Final = "take a random one, such as `openssl rand -hex 32` prints"


def check_token(setting: str, token: str) -> str | None:
    """Return a warning for a token that may be weak; None for a good one.

    Raises SettingsError, which names the `setting`, for one that can be guessed, or that no client
    could send.
    """
    if len(token) < _MIN_CHARS:
        raise SettingsError(
            f"{setting} is shorter than {_MIN_CHARS} characters and could be guessed; {_ADVICE}"
        )
    if len(set(token)) < _MIN_DISTINCT:
        raise SettingsError(
            f"{setting} has fewer than {_MIN_DISTINCT} different characters and could be "
            f"guessed; {_ADVICE}"
        )
    if len(token) > MAX_TOKEN_CHARS or not _VISIBLE.fullmatch(token) or id_in(token):
        raise SettingsError(
            f"{setting} must have at most {MAX_TOKEN_CHARS} visible ASCII characters and "
            f"not the form of an API key; {_ADVICE}"
        )
    if most_bits(token) >= _WANTED_BITS:
        return None
    return (
        f"{setting} holds at most {most_bits(token):.0f} random bits, and {_WANTED_BITS} "
        f"are advised; {_ADVICE}"
    )


def most_bits(token: str) -> float:
    """Return the entropy of a token if each character were drawn at random from its alphabet."""
    size = next((size for letters, size in _ALPHABETS if letters.fullmatch(token)), 94)
    return len(token) * math.log2(size)
