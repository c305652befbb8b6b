"""The endpoints of /auth: sign in, come back, who am I, sign out."""

from contextlib import suppress
from dataclasses import dataclass
from html import escape
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import GatewayError, NotFoundError
from outrider.gateway.contract.schema.structs import json_response
from outrider.gateway.http.sign_in.code_flow import CALLBACK_PATH, LOGIN_COOKIE, CodeFlow
from outrider.gateway.http.sign_in.sealing import cookie_in
from outrider.gateway.http.sign_in.sessions import SESSION_COOKIE, Sessions, set_cookie

LOGIN_PATH: Final = "/auth/login"
SESSION_PATH: Final = "/auth/session"
LOGOUT_PATH: Final = "/auth/logout"
AUTH_PATHS: Final = frozenset({LOGIN_PATH, CALLBACK_PATH, SESSION_PATH, LOGOUT_PATH})
"""They need no key: they are how browsers without one sign in."""

_PAGE: Final = """\
<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Outrider</title>{head}
<p>{text}</p>
"""


class SessionReport(msgspec.Struct, frozen=True, kw_only=True):
    """Who has signed in with this browser."""

    is_signed_in: bool
    name: str | None = None
    csrf_token: str | None = None
    """For the header x-outrider-csrf of requests that change something."""
    providers: tuple[str, ...] = ()
    """Issuers that let people sign in, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignInEndpoints:
    """Handlers. Without sign-in on the pages, nobody has signed in, and nobody can."""

    flow: CodeFlow | None = None
    sessions: Sessions | None = None

    async def login(self, request: Request) -> Response:
        """Send the browser to the issuer."""
        if self.flow is None:
            raise NotFoundError("Nobody signs in here: sign_in has no issuer with a client_id.")
        query = request.query_params
        location, cookie = await self.flow.begin(query.get("issuer"), query.get("next"))
        return RedirectResponse(location, 303, {"set-cookie": cookie})

    async def callback(self, request: Request) -> Response:
        """Sign in whoever comes back from the issuer."""
        if self.flow is None or self.sessions is None:
            raise NotFoundError("Nobody signs in here.")
        login = cookie_in(request.headers.get("cookie", ""), LOGIN_COOKIE)
        try:
            identity, landing = await self.flow.finish(request.query_params, login)
            cookie = self.sessions.begin(identity)
        except GatewayError as error:
            return _refused(error)
        # A redirect would still come from the issuer's site, without the cookie; our own page
        # leads on to the next with it.
        head = f'<meta http-equiv="refresh" content="0;url={escape(landing)}">'
        page = _page(head, f'<a href="{escape(landing)}">Signed in</a>', 200)
        page.raw_headers.append((b"set-cookie", cookie.encode()))
        page.raw_headers.append((b"set-cookie", set_cookie(LOGIN_COOKIE, "", 0, "Lax").encode()))
        return page

    async def session(self, request: Request) -> Response:
        """Say who has signed in."""
        providers = () if self.flow is None else tuple(self.flow.providers)
        report = SessionReport(is_signed_in=False, providers=providers)
        if self.sessions is not None:
            with suppress(GatewayError):  # the settings or the team have changed since
                principal = self.sessions.principal("GET", request.headers)
                if principal is not None:
                    report = SessionReport(
                        is_signed_in=True,
                        name=principal.name,
                        csrf_token=self.sessions.csrf_token(request.headers),
                        providers=providers,
                    )
        return json_response(report)

    async def logout(self, request: Request) -> Response:
        """Take the session's cookie back."""
        if self.sessions is not None and self.sessions.read(request.headers) is not None:
            self.sessions.check_csrf(request.headers)
        return Response(status_code=204, headers={"set-cookie": set_cookie(SESSION_COOKIE, "", 0)})


def _refused(error: GatewayError) -> Response:
    problem = problem_of(error)
    page = _page("", f'{escape(problem.message)} <a href="/">Back</a>', problem.status)
    page.headers["set-cookie"] = set_cookie(LOGIN_COOKIE, "", 0, "Lax")
    return page


def _page(head: str, text: str, status: int) -> HTMLResponse:
    return HTMLResponse(_PAGE.format(head=head, text=text), status)
