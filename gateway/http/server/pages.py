"""The web pages, each with a policy that lets its own script run and no other."""

import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import resources
from typing import Final

from starlette.responses import HTMLResponse, Response

from outrider.gateway.contract.errors.http import Problem

PLAYGROUND_PATHS: Final = ("/", "/playground")
DASHBOARD_PATH: Final = "/dashboard"
ADMIN_PATH: Final = "/admin"

_SCRIPT: Final = re.compile(rb"<script>(.*?)</script>", re.DOTALL)
_INCLUDE: Final = re.compile(rb"<!-- include ([a-z./]+) -->")
_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src {scripts}; "
    "require-trusted-types-for 'script'; trusted-types 'none'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Scripts are named by their digests, so markup that comes from data would run nothing. With
trusted types a browser turns no text into markup in the first place. Styles stand in attributes as
well, which digests cannot name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebPage:
    """A page, and its content security policy."""

    body: bytes
    policy: str

    def response(self, status: int = 200, headers: Mapping[str, str] | None = None) -> HTMLResponse:
        """Return the page as an answer."""
        return HTMLResponse(
            self.body, status, {**(headers or {}), "content-security-policy": self.policy}
        )


def load_page(name: str) -> WebPage:
    """Read a page of gateway/http/server/static and name its scripts in its policy."""
    body = _read(name)
    digests = (b64encode(sha256(script).digest()).decode() for script in _SCRIPT.findall(body))
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return WebPage(body=body, policy=_POLICY.format(scripts=scripts))


def _read(name: str) -> bytes:
    """Read a file of gateway/http/server/static with the files that it includes."""
    body = resources.files("outrider.gateway.http.server").joinpath(f"static/{name}").read_bytes()
    return _INCLUDE.sub(lambda found: _read(found[1].decode()).rstrip(), body)


class Pages:
    """The playground, the dashboard and the administrators' page."""

    def __init__(self) -> None:
        self._playground = load_page("index.html")
        self._dashboard = load_page("dashboard.html")
        self._admin = load_page("admin/admin.html")

    async def playground(self) -> Response:
        """Return the playground."""
        return self._playground.response()

    async def dashboard(self) -> Response:
        """Return the dashboard."""
        return self._dashboard.response()

    async def admin(self) -> Response:
        """Return the administrators' page; what it shows is asked of /admin with a key."""
        return self._admin.response()

    @property
    def sign_in(self) -> dict[str, Callable[[Problem], Response]]:
        """The pages by path, for browsers without a key: they hold no secrets, and ask for one."""

        def shown(page: WebPage, problem: Problem) -> Response:
            return page.response(problem.status, problem.headers)

        pages = dict.fromkeys(PLAYGROUND_PATHS, self._playground)
        pages |= {DASHBOARD_PATH: self._dashboard, ADMIN_PATH: self._admin}
        return {path: partial(shown, page) for path, page in pages.items()}
