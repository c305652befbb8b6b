"""What a tier asks of its credential, and the simplest ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class CredentialError(Exception):
    """No credential can be had. The message names the setting and no secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRequest:
    """The part of a request that a signature may cover."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes


class Credential(Protocol):
    """Signs requests. For one event loop."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secrets in use, to be redacted from what servers say."""

    async def headers(self, request: SignedRequest) -> Mapping[str, str]:
        """Return the headers that sign a request in. Raises CredentialError."""

    async def renew(self, rejected: Mapping[str, str]) -> bool:
        """Fetch the credential anew, which a server has rejected with these headers.

        Return whether there is another one now. Never raises.
        """


AsHeaders = Callable[[str], Mapping[str, str]]
"""Writes a key or a token as headers."""


def bearer(secret: str) -> Mapping[str, str]:
    """Write a secret as OpenAI's clients do."""
    return {"authorization": f"Bearer {secret}"}


def api_key_header(secret: str) -> Mapping[str, str]:
    """Write a secret as Azure has it."""
    return {"api-key": secret}


class NoCredential:
    """Signs nothing."""

    secrets: tuple[str, ...] = ()

    async def headers(self, request: SignedRequest) -> Mapping[str, str]:
        """Return no headers."""
        del request
        return {}

    async def renew(self, rejected: Mapping[str, str]) -> bool:
        """Return False: there is none."""
        del rejected
        return False


def checked(secret: str, where: str) -> str:
    """Return a secret that HTTP can carry. Raises CredentialError that names `where`."""
    secret = secret.strip()
    if not secret:
        raise CredentialError(f"{where} is empty; it is to hold the server's key")
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        raise CredentialError(f"{where} holds characters that no key has")
    return secret
