"""CORS: which pages of other sites may ask and read answers (the Fetch standard, section 3.2)."""

import logging
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from starlette.types import Scope

from outrider.gateway.contract.errors.http import PERMISSION, Problem
from outrider.gateway.settings.http_bounds import ANY, CorsSettings

Header = tuple[bytes, bytes]

logger = logging.getLogger(__name__)

_MAX_LOGGED: Final = 32
_MAX_LOGGED_CHARS: Final = 128
_METHODS: Final = b"GET, HEAD, POST, PATCH, PUT, DELETE"
_MAX_AGE_S: Final = b"600"
_HEADER_NAMES: Final = re.compile(rb"[A-Za-z0-9-]{1,64}(?:, ?[A-Za-z0-9-]{1,64}){0,63}")
_VARY: Final[Header] = (b"vary", b"origin")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsAnswer:
    """The policy's result for one request: headers to add to its answer."""

    headers: tuple[Header, ...] = ()
    is_preflight: bool = False
    """The browser asks on behalf of its page; no endpoint is meant."""
    refusal: Problem | None = None
    """For preflights. Other requests of refused pages are answered, but the page may not read
    it."""


class RefusedOrigins:
    """Logs each refused origin once: browsers tell the page nothing, and the console little."""

    def __init__(self) -> None:
        self._logged: set[bytes] = set()

    def log_preflight(self, scope: Scope) -> None:
        """Log the origin of a preflight where no origin may read answers."""
        if scope["method"] == "OPTIONS" and _header(scope, b"access-control-request-method"):
            self.log(_header(scope, b"origin") or b"")

    def log(self, origin: bytes) -> None:
        """Log an origin, unless it was logged, or many were."""
        if origin in self._logged or len(self._logged) >= _MAX_LOGGED:
            return
        self._logged.add(origin)
        logger.warning(
            "page of another site may not read answers origin=%s setting=http.cors.origins",
            origin[:_MAX_LOGGED_CHARS].decode("ascii", "replace"),
        )


class CorsPolicy:
    """Origins that may call the API. Cookies play no part: a page sends its key like any client."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        """Store origins as browsers write them, such as https://app.example; "*" for all."""
        self._origins = frozenset(origin.encode() for origin in origins)
        self._allows_all = ANY in origins
        # Without it a cache would give one page's answer, with one page's name on it, to another.
        self._to_others = CorsAnswer(headers=() if self._allows_all else (_VARY,))
        self._refused = RefusedOrigins()
        self._allowed: dict[bytes, CorsAnswer] = {
            origin: CorsAnswer(headers=self._allow(origin)) for origin in self._origins
        }

    @classmethod
    def of(cls, settings: CorsSettings) -> "CorsPolicy | None":
        """Return the settings' policy; None where no origin is named."""
        return cls(settings.origins) if settings.origins else None

    def allows(self, origin: bytes) -> bool:
        """Return whether pages of this origin may call the API."""
        return self._allows_all or origin in self._origins

    def judge(self, scope: Scope) -> CorsAnswer:
        """Answer one request's origin, method and requested headers."""
        origin = _header(scope, b"origin")
        if origin is None:
            return self._to_others
        if scope["method"] == "OPTIONS" and _header(scope, b"access-control-request-method"):
            return self._preflight(origin, scope)
        if self._allows_all:
            return self._allowed[b"*"]
        if (found := self._allowed.get(origin)) is not None:
            return found
        self._refused.log(origin)
        return self._to_others

    def _preflight(self, origin: bytes, scope: Scope) -> CorsAnswer:
        if not self.allows(origin):
            self._refused.log(origin)
            refusal = Problem(
                status=HTTPStatus.FORBIDDEN,
                message=(
                    "Pages of this origin may not call the API. Add the origin to "
                    "http.cors.origins."
                ),
                type=PERMISSION,
                code="origin_not_allowed",
            )
            return CorsAnswer(headers=(_VARY,), is_preflight=True, refusal=refusal)
        headers = [
            *self._allow(origin),
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", _MAX_AGE_S),
        ]
        wanted = _header(scope, b"access-control-request-headers")
        if wanted is not None and _HEADER_NAMES.fullmatch(wanted):
            # Clients send many of their own (x-stainless-...), and none does harm.
            headers.append((b"access-control-allow-headers", wanted))
        if _header(scope, b"access-control-request-private-network") == b"true":
            headers.append((b"access-control-allow-private-network", b"true"))
        return CorsAnswer(headers=tuple(headers), is_preflight=True)

    def _allow(self, origin: bytes) -> tuple[Header, ...]:
        if self._allows_all:
            origin_header: tuple[Header, ...] = ((b"access-control-allow-origin", b"*"),)
        else:
            origin_header = ((b"access-control-allow-origin", origin), _VARY)
        # All: request ids, tiers, limits and waits of the answer.
        return (*origin_header, (b"access-control-expose-headers", b"*"))


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    """Return the first header of this name, in lower case as ASGI gives them."""
    for name, value in scope["headers"]:
        if name == wanted:
            found: bytes = value
            return found
    return None
