"""One issuer of tokens: its keys as last read, read again in time and when one is missing."""

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from outrider.gateway.contract.errors.tree import IssuerUnavailableError
from outrider.gateway.settings.loopback import is_loopback
from outrider.gateway.settings.sign_in import IssuerSettings, checked_url
from outrider.gateway.tenancy.sign_in.issuer_client import IssuerClient, IssuerError
from outrider.gateway.tenancy.sign_in.key_set import KeySet, read_key_set
from outrider.gateway.tenancy.sign_in.sign_in_metrics import SignInMetrics

if TYPE_CHECKING:
    from jwt import PyJWK

logger = logging.getLogger(__name__)

_REFRESH_S: Final = 300.0
_AGAIN_S: Final = 10.0
"""Tokens with unknown keys have the keys read at most this often: they may be anybody's."""
_DISCOVERY: Final = "/.well-known/openid-configuration"
_OF_PAGES: Final = ("authorization_endpoint", "token_endpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where an issuer is asked for what."""

    keys: str
    authorize: str | None = None
    token: str | None = None
    takes_basic: bool = True
    """The token endpoint takes the client's secret as HTTP's Basic authentication."""


class Issuer:
    """Knows an issuer's keys. While they cannot be read, the last known ones are used."""

    def __init__(
        self,
        name: str,
        settings: IssuerSettings,
        client: IssuerClient,
        *,
        clock: Callable[[], float],
        metrics: SignInMetrics,
    ) -> None:
        """`clock`: in seconds, monotonic."""
        self.name = name
        self.settings = settings
        self.client = client
        self.keys = KeySet()
        """Another object once they have changed: what older ones verified is verified again."""
        self.endpoints: Endpoints | None = None
        self._clock = clock
        self._metrics = metrics
        self._fetch: asyncio.Task[None] | None = None
        self._asked_s = -math.inf
        self._repeating: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to read the keys, now and every five minutes. Nothing waits for them."""
        self._repeating = asyncio.create_task(self._repeat())

    async def close(self) -> None:
        """Read them no more."""
        for task in (self._repeating, self._fetch):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def find(self, key_id: object, algorithm: str) -> "PyJWK | None":
        """Return a key, None for one that the issuer does not have.

        Raises IssuerUnavailableError while that is not known: the keys are read meanwhile.
        """
        if (key := self.keys.find(key_id, algorithm)) is not None:
            return key
        fetch = self._asked()
        if fetch is not None or not self.keys.keys:
            raise self._unavailable(fetch)
        return None

    async def ready_endpoints(self) -> Endpoints:
        """Return where people sign in. Raises IssuerUnavailableError."""
        if self.endpoints is None:
            unavailable = self._unavailable(self._asked())
            await unavailable.fetched()
            if self.endpoints is None:
                raise unavailable
        return self.endpoints

    def _asked(self) -> asyncio.Task[None] | None:
        """Return the fetch that is under way, or a new one; None soon after one has ended."""
        is_soon = self._clock() - self._asked_s < _AGAIN_S
        if is_soon and (self._fetch is None or self._fetch.done()):
            return None
        return self._begin()

    def _unavailable(self, fetch: asyncio.Task[None] | None) -> IssuerUnavailableError:
        return IssuerUnavailableError(
            f"The keys of sign_in.issuers.{self.name} cannot be read now. Try again in a moment.",
            fetch,
        )

    def _begin(self) -> asyncio.Task[None]:
        """Return the fetch that is under way, or a new one."""
        if self._fetch is None or self._fetch.done():
            self._asked_s = self._clock()
            self._fetch = asyncio.create_task(self._attempt())
        return self._fetch

    async def _repeat(self) -> None:
        while True:
            await asyncio.wait({self._begin()})
            await asyncio.sleep(_REFRESH_S if self.keys.keys else _AGAIN_S)

    async def _attempt(self) -> None:
        """Read the keys, and log a failure instead of raising it."""
        try:
            await self._read()
        except Exception as error:  # noqa: BLE001 - the next reading may succeed
            self._metrics.failures.labels(self.name).inc()
            logger.warning(
                "keys of an issuer cannot be read, meanwhile the last known ones are used "
                "issuer=%s error=%s",
                *(self.name, error),
            )

    async def _read(self) -> None:
        endpoints = await self._find_endpoints()
        document = await self.client.ask(endpoints.keys)
        keys = await asyncio.to_thread(read_key_set, document, self.settings.algorithms)
        self.endpoints = endpoints
        if keys.jwks != self.keys.jwks:
            self.keys = keys
            logger.info("keys of an issuer issuer=%s count=%d", self.name, len(keys.keys))

    async def _find_endpoints(self) -> Endpoints:
        settings = self.settings
        if settings.jwks_url is not None and settings.client_id is None:
            return Endpoints(keys=settings.jwks_url)
        found = await self.client.ask(settings.url.rstrip("/") + _DISCOVERY)
        if not isinstance(found, dict) or found.get("issuer") != settings.url:
            raise IssuerError(f"the configuration below {settings.url} is another issuer's")
        names = ("jwks_uri", *(_OF_PAGES if settings.client_id else ()))
        urls = {name: _address(found, name, settings.url) for name in names}
        ways = found.get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
        return Endpoints(
            keys=settings.jwks_url or urls["jwks_uri"],
            authorize=urls.get("authorization_endpoint"),
            token=urls.get("token_endpoint"),
            takes_basic=isinstance(ways, list) and "client_secret_basic" in ways,
        )


def _address(configuration: dict[str, Any], name: str, issuer: str) -> str:
    """Return an address of the configuration. Raises IssuerError.

    An issuer elsewhere has no say in what this machine's own ports are asked.
    """
    found = configuration.get(name)
    try:
        url = checked_url(found if isinstance(found, str) else "")
    except ValueError as error:
        raise IssuerError(f"{name} of the issuer's configuration: {error}") from None
    if is_loopback(urlsplit(url).hostname or "") and not is_loopback(
        urlsplit(issuer).hostname or ""
    ):
        raise IssuerError(f"{name} of the issuer's configuration is an address of this machine")
    return url
