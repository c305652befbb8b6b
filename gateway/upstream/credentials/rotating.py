"""Keys that are read again: a file that is mounted, a command, a token that expires."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, cast

from outrider.gateway.upstream.credentials.base import (
    AsHeaders,
    CredentialError,
    SignedRequest,
    checked,
)

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_MAX_BYTES: Final = 65_536
_FETCH_S: Final = 10.0
"""The longest time for a command, and for a token's server to answer."""
_EARLY_S: Final = 300.0
"""A token is fetched anew this long before it expires, beside the requests that still use it."""
_RETRY_S: Final = 5.0
"""After a failure the next try comes this much later, so that not every request waits for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A key or a token."""

    text: str
    refresh_s: float | None = None
    """When it is fetched anew although it is still good."""
    expires_s: float | None = None
    """On the clock: when it must not be used any more; None: never."""


Fetch = Callable[[], Awaitable[Secret]]
"""Fetches the secret anew. Raises CredentialError, or any other exception of its library."""


class RotatingCredential:
    """Keeps a secret, and fetches it anew in time; one fetch at a time, whoever asks for it.

    A fetch that fails or hangs leaves the old secret in use until it expires. A fetch that hangs
    beyond its time is left alone, and no other begins before it has ended.
    """

    def __init__(
        self,
        fetch: Fetch,
        *,
        name: str,
        as_headers: AsHeaders,
        clock: Callable[[], float],
        is_stale: Callable[[], bool] = lambda: False,
        timeout_s: float = _FETCH_S,
    ) -> None:
        """`name`: the setting, for messages. `is_stale`: cheap; true where it has changed."""
        self._fetch = fetch
        self._name = name
        self._as_headers = as_headers
        self._clock = clock
        self._is_stale = is_stale
        self._timeout_s = timeout_s
        self._secret: Secret | None = None
        self._before = ""
        self._task: asyncio.Task[Secret] | None = None
        self._failed_s: float | None = None
        self._complaint = ""

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secret, and the one before it: a server may still repeat that one."""
        now = "" if self._secret is None else self._secret.text
        return tuple(text for text in (now, self._before) if text)

    async def headers(self, request: SignedRequest) -> Mapping[str, str]:
        """Return the headers that carry the secret. Raises CredentialError."""
        del request
        now_s = self._clock()
        secret = self._secret
        if secret is None or (secret.expires_s is not None and now_s >= secret.expires_s):
            secret = await self._fetched()
        elif self._is_stale():
            with suppress(CredentialError):
                secret = await self._fetched()
        elif secret.refresh_s is not None and now_s >= secret.refresh_s:
            self._begin()
        return self._as_headers(secret.text)

    async def renew(self, rejected: Mapping[str, str]) -> bool:
        """Fetch it anew, unless that has happened since the rejected request was sent."""
        if self._secret is None or dict(self._as_headers(self._secret.text)) == dict(rejected):
            try:
                await self._fetched()
            except CredentialError:
                return False
        assert self._secret is not None
        return dict(self._as_headers(self._secret.text)) != dict(rejected)

    async def _fetched(self) -> Secret:
        """Return the secret of a fetch that begins now or is under way. Raises CredentialError."""
        task = self._begin()
        if task is None:
            raise CredentialError(self._complaint)
        done, _ = await asyncio.wait((task,), timeout=self._timeout_s)
        if not done:
            raise self._failed(f"{self._name} took longer than {self._timeout_s:g} s")
        return task.result()

    def _begin(self) -> asyncio.Task[Secret] | None:
        """Return the fetch that is under way, or a new one; None soon after one failed or hung."""
        if self._failed_s is not None and self._clock() - self._failed_s < _RETRY_S:
            return None
        if self._task is not None and not self._task.done():
            return self._task
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(_seen)
        return self._task

    async def _run(self) -> Secret:
        """Fetch the secret and keep it. Raises CredentialError."""
        try:
            found = await self._fetch()
        except CredentialError as error:
            raise self._failed(str(error)) from error
        except Exception as error:  # the vendors' many kinds
            raise self._failed(f"{self._name} failed: {type(error).__name__}") from error
        if self._secret is not None and found.text != self._secret.text:
            self._before = self._secret.text
            logger.info("credential renewed setting=%s", self._name)
        self._secret, self._failed_s = found, None
        return found

    def _failed(self, complaint: str) -> CredentialError:
        if self._failed_s is None or self._clock() - self._failed_s >= _RETRY_S:
            logger.error("no credential reason=%r", complaint)
        self._failed_s, self._complaint = self._clock(), complaint
        return CredentialError(complaint)


def _seen(task: asyncio.Task[Secret]) -> None:
    """Look at a failure that was logged, and that no request waits for."""
    if not task.cancelled():
        task.exception()


class FileKey:
    """Reads a key from a file, again where the file has changed (a mounted secret)."""

    def __init__(self, path: Path, name: str, clock: Callable[[], float]) -> None:
        self._path = path
        self._name = name
        self._clock = clock
        self._seen: tuple[int, int, int] | None = None
        self._looked_s: float | None = None

    async def fetch(self) -> Secret:
        """Read it. Raises CredentialError."""
        return await in_daemon(self._read)

    def is_stale(self) -> bool:
        """Return whether the file has changed; looks at most once a second."""
        now_s = self._clock()
        if self._looked_s is not None and now_s - self._looked_s < 1.0:
            return False
        self._looked_s = now_s
        try:
            return self._stamp() != self._seen
        except OSError:
            return False  # the key in use stays in use

    def _stamp(self) -> tuple[int, int, int]:
        stat = self._path.stat()
        return stat.st_mtime_ns, stat.st_ino, stat.st_size

    def _read(self) -> Secret:
        try:
            seen = self._stamp()
            with self._path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise CredentialError(f"{self._name} cannot be read: {reason}") from None
        self._seen = seen
        if len(data) > _MAX_BYTES:
            raise CredentialError(f"{self._name} has more than {_MAX_BYTES} bytes")
        return Secret(text=checked(data.decode("utf-8", "replace"), self._name))


class CommandKey:
    """Has a program print a key. No shell is involved; time and output are bounded."""

    def __init__(
        self, words: Sequence[str], name: str, ttl_s: float, clock: Callable[[], float]
    ) -> None:
        """`ttl_s`: the key is asked for again after this time."""
        self._words = words
        self._name = name
        self._ttl_s = ttl_s
        self._clock = clock

    async def fetch(self) -> Secret:
        """Run it. Raises CredentialError; what it prints to stderr is not repeated."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise CredentialError(f"{self._name} cannot be run: {reason}") from None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_FETCH_S):
                printed = bytearray()
                while data := await process.stdout.read(4096):
                    printed += data
                    if len(printed) > _MAX_BYTES:
                        raise CredentialError(f"{self._name} printed more than {_MAX_BYTES} bytes")
                status = await process.wait()
        except TimeoutError:
            raise CredentialError(f"{self._name} took longer than {_FETCH_S:g} s") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what it has started itself
                await process.wait()
        if status != 0:
            raise CredentialError(f"{self._name} ended with status {status}")
        text = checked(printed.decode("utf-8", "replace"), self._name)
        return Secret(text=text, refresh_s=self._clock() + self._ttl_s)


async def in_daemon(work: Callable[[], _Result]) -> _Result:
    """Run work that blocks in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def resolve(result: _Result | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(_Result, result))

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            failure = error
        with suppress(RuntimeError):  # the loop is closed: it is awaited no more
            loop.call_soon_threadsafe(resolve, result, failure)

    threading.Thread(target=run, name="credential", daemon=True).start()
    return await future


def token_secret(text: str, expires_at: float, *, clock_s: float, wall_s: float) -> Secret:
    """Return a token that expires at a time in seconds since 1970."""
    left_s = max(expires_at - wall_s, 0.0)
    return Secret(
        text=text,
        refresh_s=clock_s + max(left_s - _EARLY_S, left_s / 2),
        expires_s=clock_s + left_s,
    )
