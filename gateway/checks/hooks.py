"""What gives verdicts: a service that is asked over HTTP, or a Python function."""

import asyncio
import inspect
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec

from outrider.gateway.alerts.delivery import HEADERS, signed

if TYPE_CHECKING:  # at run time it takes 0.2 s, and functions need none of it
    import aiohttp

_MAX_ANSWER_BYTES: Final = 1 << 20
"""Of an answer, beside twice what was asked about."""
_MAX_THREADS: Final = 32
_MAX_CONNECTIONS: Final = 256
_encode: Final = msgspec.json.Encoder().encode

Question = Mapping[str, Any]
"""What a hook is asked; see docs/checks.md."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a hook says of the texts that it was asked about."""

    verdict: Literal["pass", "block", "rewrite"]
    reason: str = ""
    """Told to the client of a blocked request."""
    texts: list[str] = []
    """The texts to put in their places, all of them in their order."""


PASS: Final = Verdict(verdict="pass")


class HookError(Exception):
    """A hook gave no verdict. Its text holds nothing of what was checked."""


class Hook(Protocol):
    """Gives verdicts."""

    async def ask(self, question: Question) -> Verdict:
        """Return the verdict. Raises any exception where there is none."""

    async def close(self) -> None:
        """Give up what it holds."""


class HttpHook:
    """A service. For one event loop; its connections are kept open."""

    def __init__(self, url: str, key: bytes | None = None) -> None:
        """`key` signs the questions, in the form of Standard Webhooks (standardwebhooks.com)."""
        self._url = url
        self._key = key
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, question: Question) -> Verdict:
        """Return the service's verdict. Redirects are not followed."""
        body = _encode(question)
        limit = _MAX_ANSWER_BYTES + 2 * len(body)
        session = self._session or self._open()
        async with session.post(
            self._url, data=body, headers=self._headers(body), allow_redirects=False
        ) as answer:
            if answer.status != 200:
                raise HookError(f"status {answer.status}")
            told = bytearray()
            async for piece in answer.content.iter_any():
                told += piece
                if len(told) > limit:
                    raise HookError(f"an answer of more than {limit} bytes")
        return msgspec.json.decode(told, type=Verdict)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> "aiohttp.ClientSession":
        import aiohttp

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=_MAX_CONNECTIONS),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),  # the check's is around all of it
            auto_decompress=False,
            headers=HEADERS | {"accept-encoding": "identity"},
        )
        return self._session

    def _headers(self, body: bytes) -> Mapping[str, str]:
        """Return the signature's headers."""
        if self._key is None:
            return {}
        return signed(self._key, f"msg_{uuid.uuid4().hex}", time.time(), body)


class FunctionHook:
    """A Python function, which returns a verdict as a dict, or None for a pass.

    A coroutine function runs in the event loop, any other in a thread. A thread that never ends
    cannot be ended: it holds one of 32 places for ever.
    """

    def __init__(self, function: Callable[[Question], Any]) -> None:
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)
        self._places = asyncio.Semaphore(_MAX_THREADS)

    async def ask(self, question: Question) -> Verdict:
        """Return the function's verdict."""
        if self._is_async:
            told = await self._function(question)
        else:
            told = await self._in_thread(question)
        return PASS if told is None else msgspec.json.decode(_encode(told), type=Verdict)

    async def close(self) -> None:
        """Leave its threads: they end with the process."""

    async def _in_thread(self, question: Question) -> Any:
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def end(told: object, failure: str | None) -> None:
            self._places.release()
            if future.done():  # given up
                return
            if failure is None:
                future.set_result(told)
            else:
                future.set_exception(HookError(failure))

        def work() -> None:
            told, failure = None, None
            try:
                told = self._function(question)
            except BaseException as error:  # noqa: BLE001 - a place must not be lost
                failure = type(error).__name__
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(end, told, failure)

        threading.Thread(target=work, name="check", daemon=True).start()
        return await future
