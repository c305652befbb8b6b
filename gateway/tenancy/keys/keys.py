"""API keys: their form, their creation, their digests, and the principals they stand for."""

import hmac
import random
import re
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from outrider.gateway.contract.schema.kinds import Prefer, Reveals
from outrider.gateway.tenancy.keys.amounts import NO_LIMITS, LimitSpec

KEY_PREFIX: Final = "or-"
KEY_ID: Final = re.compile(r"[0-9a-z]{8}")
SIGNED_IN_PREFIX: Final = "jwt-"
"""Begins the `key_id` of whoever comes with an identity provider's token, and with no key."""
VERIFIED: Final = "\0"
"""Begins the names under which the subjects of verified tokens are counted, and no others."""

_KEY: Final = re.compile(r"or-([0-9a-z]{8})[0-9A-Za-z]{43}")
_ID_LETTERS: Final = string.digits + string.ascii_lowercase
_SECRET_LETTERS: Final = string.digits + string.ascii_uppercase + string.ascii_lowercase
_SECRET_BITS: Final = 256
_SECRET_CHARS: Final = 43  # 62 ** 43 > 2 ** 256
_ID_CHARS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MintedKey:
    """A new key. `text` is the whole of it, which is shown once and kept nowhere."""

    key_id: str
    text: str = field(repr=False)


def mint_key(randomness: random.Random, key_id: str | None = None) -> MintedKey:
    """Return a new key: `or-`, 8 characters of public id, 256 secret bits in 43 letters and digits.

    `key_id`: for another secret under an existing id. `randomness` must be the operating system's.
    """
    key_id = key_id or random_id(randomness)
    number = randomness.getrandbits(_SECRET_BITS)
    letters = []
    for _ in range(_SECRET_CHARS):
        number, index = divmod(number, len(_SECRET_LETTERS))
        letters.append(_SECRET_LETTERS[index])
    return MintedKey(key_id=key_id, text=f"{KEY_PREFIX}{key_id}{''.join(letters)}")


def random_id(randomness: random.Random) -> str:
    """Return a public id: 8 digits and small letters."""
    return "".join(randomness.choice(_ID_LETTERS) for _ in range(_ID_CHARS))


def id_in(text: str) -> str | None:
    """Return the public id in a key; None for a text without a key's form."""
    match = _KEY.fullmatch(text)
    return match and match[1]


def prefix_of(key_id: str) -> str:
    """Return the start of a key: enough to recognise it, useless as a credential."""
    return KEY_PREFIX + key_id


class KeyHasher:
    """HMAC-SHA256 under one secret. Without the secret a digest reveals nothing about its key.

    The state behind the secret is kept: `hmac.digest` takes most of its time to look its algorithm
    up.
    """

    def __init__(self, secret: bytes) -> None:
        self._mac = hmac.new(secret, digestmod="sha256")
        self.name = self.digest("outrider key secret").hex()[:16]
        """Identifies this secret without revealing it."""

    def digest(self, text: str) -> bytes:
        """Return 32 bytes, the same for the same text. Costs about a microsecond."""
        mac = self._mac.copy()
        mac.update(text.encode("utf-8", "surrogatepass"))
        return mac.digest()

    def cache_salt(self, tenant: str) -> str:
        """Return the salt of this tenant's prefix cache, unknown to other tenants."""
        return self.digest(f"cache salt of {tenant}").hex()[:32]

    def end_user_digest(self, end_user: str) -> str:
        """Return what stands for an end user's id where that is not to be kept."""
        return self.digest(f"end user {end_user}").hex()[:32] if end_user else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scopes:
    """The permissions of a key. None: every model, every tier."""

    models: frozenset[str] | None = None
    """Names as requests write them: `auto`, a checkpoint, `cloud/NAME`."""
    tiers: frozenset[str] | None = None
    """Local and upstream tiers that may answer, for any requested name."""
    is_admin: bool = False
    reads_metrics: bool = False
    """Allows /metrics, as `is_admin` does."""
    reveals: Reveals | None = None
    """The facts that answers report. None: by the alias, else by the key itself (`shown`)."""
    prefer: Prefer | None = None
    """What counts first where a request does not say it."""

    def allows_model(self, name: str) -> bool:
        """Return whether requests may name this model."""
        return self.models is None or name in self.models

    def shown(self, of_alias: Reveals | None = None) -> Reveals:
        """Return what answers tell; `of_alias`: what the requested alias reveals.

        Costs are for administrators. A key that may name only some models may not know what is
        behind them.
        """
        usual: Reveals = "tiers" if self.models is None else "nothing"
        return self.reveals or ("costs" if self.is_admin else of_alias or usual)

    def allows_tier(self, name: str) -> bool:
        """Return whether this tier may answer."""
        return self.tiers is None or name in self.tiers

    def usable(self, tiers_of: Mapping[str, Collection[str]]) -> list[str]:
        """Return the names that requests may use; `tiers_of`: each name's tiers, as far as known.

        No text names others to the key.
        """
        return [
            name
            for name, tiers in tiers_of.items()
            if self.allows_model(name) and (not tiers or any(map(self.allows_tier, tiers)))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """One key, as a request needs to know it."""

    key_id: str
    """A public id, never the secret."""
    name: str
    tenant: str
    """Shares a queue's fairness and a prefix cache: the team, or the key where it is in none."""
    team_id: str | None = None
    """A public id."""
    team_name: str | None = None
    scopes: Scopes = field(default_factory=Scopes)
    limits: LimitSpec = NO_LIMITS
    team_limits: LimitSpec = NO_LIMITS
    cache_salt: str = ""
    """Separates prefix caches; empty where tenants are not isolated."""
    weight: float = 1.0
    """Its share of a full queue, against others."""
    labels: Mapping[str, str] = field(default_factory=dict)
    end_user: str = ""
    """The subject of a verified token, in the place of the end user that a request names.

    Empty for keys: the ids that their requests name are trusted for limits and figures only.
    """
    is_limited: bool = field(init=False, compare=False, default=False)
    """True if any limit counts the usage of this tenant."""
    has_end_user_limits: bool = field(init=False, compare=False, default=False)
    """True if any limit counts the usage of each end user."""

    def __post_init__(self) -> None:
        """Find out once whether there are limits: every request needs to know."""
        has_limits = not (self.limits.is_empty and self.team_limits.is_empty)
        object.__setattr__(self, "is_limited", has_limits)
        specs = (self.limits.end_user, self.team_limits.end_user)
        object.__setattr__(self, "has_end_user_limits", any(specs))

    @property
    def owner(self) -> str:
        """Whose its stored answers are: the key's, or its verified end user's."""
        return f"{self.key_id} {self.end_user}" if self.end_user else self.key_id


ANONYMOUS: Final = Principal(
    key_id="anonymous",
    name="anonymous",
    tenant="anonymous",
    scopes=Scopes(reveals="costs"),
)
"""The principal of every request while no key exists: the operator's. It has no admin scope."""
