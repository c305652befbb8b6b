"""HTTP to the servers of one tier: a pool of open connections, and time limits on all waits."""

import asyncio
import io
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from weakref import WeakSet

import aiohttp
from aiohttp import AddrInfoType

from outrider.gateway.contract.errors.tree import UpstreamError
from outrider.gateway.settings.tiers import TimeoutSettings
from outrider.gateway.upstream.addresses import socket_maker
from outrider.gateway.upstream.connection_errors import error_of
from outrider.gateway.upstream.response import UpstreamResponse
from outrider.gateway.upstream.waits import ExchangeLimits

__all__ = ["Transport", "UpstreamResponse"]

logger = logging.getLogger(__name__)

MAX_PROBE_BYTES: Final = 4 << 20
_MAX_HEADER_BYTES: Final = 16 << 10
_READ_BYTES: Final = 64 << 10
_KEEP_ALIVE_S: Final = 60.0
_DNS_CACHE_S: Final = 30
# A pooled connection that breaks sooner than this was closed by the server while it was idle.
_STALE_S: Final = 1.0
# Longer bodies are written piece by piece, so that they do not hold up the event loop.
_LARGE_BODY_BYTES: Final = 1 << 18


class _Trip:
    """Events of one request on its way out."""

    __slots__ = ("has_new_socket", "started_s")

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self.has_new_socket = False


# The socket maker is called deep inside the connector, the only place that sees that a request got
# a new connection.
_TRIP: Final[ContextVar[_Trip | None]] = ContextVar("trip", default=None)


