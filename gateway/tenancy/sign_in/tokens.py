"""Check of tokens (JWT, RFC 7519): signature, issuer, audience, times."""

from collections.abc import Collection, Mapping
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

    def __init__(self, issuers: Collection[Issuer]) -> None:
        self._issuers = {issuer.settings.url: issuer for issuer in issuers}

    def read(self, token: str, audience: str | None = None) -> tuple[Issuer, Mapping[str, Any]]:
        """Return a token's issuer and claims, `exp` being a float.

        `audience`: in place of the settings'.

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
                leeway=issuer.settings.clock_skew_s,
                options={"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True},
            )
            return issuer, {**claims, "exp": float(claims["exp"])}
        except jwt.ExpiredSignatureError:
            raise TokenRefused("it has expired", code="token_expired") from None
        except (jwt.PyJWTError, OverflowError) as error:
            raise TokenRefused(str(error).rstrip(".")[:64]) from None

    def _issuer(self, url: object) -> Issuer:
        issuer = self._issuers.get(url) if isinstance(url, str) else None
        if issuer is None:
            raise TokenRefused("its issuer is not one of sign_in.issuers")
        return issuer
