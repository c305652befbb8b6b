"""Texts that come back unchanged, or not at all: the contents of cookies."""

import base64
import binascii
import hmac
from typing import Final, TypeVar

import msgspec

from outrider.gateway.tenancy.keys.keys import KeyHasher

_Content = TypeVar("_Content", bound=msgspec.Struct)

_MAX_CHARS: Final = 4096
"""Browsers keep no longer cookies."""


class Seal:
    """Signs contents for one purpose under the secret of the keys, which all gateways share."""

    def __init__(self, hasher: KeyHasher, purpose: str) -> None:
        self._hasher = hasher
        self._purpose = purpose

    def sealed(self, content: msgspec.Struct) -> str:
        """Return content and signature, in characters that a cookie may have."""
        text = base64.urlsafe_b64encode(msgspec.json.encode(content)).decode().rstrip("=")
        return f"{text}.{self._signature(text)}"

    def opened(self, sealed: str, kind: type[_Content]) -> _Content | None:
        """Return the content; None where it is not ours, or was changed."""
        text, _, signature = sealed[:_MAX_CHARS].partition(".")
        if not sealed.isascii() or not hmac.compare_digest(signature, self._signature(text)):
            return None
        try:
            data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, binascii.Error):
            return None

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