class Transport:
    """Sends requests to the replicas of one tier.

    `max_connections` is for each replica. `clock` is the one that deadlines are on. `ca_file` holds
    certificates to trust beside the system's. Redirects are not followed, and neither cookies nor
    proxies of the environment are used. Use it between `start` and `close`.
    """

    def __init__(
        self,
        *,
        tier: str,
        timeouts: TimeoutSettings,
        max_connections: int,
        allow_private: bool = True,
        ca_file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._timeouts = timeouts
        self._max_connections = max_connections
        self._make_socket = socket_maker(allow_private=allow_private)
        self._ca_file = ca_file
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        # Tasks that wait for headers, and responses being read: the client library forgets about
        # both when it is closed, and they would wait until they time out.
        self._sending: set[asyncio.Timeout] = set()
        self._responses: WeakSet[UpstreamResponse] = WeakSet()

    async def start(self) -> None:
        """Open the pool, in the event loop that will use it.

        Raises ValueError where the file of certificates cannot be used.
        """
        connector = aiohttp.TCPConnector(
            limit=0,
            limit_per_host=self._max_connections,
            keepalive_timeout=_KEEP_ALIVE_S,
            ttl_dns_cache=_DNS_CACHE_S,
            ssl=True if self._ca_file is None else _tls_context(self._ca_file),
            socket_factory=self._socket,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=None, connect=self._timeouts.connect_s, ceil_threshold=math.inf
            ),
            headers={"user-agent": "outrider", "accept-encoding": "identity"},
            read_bufsize=_READ_BYTES,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
        )

    async def close(self) -> None:
        """Cut all connections, also of requests under way, which end as reset."""
        session, self._session = self._session, None
        if session is None:
            return
        now_s = asyncio.get_running_loop().time()
        for limit in self._sending:
            if not limit.expired():
                limit.reschedule(now_s)
        for response in list(self._responses):
            response.give_up()
        await session.close()

    async def post(
        self,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        deadline_s: float | None = None,
    ) -> UpstreamResponse:
        """Send a JSON body; return the response once its headers are there, whatever its status.

        A pooled connection that the server had closed meanwhile is replaced by another one. Raises
        UpstreamError (refused, tls, connect_timeout, first_token_timeout, total_timeout, reset,
        garbage) and DeadlineExceededError. `deadline_s`, on the clock, also bounds the reading.
        """
        exchange = self._exchange(url, deadline_s)
        if exchange.deadline_s <= exchange.started_s:
            raise exchange.late(exchange.deadline_s, "total_timeout")
        sent = {"content-type": "application/json"}
        sent.update((name.lower(), value) for name, value in headers.items())
        while True:
            trip = _Trip(asyncio.get_running_loop().time())
            try:
                return await self._send("POST", url, sent, body, exchange, trip)
            except (aiohttp.ClientError, OSError) as error:
                if not _is_stale(error, trip):
                    raise error_of(error, exchange) from error
                logger.debug("stale connection tier=%s replica=%s", self._tier, exchange.replica)

    async def get(
        self, url: str, headers: Mapping[str, str], *, timeout_s: float
    ) -> tuple[int, bytes]:
        """Return status and body, within `timeout_s` for all of it. Raises UpstreamError."""
        timeouts = self._timeouts.model_copy(
            update={"first_token_s": timeout_s, "total_s": timeout_s}
        )
        exchange = replace(self._exchange(url, None), timeouts=timeouts)
        trip = _Trip(exchange.started_s)
        try:
            response = await self._send("GET", url, headers, None, exchange, trip)
        except (aiohttp.ClientError, OSError) as error:
            raise error_of(error, exchange) from error
        return response.status, await response.read(limit_bytes=MAX_PROBE_BYTES)

    async def warm(self, url: str) -> None:
        """Have a connection to a server open before it is needed, by a GET without a key.

        Never raises: the request that needs the connection reports the failure.
        """
        timeout_s = 2 * self._timeouts.connect_s
        try:
            await self.get(url, {}, timeout_s=timeout_s)
        except UpstreamError as error:
            logger.debug(
                "not warm tier=%s replica=%s failure=%s", self._tier, error.replica, error.failure
            )

    async def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        exchange: ExchangeLimits,
        trip: _Trip,
    ) -> UpstreamResponse:
        """Send one request and wait for its headers. Raises the library's errors, but no
        timeouts."""
        session = self._session
        if session is None:
            raise RuntimeError("start the transport before it is used")
        data = io.BytesIO(body) if body and len(body) > _LARGE_BODY_BYTES else body
        token = _TRIP.set(trip)
        due_s = exchange.first_token_s
        limit = asyncio.timeout_at(due_s)
        try:
            async with limit:
                self._sending.add(limit)
                answer = await session.request(
                    method, url, headers=headers, data=data, allow_redirects=False
                )
        except TimeoutError as error:
            if self._session is not session:
                raise exchange.given_up() from error
            if limit.expired():
                raise exchange.late(due_s, "first_token_timeout") from error
            # The connector's own limit; without a socket it was a free connection that was missed.
            if trip.has_new_socket:
                raise exchange.too_slow("connect_timeout") from error
            raise exchange.error(
                "connect_timeout",
                f"had no connection free, of {self._max_connections}, or its host name could not be"
                f" looked up, within {self._timeouts.connect_s:g} s",
            ) from error
        finally:
            self._sending.discard(limit)
            _TRIP.reset(token)
        response = UpstreamResponse(answer, exchange)
        self._responses.add(response)
        return response

    def _exchange(self, url: str, deadline_s: float | None) -> ExchangeLimits:
        now_s = asyncio.get_running_loop().time()
        left_s = math.inf if deadline_s is None else deadline_s - self._clock()
        return ExchangeLimits(
            tier=self._tier,
            replica=_replica(url),
            timeouts=self._timeouts,
            started_s=now_s,
            deadline_s=now_s + left_s,
        )

    def _socket(self, info: AddrInfoType) -> socket.socket:
        """Make the socket of a new connection for the request whose context this runs in."""
        trip = _TRIP.get()
        if trip is not None:
            trip.has_new_socket = True
        return self._make_socket(info)


def _is_stale(error: Exception, trip: _Trip) -> bool:
    """Return whether a pooled connection was found closed before any byte of an answer came.

    A server that took the request and worked on it before it broke has failed: no second try.
    """
    if trip.has_new_socket or isinstance(error, aiohttp.ClientConnectorError):
        return False
    if isinstance(error, aiohttp.ServerDisconnectedError):
        is_early = isinstance(error.message, str)  # else the head of an answer that was begun
    else:
        is_early = isinstance(error, aiohttp.ClientOSError | aiohttp.ClientConnectionResetError)
    return is_early and asyncio.get_running_loop().time() - trip.started_s < _STALE_S


@lru_cache(maxsize=256)
def _replica(url: str) -> str:
    """Return host:port."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tls_context(ca_file: Path) -> ssl.SSLContext:
    """Return a context trusting the system's authorities and a file's. Raises ValueError."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_verify_locations(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(
            f"ca_file {str(ca_file)!r} cannot be used: {error.strerror or error}; it must hold"
            " certificates in PEM format"
        ) from error
    return context
