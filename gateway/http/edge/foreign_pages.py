"""Refuses requests without a key that a page of another site may have had a browser send.

A browser sends a form to any address without asking, and whatever a page wants to a name that the
page's own site lets point here (DNS rebinding). Where a key is needed, such a request has none.
"""

import re
from dataclasses import dataclass, field
from typing import Final

from starlette.datastructures import Headers

from outrider.gateway.contract.errors.tree import PermissionDeniedError
from outrider.gateway.http.edge.cors import CorsPolicy, RefusedOrigins
from outrider.gateway.settings.http_bounds import ANY, HttpSettings

_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_PORT: Final = re.compile(r":\d{1,5}\Z")
_LOCAL_HOST: Final = re.compile(
    # No domain can be registered under "internal", by which containers name their host.
    r"(?:[a-z0-9-]+\.)*localhost|(?:[a-z0-9-]+\.)+internal|127(?:\.\d{1,3}){3}|\[::1\]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignPages:
    """Tells requests of programs and of the gateway's own pages from those of other sites."""

    hosts: frozenset[str] = frozenset()
    """In lower case, beside this machine's own."""
    cors: CorsPolicy | None = None
    """None: no other origin is allowed."""
    _refused: RefusedOrigins = field(default_factory=RefusedOrigins)

    @classmethod
    def of(cls, settings: HttpSettings) -> "ForeignPages":
        """Return what the settings allow."""
        return cls(hosts=frozenset(settings.hosts), cors=CorsPolicy.of(settings.cors))

    def check(self, method: str, headers: Headers) -> None:
        """Raise PermissionDeniedError for a request without a key that may be another site's."""
        if not self._is_known(headers.get("host", "").lower()):
            raise PermissionDeniedError(
                "Without a key, the API may be called by this machine's names alone, such as "
                "localhost and 127.0.0.1. Send a key (outrider keys create), or add the name to "
                "http.hosts.",
                code="host_not_allowed",
            )
        if method not in _READING and not self._is_allowed(headers):
            self._refused.log(headers.get("origin", "").encode("latin-1"))
            raise PermissionDeniedError(
                "Without a key, pages of other sites may not call the API. Send a key, or add the "
                "page's origin to http.cors.origins.",
                code="origin_not_allowed",
            )

    def _is_known(self, host: str) -> bool:
        name = _PORT.sub("", host)
        return ANY in self.hosts or name in self.hosts or bool(_LOCAL_HOST.fullmatch(name))

    def _is_allowed(self, headers: Headers) -> bool:
        """Return whether a program sends it, a page of this gateway, or one that CORS allows.

        Browsers tell the site by sec-fetch-site, the older ones the origin only; programs neither.
        """
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if origin is not None and self.cors is not None and self.cors.allows(origin.encode()):
            return True
        if site == "same-origin":
            return True  # also where a proxy has changed the host
        is_own = origin is None or origin.partition("://")[2] == headers.get("host", "").lower()
        return site in (None, "none") and is_own
