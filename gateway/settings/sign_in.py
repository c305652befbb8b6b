"""Settings of sign-in (`[sign_in]`): issuers of tokens, and what their claims grant."""

import re
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import NoDecode

from outrider.gateway.settings.http_bounds import NameList
from outrider.gateway.settings.loopback import is_loopback
from outrider.gateway.settings.sections import Section, split_list

SIGN_IN_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA"]
"""Signatures by public keys only: with HS256 a public key would be a secret that all know."""


def checked_url(url: str) -> str:
    """Return an address that is safe to ask: https, or http on this machine. Raises ValueError."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    is_encrypted = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))
    is_plain = "@" not in parts.netloc and not parts.fragment and url.split() == [url]
    if not host or not is_encrypted or not is_plain:
        raise ValueError(
            "it must be an https:// address without a user or a fragment (http:// on this machine)"
        )
    _ = parts.port  # raises ValueError
    return url


_Words = Annotated[str, Field(min_length=1)]
SafeUrl = Annotated[str, AfterValidator(checked_url)]


class GrantSettings(Section):
    """What tokens with a certain claim may do. All grants that match a token add up."""

    claim: _Words | None = None
    """Name of the claim, such as groups; dots lead into objects (realm_access.roles). With `value`
    unset too: the grant is every token's."""
    value: _Words | None = None
    """What the claim has: it is this text, a list with it, or, for scope and scp, words with it."""
    team: str | None = None
    """Team, by name or id; of several grants' teams the first counts."""
    models: NameList | None = None
    """Model names that requests may use; unset in all grants of a token: every one."""
    tiers: NameList | None = None
    """Tiers that may answer; unset in all grants of a token: every one."""
    admin: bool = False
    """Allow /admin."""
    metrics: bool = False
    """Allow /metrics."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.claim is None) != (self.value is None):
            raise ValueError("claim and value belong together; set both, or none for every token")
        return self


class IssuerSettings(Section):
    """An issuer of tokens: an identity provider."""

    url: SafeUrl
    """What its tokens have in iss, to the letter. Without `jwks_url` the address of its keys is
    found below it, in .well-known/openid-configuration."""
    audience: NameList
    """Tokens count that name one of these in aud."""
    jwks_url: SafeUrl | None = None
    """Address of its public keys."""
    algorithms: Annotated[
        tuple[Algorithm, ...], NoDecode, BeforeValidator(split_list), Field(min_length=1)
    ] = ("RS256", "ES256", "EdDSA")
    """Signatures that count."""
    clock_skew_s: Annotated[float, Field(ge=0, le=300)] = 60.0
    """By how much its clock may differ from ours."""
    end_user_claim: _Words = "sub"
    """Claim that names the end user."""
    grants: Annotated[dict[str, GrantSettings], Field(min_length=1)]
    """What its tokens may do, by names of your choice."""
    client_id: _Words | None = None
    """This gateway's name at the issuer; it lets people sign in on the pages."""
    client_secret: SecretStr | None = None
    """Its secret there; unset: a public client."""
    scopes: NameList = ("openid", "profile")
    """What the pages ask the issuer for."""

    @model_validator(mode="after")
    def _has_an_audience(self) -> Self:
        if not self.audience:
            raise ValueError("audience is empty, so no token would count; name one")
        if self.client_id is not None and "openid" not in self.scopes:
            raise ValueError("scopes lacks openid, without which the issuer says not who it is")
        return self


class SignInSettings(Section):
    """Sign-in with tokens of identity providers."""

    url: SafeUrl | None = None
    """Address at which browsers reach this gateway, such as https://gateway.example; people sign in
    on the pages only with it."""
    session_s: Annotated[float, Field(gt=0, le=7 * 86_400)] = 8 * 3600.0
    """Time after which people sign in again."""
    issuers: dict[str, IssuerSettings] = Field(default_factory=dict)
    """Issuers, by names of your choice."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        urls = [issuer.url for issuer in self.issuers.values()]
        for name, issuer in self.issuers.items():
            if not SIGN_IN_NAME.fullmatch(name):
                raise ValueError(
                    f"issuers.{name}: a name has small letters, digits, - and _, at most 32"
                )
            if urls.count(issuer.url) > 1:
                raise ValueError(f"issuers.{name}.url is another issuer's too: {issuer.url}")
            if issuer.client_id is not None and self.url is None:
                raise ValueError(f"issuers.{name}.client_id needs sign_in.url, to come back to")
        return self
