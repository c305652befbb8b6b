"""The public keys of an issuer, from its JWK set (RFC 7517)."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from outrider.gateway.settings.sign_in import Algorithm

if TYPE_CHECKING:
    from jwt import PyJWK

logger = logging.getLogger(__name__)

_MAX_KEYS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySet:
    """Keys by what tokens say of them: an id, and an algorithm that the settings allow."""

    keys: Mapping[tuple[str, str], "PyJWK"] = field(default_factory=dict)
    jwks: Sequence[Mapping[str, Any]] = ()
    """What they were made of."""

    def find(self, key_id: object, algorithm: str) -> "PyJWK | None":
        """Return the key; for a token without an id the only one of its algorithm."""
        if key_id is None:
            fitting = [key for (_, named), key in self.keys.items() if named == algorithm]
            return fitting[0] if len(fitting) == 1 else None
        return self.keys.get((key_id, algorithm)) if isinstance(key_id, str) else None


def read_key_set(document: object, algorithms: Sequence[Algorithm]) -> KeySet:
    """Return the usable keys of a JWK set; others are left out. Raises ValueError for no such set.

    Slow for a large one: for a worker thread.
    """
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise ValueError("it is no JWK set: it lacks a list of keys")
    if len(listed) > _MAX_KEYS:
        raise ValueError(f"it has {len(listed)} keys; {_MAX_KEYS} are allowed")
    keys: dict[tuple[str, str], PyJWK] = {}
    for jwk in listed:
        for algorithm in algorithms:
            if _fits(jwk, algorithm) and (key := _key(jwk, algorithm)) is not None:
                keys.setdefault((jwk.get("kid", ""), algorithm), key)
    if not keys:
        raise ValueError(f"it has no key for {', '.join(algorithms)}")
    return KeySet(keys=keys, jwks=listed)


def _fits(jwk: object, algorithm: str) -> bool:
    """Return whether a key may verify an algorithm's signatures, by what is said of it."""
    if not isinstance(jwk, dict) or "d" in jwk:  # a private key that is public is nobody's
        return False
    operations = jwk.get("key_ops", ["verify"])
    return (
        jwk.get("use", "sig") == "sig"
        and jwk.get("alg", algorithm) == algorithm
        and isinstance(operations, list)
        and "verify" in operations
        and isinstance(jwk.get("kid", ""), str)
    )


def _key(jwk: dict[str, Any], algorithm: str) -> "PyJWK | None":
    """Return the key; None for one of another type or curve, and for one that is too short."""
    import jwt

    try:
        key = jwt.PyJWK(jwk, algorithm)
        key.Algorithm.prepare_key(key.key)
    except (jwt.PyJWTError, ValueError, TypeError):
        return None
    if weakness := key.Algorithm.check_key_length(key.key):
        logger.warning("key of an issuer cannot be used error=%s", weakness)
        return None
    return key
