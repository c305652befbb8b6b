"""An engine's lines to other engines, which it asks for blocks: the same sockets that gateways use.

They live in a thread with a loop of its own, so no step waits for them.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import zmq

from outrider.engine.cache.extents import Extent, ExtentError, unpack_extent
from outrider.engine.cache.peers import BlocksWanted, PeerError
from outrider.engine.errors import EngineError
from outrider.gateway.engines.backends.fleet_keys import FleetKeys, require_safe
from outrider.gateway.engines.backends.replica_link import ReplicaLink
from outrider.gateway.engines.backends.wire import PullBlocks, PulledBlocks, Reply, unpack_error
from outrider.gateway.settings.errors import SettingsError

logger = logging.getLogger(__name__)

_MOST_CALLS: Final = 32  # under way on one line; an engine takes 64 of each
_MOST_LINES: Final = 256
_WELCOME_S: Final = 5.0
_PAUSE_S: Final = 1.0  # after an engine could not be reached
_GRACE_S: Final = 1.0  # for an answer that is due

Extents = list[Extent]


@dataclass(eq=False, slots=True)
class _Call:
    """What an engine is asked for."""

    wanted: BlocksWanted
    future: "Future[Extents]"


@dataclass(eq=False, slots=True)
class _Line:
    """A connection to one engine."""

    endpoint: str
    link: ReplicaLink | None = None
    is_welcome: bool = False
    waiting: deque[_Call] = field(default_factory=deque)
    calls: dict[int, _Call] = field(default_factory=dict)


class PeerLines:
    """Implements `Peers`. `keys`: the fleet's; engines without are on this machine alone."""

    def __init__(self, keys: FleetKeys | None, *, is_insecure: bool = False) -> None:
        self._keys = keys
        self._is_insecure = is_insecure
        self._loop = asyncio.new_event_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lines: dict[str, _Line] = {}
        self._paused_until_s: dict[str, tuple[float, str]] = {}
        self._meetings: set[asyncio.Task[None]] = set()
        self._num_calls = 0
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    def pull(self, endpoint: str, wanted: BlocksWanted) -> "Future[Extents]":
        """Ask the engine at an address for blocks; see `Peers.pull`."""
        call = _Call(wanted, Future())
        self._loop.call_soon_threadsafe(self._begin, endpoint, call)
        return call.future

    def close(self) -> None:
        """End all lines, and the thread."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for line in list(self._lines.values()):
            self._end(line)
        for meeting in self._meetings:
            meeting.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._meetings, return_exceptions=True))
        self._loop.close()

    # ---- in the thread ----------------------------------------------------------------------

    def _begin(self, endpoint: str, call: _Call) -> None:
        try:
            self._line(endpoint).waiting.append(call)
        except PeerError as error:
            _fail(call, error)
        else:
            self._send_waiting(self._lines[endpoint])

    def _line(self, endpoint: str) -> _Line:
        """Return the line to an engine, which is made where there is none. Raises PeerError."""
        if (line := self._lines.get(endpoint)) is not None:
            return line
        until_s, reason = self._paused_until_s.get(endpoint, (0.0, ""))
        if time.monotonic() < until_s:
            raise PeerError(reason)
        if len(self._lines) >= _MOST_LINES:
            raise PeerError(f"{_MOST_LINES} lines to engines are open, and no more are made.")
        try:
            require_safe(endpoint, self._keys, insecure=self._is_insecure)
        except SettingsError as error:
            raise PeerError(str(error)) from None
        line = self._lines[endpoint] = _Line(endpoint)
        meeting = self._loop.create_task(self._meet(line))
        self._meetings.add(meeting)
        meeting.add_done_callback(self._meetings.discard)
        return line

    async def _meet(self, line: _Line) -> None:
        def end() -> None:  # not in the middle of the link's own work
            self._loop.call_soon(self._end, line)

        line.link = ReplicaLink(
            self._context,
            line.endpoint,
            self._keys,
            on_reply=lambda reply: self._take(line, reply),
            on_end=end,
        )
        try:
            await line.link.welcomed(_WELCOME_S)
        except EngineError as error:
            self._paused_until_s[line.endpoint] = (time.monotonic() + _PAUSE_S, str(error))
            self._end(line)
        else:
            line.is_welcome = True
            self._send_waiting(line)

    def _send_waiting(self, line: _Line) -> None:
        while line.is_welcome and line.waiting and len(line.calls) < _MOST_CALLS:
            call = line.waiting.popleft()
            if call.future.cancelled():
                continue
            self._num_calls += 1
            line.calls[self._num_calls] = call
            assert line.link is not None, "it has welcomed us"
            line.link.send(PullBlocks(self._num_calls, call.wanted))
            # An engine that does not answer must not hold the place of others' calls.
            self._loop.call_later(
                call.wanted.wait_s + _GRACE_S, self._answer, line, self._num_calls, list
            )

    def _take(self, line: _Line, reply: Reply) -> None:
        if isinstance(reply, PulledBlocks):
            self._answer(line, reply.call_id, lambda: _extents(reply))

    def _answer(self, line: _Line, call_id: int, extents: Callable[[], Extents]) -> None:
        call = line.calls.pop(call_id, None)
        if call is not None and call.future.set_running_or_notify_cancel():
            try:
                call.future.set_result(extents())
            except (PeerError, ExtentError) as error:
                call.future.set_exception(error)
            except Exception as error:  # noqa: BLE001 - nobody is to wait for ever
                call.future.set_exception(ExtentError(f"it cannot be read: {error!r}"))
        self._send_waiting(line)

    def _end(self, line: _Line) -> None:
        if line.link is not None:
            line.link.close()
        reason = "it was closed" if line.link is None else line.link.describe_exit()
        if self._lines.get(line.endpoint) is line:
            del self._lines[line.endpoint]
        calls = [*line.calls.values(), *line.waiting]
        line.calls.clear()
        line.waiting.clear()
        for call in calls:
            _fail(call, PeerError(f"The engine at {line.endpoint} sends nothing: {reason}."))


def _fail(call: _Call, error: PeerError) -> None:
    if call.future.set_running_or_notify_cancel():
        call.future.set_exception(error)


def _extents(reply: PulledBlocks) -> Extents:
    """Return what a reply holds. Raises PeerError where it refuses, ExtentError for damage."""
    if reply.error is not None:
        raise PeerError(str(unpack_error(reply.error)))
    return [unpack_extent(each) for each in reply.extents]
