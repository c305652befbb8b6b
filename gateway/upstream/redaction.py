"""Removes credentials from what upstream servers say."""

from collections.abc import Collection
from typing import Final

import msgspec

from outrider.gateway.contract.errors.tree import UpstreamRefusalError

_BLOT: Final = "***"


def redact(error: Exception, secrets: Collection[str]) -> None:
    """Remove this gateway's keys from a server's error message: some repeat what they were sent."""
    for secret in secrets:
        if isinstance(error, UpstreamRefusalError):
            for spelt in (secret.encode(), msgspec.json.encode(secret)[1:-1]):
                error.body = error.body.replace(spelt, _BLOT.encode())
        error.args = tuple(str(part).replace(secret, _BLOT) for part in error.args)
