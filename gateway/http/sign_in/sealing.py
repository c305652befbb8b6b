"""Texts that come back unchanged, or not at all: the contents of cookies."""

import base64
import binascii
import hmac
import time
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from outrider.gateway.tenancy.keys.keys import KeyHasher


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """Something that counts for a while."""

    expires_at: float
    """In seconds since 1970."""


_Content = TypeVar("_Content", bound=Sealed)

MAX_CHARS: Final = 4000
"""Browsers keep no longer cookies (4,096 with the name)."""


class Seal:
    """Signs contents for one purpose under the secret of the keys, which all gateways share."""

    def __init__(
        self, hasher: KeyHasher, purpose: str, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.wall_clock = wall_clock
        self._hasher = hasher
        self._purpose = purpose

    def sealed(self, content: Sealed) -> str:
        """Return content and signature, in characters that a cookie may have."""
        text = base64.urlsafe_b64encode(msgspec.json.encode(content)).decode().rstrip("=")
        return f"{text}.{self._signature(text)}"

    def opened(self, sealed: str, kind: type[_Content]) -> _Content | None:
        """Return the content; None where it is not ours, was changed or counts no more."""
        text, _, signature = sealed[:MAX_CHARS].partition(".")
        if not sealed.isascii() or not hmac.compare_digest(signature, self._signature(text)):
            return None
        try:
            data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            content = msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, binascii.Error):
            return None
        return content if content.expires_at > self.wall_clock() else None

    def derived(self, text: str) -> str:
        """Return a secret that belongs to a text: the same for the same one."""
        return self._hasher.digest(f"sign-in {self._purpose} of\0{text}").hex()[:32]

    def _signature(self, text: str) -> str:
        return self._hasher.digest(f"sign-in {self._purpose}\0{text}").hex()


def cookie_in(header: str, name: str) -> str | None:
    """Return a cookie of the header `cookie`."""
    for part in header.split(";"):
        found, _, value = part.strip().partition("=")
        if found == name:
            return value
    return None
