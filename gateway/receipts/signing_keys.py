"""The Ed25519 keys that sign receipts: a file of them, of which the first signs.

The file has PEM blocks, one behind the other. The first is a private key; those behind it, private
or public, are older ones, whose receipts stay valid. `cryptography` is imported with the first
receipt.
"""

import base64
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

_BEGIN: Final = b"-----BEGIN "
_encode: Final = msgspec.json.Encoder(order="sorted").encode


class NoSigningKeyError(Exception):
    """There is no key to sign with; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRing:
    """The keys of one file."""

    signing: "Ed25519PrivateKey"
    signing_id: str
    public: dict[str, "Ed25519PublicKey"]
    """All keys, the signing one first, by their ids."""

    def jwks(self) -> dict[str, Any]:
        """Return the public keys as a JWK set (RFC 7517, RFC 8037)."""
        return {
            "keys": [
                {**_jwk(key), "kid": key_id, "use": "sig", "alg": "EdDSA"}
                for key_id, key in self.public.items()
            ]
        }


class SigningKeys:
    """The keys of a gateway, read when they are first needed."""

    def __init__(self, path: Path | None) -> None:
        """`path`: their file, which is made where it is not there; None: there is no place."""
        self._path = path
        self._ring: KeyRing | None = None

    def ring(self) -> KeyRing:
        """Return the keys. Raises NoSigningKeyError."""
        if self._ring is None:
            self._ring = _read(self._path)
        return self._ring

    def sign(self, message: bytes) -> tuple[str, str]:
        """Return the signing key's id, and the signature. Raises NoSigningKeyError."""
        ring = self.ring()
        return ring.signing_id, to_base64(ring.signing.sign(message))

    def has_signed(self, key_id: str, signature: bytes, message: bytes) -> bool | None:
        """Return whether a signature is this key's; None for a key that is not known.

        Raises NoSigningKeyError.
        """
        key = self.ring().public.get(key_id)
        if key is None:
            return None
        from cryptography.exceptions import InvalidSignature

        try:
            key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


def to_base64(data: bytes) -> str:
    """Write bytes as base64url without padding, as JWKs do."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_base64(text: str) -> bytes:
    """Read what `to_base64` wrote. Raises ValueError."""
    return base64.b64decode(text.encode() + b"=" * (-len(text) % 4), b"-_", validate=True)


def _jwk(key: "Ed25519PublicKey") -> dict[str, str]:
    return {"crv": "Ed25519", "kty": "OKP", "x": to_base64(key.public_bytes_raw())}


def _key_id(key: "Ed25519PublicKey") -> str:
    """Return a key's thumbprint (RFC 7638)."""
    return to_base64(hashlib.sha256(_encode(_jwk(key))).digest())


def _read(path: Path | None) -> KeyRing:
    """Read the keys, and make the first one. Raises NoSigningKeyError."""
    if path is None:
        raise NoSigningKeyError("there is no home folder for the key; name a receipts.key_file")
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
    except ModuleNotFoundError:
        raise NoSigningKeyError(
            "the package cryptography is not installed: pip install 'outrider[receipts]'"
        ) from None
    try:
        if not path.exists():
            _write_key(path)
        content, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        raise NoSigningKeyError(f"{path} cannot be read or made: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise NoSigningKeyError(f"others can read {path}; they must not: chmod 600 {path}")
    try:
        return _ring_of([_BEGIN + block for block in content.split(_BEGIN)[1:]])
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise NoSigningKeyError(f"{path} holds no Ed25519 keys in PEM: {error}") from error


def _ring_of(blocks: list[bytes]) -> KeyRing:
    """Read PEM blocks. Raises ValueError where they are no such keys."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )
    from cryptography.hazmat.primitives.serialization import (
        load_pem_private_key,
        load_pem_public_key,
    )

    signing: Ed25519PrivateKey | None = None
    public: dict[str, Ed25519PublicKey] = {}
    for block in blocks:
        if b"PRIVATE" in block:
            private = load_pem_private_key(block, password=None)
            if not isinstance(private, Ed25519PrivateKey):
                raise ValueError("a private key is not Ed25519's")
            signing, key = signing or private, private.public_key()
        else:
            loaded = load_pem_public_key(block)
            if not isinstance(loaded, Ed25519PublicKey):
                raise ValueError("a public key is not Ed25519's")
            key = loaded
        public[_key_id(key)] = key
    if signing is None:
        raise ValueError("none of them is private")
    return KeyRing(signing=signing, signing_id=_key_id(signing.public_key()), public=public)


def _write_key(path: Path) -> None:
    """Make a key. Of two gateways that start at once, both have the same one afterwards."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    content = Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(new, path)
    except FileExistsError:  # another one was faster
        pass
    finally:
        new.unlink()
