"""Stored responses: what is kept of one, whose it is, and where it is kept."""

import hashlib
import secrets
from typing import Final, Protocol

import msgspec

from outrider.gateway.tenancy.keys.keys import Principal

_encode: Final = msgspec.msgpack.Encoder().encode
_ID_BYTES: Final = 24
_ID_CHARS: Final = len("resp_") + 2 * _ID_BYTES
STORED_NOTHING: Final = (
    "Nothing is stored here: start the gateway with responses.store = true to store responses."
)


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A response and the conversation before it."""

    owner: str
    """The tenant."""
    end_user: str | None
    """The end user that the request named."""
    input_items: bytes
    """JSON: the list of all items before the response's own."""
    response: bytes
    """JSON, as the client got it."""

    @property
    def num_bytes(self) -> int:
        """The size of both."""
        return len(self.input_items) + len(self.response)


class ResponseStore(Protocol):
    """Keeps stored responses by key for a bounded time, and of each tenant a bounded size."""

    async def get(self, key: bytes) -> StoredResponse | None:
        """Return the response; None where there is none. Raises StorageError."""

    async def put(self, key: bytes, entry: StoredResponse) -> bool:
        """Keep a response. Return whether there is room for it. Raises StorageError."""

    async def delete(self, key: bytes) -> bool:
        """Forget a response. Return whether it was there. Raises StorageError."""

    async def close(self) -> None:
        """Release connections."""


def random_id() -> str:
    """Return what a stored response's id ends in: 192 bits that nobody can guess."""
    return secrets.token_hex(_ID_BYTES)


def response_key(principal: Principal, response_id: str) -> bytes | None:
    """Return the key of a tenant's and a key's response; None for an id that is not ours.

    So the same id of another is another response. A cluster keeps a tenant's on one node.
    """
    if len(response_id) != _ID_CHARS or not response_id.isascii():
        return None
    name = _encode((principal.tenant, principal.owner, response_id))
    owner = owner_of(principal.tenant)
    return f"{{{owner}}}:{hashlib.blake2b(name, digest_size=32).hexdigest()}".encode()


def owner_of(tenant: str) -> str:
    """Return what a tenant's keys begin with."""
    return hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()
