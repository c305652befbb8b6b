"""Who has signed in on the pages: a sealed cookie, and a token against forged requests."""

import hmac
import logging
from typing import Final

from starlette.datastructures import Headers

from outrider.gateway.contract.errors.tree import AuthenticationError, PermissionDeniedError
from outrider.gateway.http.sign_in.sealing import MAX_CHARS, Seal, Sealed, cookie_in
from outrider.gateway.tenancy.keys.keys import KeyHasher, Principal
from outrider.gateway.tenancy.sign_in.sign_in import Identity, SignIn

logger = logging.getLogger(__name__)

SESSION_COOKIE: Final = "__Host-outrider"
CSRF_HEADER: Final = "x-outrider-csrf"

_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_OF_COOKIE: Final = "Path=/; Secure; HttpOnly; SameSite"


class Session(Sealed, frozen=True, kw_only=True):
    """What the cookie says."""

    identity: Identity


class Sessions:
    """Reads and writes the cookie. It holds names of grants: what they allow, the settings say."""

    def __init__(self, hasher: KeyHasher, sign_in: SignIn, session_s: float) -> None:
        self._seal = Seal(hasher, "session")
        self._sign_in = sign_in
        self._session_s = session_s

    def begin(self, identity: Identity) -> str:
        """Return the header `set-cookie` that signs someone in.

        Raises PermissionDeniedError for someone without a team, or with too many grants.
        """
        principal = self._sign_in.principal_of(identity)
        logger.info("signed in name=%s key_id=%s", principal.name, principal.key_id)
        session = Session(identity=identity, expires_at=self._seal.wall_clock() + self._session_s)
        sealed = self._seal.sealed(session)
        if len(sealed) > MAX_CHARS:
            raise PermissionDeniedError(
                f"Your token has {len(identity.grants)} grants, more than a cookie holds. Ask the "
                "operator for fewer, or for shorter names of them.",
                code="too_many_grants",
            )
        return set_cookie(SESSION_COOKIE, sealed, self._session_s)

    def read(self, headers: Headers) -> Session | None:
        """Return the session of a request of our own pages; None where there is none."""
        cookie = cookie_in(headers.get("cookie", ""), SESSION_COOKIE)
        if cookie is None or not _is_ours(headers):
            return None
        return self._seal.opened(cookie, Session)

    def csrf_token(self, headers: Headers) -> str:
        """Return what the session's changing requests carry in the header `x-outrider-csrf`."""
        return self._seal.derived(cookie_in(headers.get("cookie", ""), SESSION_COOKIE) or "")

    def check_csrf(self, headers: Headers) -> None:
        """Raise PermissionDeniedError for a request that may not be our own page's."""
        given = headers.get(CSRF_HEADER, "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, self.csrf_token(headers).encode()):
            raise PermissionDeniedError(
                f"A request with the session's cookie needs the header {CSRF_HEADER} with the "
                "csrf_token of GET /auth/session.",
                code="csrf_token_required",
            )

    def principal(self, method: str, headers: Headers) -> Principal | None:
        """Return who signed in, for a request without a key; None for nobody.

        Raises PermissionDeniedError for a request that changes something without the token.
        """
        if (session := self.read(headers)) is None:
            return None
        if method not in _READING:
            self.check_csrf(headers)
        try:
            return self._sign_in.principal_of(session.identity)
        except AuthenticationError:
            return None  # its issuer is no longer in the settings


def _is_ours(headers: Headers) -> bool:
    """Return whether a browser says that our own page asks, or that the address was typed.

    SameSite=Strict keeps the cookie from other sites, and this from other origins of our site.
    """
    site = headers.get("sec-fetch-site")
    is_typed = site == "none" and headers.get("sec-fetch-mode") == "navigate"
    return site == "same-origin" or is_typed


def set_cookie(name: str, value: str, max_age_s: float, same_site: str = "Strict") -> str:
    """Return the header that sets a cookie of this origin, which no script reads."""
    return f"{name}={value}; Max-Age={max_age_s:.0f}; {_OF_COOKIE}={same_site}"
