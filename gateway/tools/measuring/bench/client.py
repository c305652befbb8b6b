"""A client that does nothing while it measures but take bytes and look at the clock."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

import aiohttp

from outrider.gateway.tools.measuring.bench.answer import RawAnswer, body_text

Clock = Callable[[], float]

_DONE: Final = b"data: [DONE]"
_MOST_BODY_BYTES: Final = 64 * 2**20
_MOST_ERROR_BYTES: Final = 64 * 2**10
# Servers close connections that were idle for some seconds (uvicorn: 5); one of those is not used.
_IDLE_S: Final = 2.0
_END_S: Final = 1.0


class TargetError(Exception):
    """There is nothing to measure; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """The benchmarked server."""

    url: str
    """With or without /v1."""
    key: str | None = field(default=None, repr=False)
    """Sent, and never shown."""
    model: str | None = None
    is_stream: bool = True
    timeout_s: float = 300.0
    """For a whole answer."""
    stall_s: float = 60.0
    """Between two pieces of an answer."""
    connect_s: float = 10.0
    """To connect."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def base_url(self) -> str:
        """The part before /chat/completions. Raises TargetError for an invalid URL."""
        parts = urlsplit(self._full_url)
        try:
            is_known = parts.scheme in ("http", "https") and bool(parts.hostname)
            is_known = is_known and parts.port != 0
        except ValueError:  # the port is no number
            is_known = False
        if not is_known:
            raise TargetError(f"{self.shown_url!r} is not a URL; write http://127.0.0.1:8000")
        path = parts.path.rstrip("/").removesuffix("/chat/completions")
        if not path:
            path = "/v1"
        return f"{parts.scheme}://{parts.netloc}{path}"

    @property
    def shown_url(self) -> str:
        """The URL without a user, a password or a query."""
        parts = urlsplit(self._full_url)
        host = parts.netloc.rpartition("@")[2]
        return f"{parts.scheme}://{host}{parts.path}".rstrip("/")

    @property
    def _full_url(self) -> str:
        return self.url if "://" in self.url else f"http://{self.url}"


class BenchClient:
    """Connections to one target, kept open between requests. A context manager closes them."""

    def __init__(self, target: TargetSettings, *, clock: Clock) -> None:
        """`clock`: seconds, of which every moment is told. Raises TargetError."""
        self.target = target
        self._clock = clock
        self._chat_url = f"{target.base_url}/chat/completions"
        self._headers = {
            "content-type": "application/json",
            "accept": "text/event-stream" if target.is_stream else "application/json",
            **target.headers,
        }
        if target.key is not None:
            self._headers["authorization"] = f"Bearer {target.key}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Get ready; nothing is sent yet."""
        target = self.target
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(
                total=target.timeout_s, sock_connect=target.connect_s, sock_read=target.stall_s
            ),
            auto_decompress=True,
            read_bufsize=2**20,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ask(self, body: bytes) -> RawAnswer:
        """Send a request and take its answer. Failures are in the answer, never raised.

        Cancelled, it lets go of its connection and passes the cancellation on.
        """
        raw = RawAnswer()
        try:
            await self._exchange(body, raw)
        except aiohttp.ConnectionTimeoutError:
            raw.fail("unreachable", f"no connection within {self.target.connect_s:g} s")
        except aiohttp.SocketTimeoutError:
            raw.fail("stall", f"no data for {self.target.stall_s:g} s")
        except TimeoutError:
            raw.fail("timeout", f"no whole answer within {self.target.timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            raw.fail("unreachable", self._safe(str(error)))
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, OSError):
            raw.fail("broken", "the connection ended before the answer did")
        except aiohttp.ClientError as error:
            raw.fail("garbage", self._safe(f"{type(error).__name__}: {error}"))
        except ValueError as error:
            raw.fail("garbage", self._safe(f"the answer is not HTTP: {error}"))
        raw.ended_s = raw.ended_s or self._clock()
        return raw

    async def _exchange(self, body: bytes, raw: RawAnswer) -> None:
        assert self._session is not None
        clock = self._clock
        raw.sent_s = clock()
        async with self._session.post(
            self._chat_url, data=body, headers=self._headers, allow_redirects=False
        ) as response:
            raw.status = response.status
            if response.status != 200:
                await self._refused(response, raw)
                return
            kind = response.content_type
            if self.target.is_stream and kind != "text/event-stream":
                raw.fail("garbage", f"requested a stream and got {kind}; try --no-stream")
                return
            if not self.target.is_stream and kind != "application/json":
                raw.fail("garbage", f"requested JSON and got {kind}")
                return
            await self._take(response.content, raw)

    async def _take(self, content: aiohttp.StreamReader, raw: RawAnswer) -> None:
        """Pieces as they come. The time of the end is that of [DONE], where there is one."""
        clock, pieces = self._clock, raw.pieces
        num_bytes = 0
        tail = b""
        while data := await content.readany():
            pieces.append((clock(), data))
            num_bytes += len(data)
            if num_bytes > _MOST_BODY_BYTES:
                raw.fail("garbage", f"the answer has more than {_MOST_BODY_BYTES} bytes")
                return
            tail = tail[-len(_DONE) :] + data
            if _DONE in tail:
                raw.ended_s = pieces[-1][0]
                # So that the connection can be used again; a server that leaves it open may.
                with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                    async with asyncio.timeout(_END_S):
                        await content.read(_MOST_ERROR_BYTES)
                return
        raw.ended_s = pieces[-1][0] if pieces else clock()

    async def _refused(self, response: aiohttp.ClientResponse, raw: RawAnswer) -> None:
        body = await response.content.read(_MOST_ERROR_BYTES)
        raw.ended_s = self._clock()
        text = self._safe(f"{response.status}: {body_text(body)}")
        if response.status == 429:
            wait = response.headers.get("retry-after")
            raw.fail("rate_limited", text if wait is None else f"{text} (retry after {wait} s)")
        elif 400 <= response.status < 500:
            raw.fail("refused", text)
        elif response.status >= 500:
            raw.fail("server_error", text)
        else:
            raw.fail("garbage", f"{response.status} is not a valid answer; check the URL")

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of `path` below the base URL. Raises TargetError without an answer."""
        assert self._session is not None
        url = f"{self.target.base_url}{path}"
        limit = aiohttp.ClientTimeout(total=self.target.connect_s)
        try:
            async with self._session.get(url, headers=self._headers, timeout=limit) as response:
                return response.status, await response.content.read(_MOST_BODY_BYTES)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = self._safe(str(error)) or type(error).__name__
            raise TargetError(
                f"no server answers at {self.target.shown_url} ({reason}); start it, or omit "
                "--url to measure a gateway started for this run"
            ) from None

    def _safe(self, text: str) -> str:
        """Return the text without the key, in case a server echoes it."""
        return text.replace(self.target.key, "***") if self.target.key else text
