"""From a token to the principal that it stands for, as from a key."""

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from outrider.gateway.contract.errors.tree import (
    AuthenticationError,
    IssuerUnavailableError,
    PermissionDeniedError,
)
from outrider.gateway.tenancy.keys.key_registry import KeyRegistry
from outrider.gateway.tenancy.keys.keys import SIGNED_IN_PREFIX, Principal
from outrider.gateway.tenancy.sign_in.grants import matching, scopes_of, team_claims, team_of
from outrider.gateway.tenancy.sign_in.issuer import Issuer
from outrider.gateway.tenancy.sign_in.key_set import KeySet
from outrider.gateway.tenancy.sign_in.sign_in_metrics import SignInMetrics, TokenResult
from outrider.gateway.tenancy.sign_in.tokens import TokenReader, TokenRefused

logger = logging.getLogger(__name__)

_RESULTS: Final[Mapping[type[Exception], TokenResult]] = {
    IssuerUnavailableError: "pending",
    PermissionDeniedError: "no_team",
}
_MAX_KNOWN: Final = 10_000
_MAX_END_USER_CHARS: Final = 255


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who signed in: all that a principal is made of, so that it can be made anew."""

    issuer: str
    """The name in the settings."""
    end_user: str
    grants: tuple[str, ...]
    """Names in the settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    principal: Principal
    until_s: float
    version: int
    """Of the teams."""
    issuer: Issuer
    keys: KeySet
    """Of the issuer: with others, as with other teams, it is read again."""


class SignIn:
    """Finds the principals of tokens; those that were verified are remembered until they expire.

    For one event loop.
    """

    def __init__(
        self,
        issuers: Sequence[Issuer],
        registry: KeyRegistry,
        metrics: SignInMetrics,
        *,
        wall_clock: Callable[[], float] = time.time,
        max_known: int = _MAX_KNOWN,
    ) -> None:
        self.issuers = {issuer.name: issuer for issuer in issuers}
        self._reader = TokenReader(issuers)
        self._registry = registry
        self._metrics = metrics
        self._wall_clock = wall_clock
        self._max_known = max_known
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    async def start(self) -> None:
        """Begin to read the issuers' keys."""
        for issuer in self.issuers.values():
            issuer.start()
            for name, grant in issuer.settings.grants.items():
                if grant.team is not None and self._registry.team(grant.team) is None:
                    logger.warning(
                        "a grant names a team that there is not issuer=%s grant=%s team=%s",
                        *(issuer.name, name, grant.team),
                    )

    async def close(self) -> None:
        """Read them no more."""
        for issuer in self.issuers.values():
            await issuer.close()

    def principal(self, token: str) -> Principal:
        """Return whom a token stands for.

        Raises AuthenticationError, PermissionDeniedError, and IssuerUnavailableError, after whose
        fetch the same call may succeed.
        """
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        known = self._known.get(digest)
        if known is not None and self._counts(known):
            return known.principal
        try:
            known = self._read(token)
        except (AuthenticationError, PermissionDeniedError, IssuerUnavailableError) as error:
            self._known.pop(digest, None)
            self._metrics.tokens.labels(_RESULTS.get(type(error), "refused")).inc()
            raise
        self._metrics.tokens.labels("verified").inc()
        self._known[digest] = known
        if len(self._known) > self._max_known:
            self._known.popitem(last=False)
        return known.principal

    def _counts(self, known: _Known) -> bool:
        is_same = known.version == self._registry.version and known.keys is known.issuer.keys
        return is_same and self._wall_clock() < known.until_s

    def _read(self, token: str) -> _Known:
        issuer, claims = self._reader.read(token)
        return _Known(
            principal=self.principal_of(identity_of(issuer, claims)),
            until_s=claims["exp"] + issuer.settings.clock_skew_s,
            version=self._registry.version,
            issuer=issuer,
            keys=issuer.keys,
        )

    async def identity(self, token: str, *, client_id: str, nonce: str) -> Identity:
        """Return who signed in, by an ID token for this client. Raises as `principal` does."""
        try:
            issuer, claims = self._reader.read(token, client_id)
        except IssuerUnavailableError as error:
            await error.fetched()
            issuer, claims = self._reader.read(token, client_id)
        if claims.get("nonce") != nonce:
            raise TokenRefused("it answers another sign-in (nonce)")
        if claims.get("azp", client_id) != client_id:
            raise TokenRefused("it is another client's (azp)")
        return identity_of(issuer, claims)

    def principal_of(self, identity: Identity) -> Principal:
        """Return a principal. Raises TokenRefused and PermissionDeniedError."""
        issuer = self.issuers.get(identity.issuer)
        if issuer is None:
            raise TokenRefused("its issuer is not one of sign_in.issuers")
        settings = issuer.settings
        grants = [settings.grants[name] for name in identity.grants if name in settings.grants]
        scopes, named = scopes_of(grants), team_of(grants)
        name = f"{issuer.name}:{identity.end_user}"
        key_id = signed_in_id(settings.url, identity.end_user)
        if named is None and (scopes.is_admin or scopes.reads_metrics):
            # It administrates and generates nothing, as the admin token does.
            scopes = replace(scopes, models=frozenset(), tiers=frozenset())
            return Principal(key_id=key_id, name=name, tenant=key_id, scopes=scopes)
        team = None if named is None else self._registry.team(named)
        if team is None:
            raise _no_team(issuer, named)
        return Principal(
            key_id=key_id,
            name=name,
            tenant=team.team_id,
            team_id=team.team_id,
            team_name=team.name,
            scopes=scopes,
            team_limits=team.limits,
            cache_salt=self._registry.cache_salt(team.team_id, key_id),
            weight=team.weight,
            labels=team.labels,
            end_user=name,
        )


def signed_in_id(url: str, end_user: str) -> str:
    """Return what stands in the place of a key's id for who signed in; `url`: of the issuer."""
    return SIGNED_IN_PREFIX + hashlib.sha256(f"{url}\0{end_user}".encode()).hexdigest()[:28]


def identity_of(issuer: Issuer, claims: Mapping[str, Any]) -> Identity:
    """Return who a token's claims say it is. Raises TokenRefused."""
    name = issuer.settings.end_user_claim
    end_user = claims.get(name)
    if (
        not isinstance(end_user, str)
        or not 0 < len(end_user) <= _MAX_END_USER_CHARS
        or not end_user.isprintable()
    ):
        raise TokenRefused(f"{name} is no text of 1 to {_MAX_END_USER_CHARS} visible characters")
    return Identity(
        issuer=issuer.name, end_user=end_user, grants=matching(issuer.settings.grants, claims)
    )


def _no_team(issuer: Issuer, named: str | None) -> PermissionDeniedError:
    claims = team_claims(issuer.settings)
    where = f"sign_in.issuers.{issuer.name}.grants"
    if named is not None:
        said = f"The token's team {named!r}, by {where}, does not exist."
    else:
        said = f"The token's {' and '.join(claims) or 'claims'} have no team in {where}."
    return PermissionDeniedError(
        f"{said} Ask the operator.", param=", ".join(claims) or None, code="no_team"
    )
