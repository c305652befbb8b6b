"""OpenID Connect's code flow, with PKCE (RFC 7636), state and nonce."""

import asyncio
import base64
import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, urlencode

from outrider.gateway.contract.errors.tree import (
    AuthenticationError,
    IssuerUnavailableError,
    NotFoundError,
)
from outrider.gateway.http.sign_in.sealing import Seal, Sealed
from outrider.gateway.http.sign_in.sessions import set_cookie
from outrider.gateway.settings.sign_in import IssuerSettings
from outrider.gateway.tenancy.keys.keys import KeyHasher
from outrider.gateway.tenancy.sign_in.issuer import Endpoints, Issuer
from outrider.gateway.tenancy.sign_in.issuer_client import IssuerError
from outrider.gateway.tenancy.sign_in.sign_in import Identity, SignIn

logger = logging.getLogger(__name__)

CALLBACK_PATH: Final = "/auth/callback"
LOGIN_COOKIE: Final = "__Host-outrider-login"
LANDINGS: Final = ("/", "/playground", "/dashboard", "/admin")
"""Where a sign-in may end: our own pages, and nothing that a link could name."""

_LOGIN_S: Final = 600.0
_MAX_EXCHANGES: Final = 8


class Login(Sealed, frozen=True, kw_only=True):
    """A sign-in that has begun, as the browser keeps it in a cookie of its own."""

    issuer: str
    state: str
    nonce: str
    verifier: str
    landing: str


class LoginRefused(AuthenticationError):
    """A sign-in that did not succeed."""

    def __init__(self, why: str) -> None:
        super().__init__(f"Sign-in did not succeed: {why}.", code="sign_in_failed")


class CodeFlow:
    """Sends a browser to an issuer, and learns who came back. For one event loop."""

    def __init__(self, sign_in: SignIn, hasher: KeyHasher, url: str) -> None:
        """`url`: the gateway's own, as browsers know it."""
        self.providers = {
            name: issuer
            for name, issuer in sign_in.issuers.items()
            if issuer.settings.client_id is not None
        }
        self._sign_in = sign_in
        self._seal = Seal(hasher, "login")
        self._redirect_uri = url.rstrip("/") + CALLBACK_PATH
        self._exchanges = asyncio.Semaphore(_MAX_EXCHANGES)

    async def begin(self, name: str | None, landing: str | None) -> tuple[str, str]:
        """Return the address to send the browser to, and the cookie that it keeps meanwhile.

        `name`: the issuer's; None for the first. Raises NotFoundError, IssuerUnavailableError.
        """
        chosen = next(iter(self.providers), "") if name is None else name
        if (issuer := self.providers.get(chosen)) is None:
            raise NotFoundError("No such issuer lets people sign in here.", param="issuer")
        login = Login(
            issuer=chosen,
            state=secrets.token_urlsafe(24),
            nonce=secrets.token_urlsafe(24),
            verifier=secrets.token_urlsafe(48),
            landing=landing if landing in LANDINGS else LANDINGS[0],
            expires_at=self._seal.wall_clock() + _LOGIN_S,
        )
        endpoint = (await issuer.ready_endpoints()).authorize or ""
        challenge = hashlib.sha256(login.verifier.encode()).digest()
        query = urlencode(
            {
                "response_type": "code",
                "client_id": issuer.settings.client_id,
                "redirect_uri": self._redirect_uri,
                "scope": " ".join(issuer.settings.scopes),
                "state": login.state,
                "nonce": login.nonce,
                "code_challenge": base64.urlsafe_b64encode(challenge).decode().rstrip("="),
                "code_challenge_method": "S256",
            }
        )
        # Lax: the issuer's page, another site, sends the browser back.
        cookie = set_cookie(LOGIN_COOKIE, self._seal.sealed(login), _LOGIN_S, "Lax")
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{query}", cookie

    async def finish(self, query: Mapping[str, str], cookie: str | None) -> tuple[Identity, str]:
        """Return who signed in, and the page to land on.

        Raises AuthenticationError, IssuerUnavailableError.
        """
        login = self._login(query, cookie)
        issuer = self.providers.get(login.issuer)
        if issuer is None or query.get("iss", issuer.settings.url) != issuer.settings.url:
            raise LoginRefused("another issuer answered")
        if "error" in query or not (code := query.get("code")):
            raise LoginRefused("the issuer did not agree")
        if self._exchanges.locked():
            raise IssuerUnavailableError("Too many people sign in now. Try again in a moment.")
        async with self._exchanges:
            token = await self._exchanged(issuer, code, login.verifier)
        identity = await self._sign_in.identity(
            token, client_id=issuer.settings.client_id or "", nonce=login.nonce
        )
        if identity.issuer != issuer.name:
            raise LoginRefused("another issuer signed the answer")
        return identity, login.landing

    def _login(self, query: Mapping[str, str], cookie: str | None) -> Login:
        """Return the sign-in that an answer belongs to. Its code counts once, at the issuer."""
        login = None if cookie is None else self._seal.opened(cookie, Login)
        given = query.get("state", "").encode("utf-8", "replace")
        if login is None or not hmac.compare_digest(given, login.state.encode()):
            raise LoginRefused("it did not begin in this browser, or is over (state)")
        return login

    async def _exchanged(self, issuer: Issuer, code: str, verifier: str) -> str:
        """Return the ID token for a code. Raises LoginRefused and IssuerUnavailableError."""
        endpoints = await issuer.ready_endpoints()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_uri,
            "client_id": issuer.settings.client_id or "",
            "code_verifier": verifier,
        }
        headers = _credentials(issuer.settings, endpoints, form)
        try:
            answer = await issuer.client.ask(endpoints.token or "", form, **headers)
        except IssuerError as error:
            logger.warning("sign-in failed issuer=%s error=%s", issuer.name, error)
            raise LoginRefused("the issuer did not accept the code") from None
        token = answer.get("id_token") if isinstance(answer, dict) else None
        if not isinstance(token, str):
            raise LoginRefused("the issuer sent no ID token")
        return token


def _credentials(
    settings: IssuerSettings, endpoints: Endpoints, form: dict[str, str]
) -> dict[str, str]:
    """Return the headers that hold the client's secret (RFC 6749, 2.3.1), or add it to the form."""
    if settings.client_secret is None:
        return {}
    secret = settings.client_secret.get_secret_value()
    if not endpoints.takes_basic:
        form["client_secret"] = secret
        return {}
    pair = f"{quote(form['client_id'], safe='')}:{quote(secret, safe='')}"
    return {"authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
