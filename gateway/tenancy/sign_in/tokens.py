"""Check of tokens (JWT, RFC 7519): signature, issuer, audience, times."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from outrider.gateway.contract.errors.tree import AuthenticationError
from outrider.gateway.tenancy.sign_in.issuer import Issuer

MAX_TOKEN_CHARS: Final = 8192


class TokenRefused(AuthenticationError):
    """A token that does not count."""

    def __init__(self, why: str, *, code: str = "invalid_token") -> None:
        super().__init__(f"The token is not valid: {why}.", code=code)


class TokenReader:
    """Reads tokens of known issuers; believes nothing that a key of theirs has not signed."""

    def __init__(self, issuers: Collection[Issuer], wall_clock: Callable[[], float]) -> None:
        self._issuers = {issuer.settings.url: issuer for issuer in issuers}
        self._wall_clock = wall_clock

    def read(self, token: str, audience: str | None = None) -> tuple[Issuer, Mapping[str, Any]]:
        """Return a token's issuer and claims. `audience`: in place of the settings'.

        Raises TokenRefused; IssuerUnavailableError where its key may be a new one.
        """
        import jwt

        if len(token) > MAX_TOKEN_CHARS or not token.isascii():
            raise TokenRefused(f"it is no text of at most {MAX_TOKEN_CHARS} ASCII characters")
        try:
            # Only to find the issuer and its key: nothing else of it is used.
            said = jwt.decode_complete(token, options={"verify_signature": False})
            issuer, header = self._issuer(said["payload"].get("iss")), said["header"]
            algorithm = header.get("alg")
            if algorithm not in issuer.settings.algorithms:
                raise TokenRefused(
                    f"its signature is not {' or '.join(issuer.settings.algorithms)}"
                )
            if (key := issuer.find(header.get("kid"), algorithm)) is None:
                raise TokenRefused("its issuer has no such key")
            claims = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=issuer.settings.audience if audience is None else audience,
                issuer=issuer.settings.url,
                options={
                    "require": ["exp", "iss", "aud"],
                    "enforce_minimum_key_length": True,
                    # Times are compared below, with a clock that tests turn.
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.PyJWTError as error:
            raise TokenRefused(str(error).rstrip(".")[:64]) from None
        self._check_times(claims, issuer.settings.clock_skew_s)
        return issuer, claims

    def _issuer(self, url: object) -> Issuer:
        issuer = self._issuers.get(url) if isinstance(url, str) else None
        if issuer is None:
            raise TokenRefused("its issuer is not one of sign_in.issuers")
        return issuer

    def _check_times(self, claims: Mapping[str, Any], skew_s: float) -> None:
        now_s = self._wall_clock()
        if not now_s < time_of(claims, "exp") + skew_s:
            raise TokenRefused("it has expired", code="token_expired")
        for name in {"nbf", "iat"} & claims.keys():
            if not time_of(claims, name) <= now_s + skew_s:
                raise TokenRefused(f"its time has not come yet ({name})")


def time_of(claims: Mapping[str, Any], name: str) -> float:
    """Return a time of a token, in seconds since 1970. Raises TokenRefused."""
    found = claims.get(name)
    try:
        if isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found):
            return float(found)
    except OverflowError:
        pass
    raise TokenRefused(f"{name} is not a time")
