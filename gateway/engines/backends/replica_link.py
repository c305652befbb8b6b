"""One connection to an engine's process, from connecting to its end."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from outrider.engine.errors import EngineDiedError, EngineError
from outrider.gateway.engines.backends.fleet_keys import FleetKeys
from outrider.gateway.engines.backends.wire import (
    PROTOCOL_VERSION,
    Command,
    Crashed,
    Goodbye,
    Hello,
    Ping,
    Reply,
    Stop,
    Welcome,
    decode_reply,
    encode,
    unpack_error,
)

logger = logging.getLogger(__name__)

_NEVER_MS: Final = 24 * 3600 * 1000
_MOST_AT_ONCE: Final = 64
_CONNECT_TIMEOUT_S: Final = 5.0
_LINGER_MS: Final = 100  # for the word that we leave
_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
)


class ReplicaRefusedError(EngineError):
    """A replica that another attempt would not reach either: wrong key, version or models."""

    code = "replica_refused"


class HandshakeError(EngineDiedError):
    """A replica closed the connection before it was one: it is ending, or its keys are others."""


class ReplicaLink:
    """Connects in the constructor. `close` must be called in any case."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: FleetKeys | None,
        *,
        on_reply: Callable[[Reply], None],
        on_end: Callable[[], None],
    ) -> None:
        """`on_reply` sees every reply after the welcome; `on_end` is called at the end, once."""
        self.endpoint = endpoint
        self.is_local = endpoint.startswith("ipc://")
        """True if the engine is on this machine and shares its clock."""
        self._has_keys = keys is not None
        self._on_reply = on_reply
        self._on_end = on_end
        self._ended = asyncio.Event()
        self._end_reason = ""
        self._error_class: type[EngineError] = EngineDiedError
        self._has_shaken_hands = asyncio.Event()
        self._was_heard = False
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = _LINGER_MS
        # No bound: what can be in flight is bounded by the requests that the engine admits.
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.reconnect_ivl = _NEVER_MS  # what was under way is lost: a new link is needed
        self._socket.connect_timeout = round(1000 * _CONNECT_TIMEOUT_S)
        self._socket.ipv6 = "[" in endpoint
        if keys is not None:
            self._socket.curve_serverkey = keys.server.public
            self._socket.curve_publickey = keys.client.public
            self._socket.curve_secretkey = keys.client.secret
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        self._watch()  # a descriptor tells nothing of a socket that was never looked at
        self._socket.connect(endpoint)
        self.send(Hello(PROTOCOL_VERSION))

    async def welcomed(self, timeout_s: float | None) -> Welcome:
        """Wait until the replica has loaded its models and let us in.

        `timeout_s`: for that, from the moment that the connection is made; None: no limit.

        Raises EngineDiedError where it cannot be reached, HandshakeError where it closes the
        connection at once, ReplicaRefusedError where it says why it refuses us.
        """
        waits = (
            (self._has_shaken_hands.wait(), _CONNECT_TIMEOUT_S, "no connection within {:g} s"),
            (asyncio.shield(self._welcome), timeout_s, "it said nothing for {:g} s"),
        )
        for awaitable, limit_s, complaint in waits:
            if not await self._unless_ended(awaitable, limit_s):
                self.kill(complaint.format(limit_s))
        if self._welcome.done():
            return self._welcome.result()
        raise self._error_class(f"The engine at {self.endpoint} does not serve: {self._end_reason}")

    async def _unless_ended(self, awaitable: Awaitable[object], timeout_s: float | None) -> bool:
        """Wait for something, or for the end; whether either came in time."""
        waits = [asyncio.ensure_future(each) for each in (awaitable, self._ended.wait())]
        try:
            done, _ = await asyncio.wait(
                waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            return bool(done)
        finally:
            for each in waits:
                each.cancel()

    def send(self, command: Command) -> None:
        """Pass a command on; never blocks. Nothing happens after the end."""
        if not self._ended.is_set():
            with contextlib.suppress(zmq.Again):  # the end is about to be noticed
                self._socket.send(encode(command), zmq.NOBLOCK)
            # Whatever touches the socket may swallow the sign that something has come.
            if is_readable(self._socket):
                self._loop.call_soon(self._read)

    def ping(self) -> None:
        """Ask for a sign of life."""
        self.send(Ping())

    def was_heard(self) -> bool:
        """Return whether a message arrived since the last call."""
        was_heard, self._was_heard = self._was_heard, False
        return was_heard

    async def wait_exit(self, timeout_s: float | None) -> bool:
        """Wait for the connection's end, at most `timeout_s`. Whether it has ended."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def describe_exit(self) -> str:
        """Return why the connection ended, in a few words."""
        return self._end_reason

    def kill(self, reason: str, error_class: type[EngineError] = EngineDiedError) -> None:
        """End the connection at once; nothing more is heard on it.

        `error_class`: what `welcomed` raises.
        """
        if not self._ended.is_set():
            self._end_reason, self._error_class = reason, error_class
            self._ended.set()
            self._on_end()

    def close(self) -> None:
        """End the connection and release everything. May be called again."""
        if self._socket.closed:
            return
        self.send(Stop())
        self.kill("it was closed")
        for each in (self._socket, self._monitor):
            self._loop.remove_reader(each.fileno())
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _read(self) -> None:
        """Take what has come, in order; the streams have a turn now and then."""
        if self._socket.closed:
            return
        try:
            for _ in range(_MOST_AT_ONCE):
                reply = decode_reply(self._socket.recv(zmq.NOBLOCK))
                self._was_heard = True
                self._take(reply)
        except zmq.Again:
            return
        except Exception:
            logger.exception("reply of an engine could not be handled endpoint=%s", self.endpoint)
            self.kill("its reply could not be handled")
        else:
            self._loop.call_soon(self._read)

    def _take(self, reply: Reply) -> None:
        if self._ended.is_set():
            return
        match reply:
            case Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(reply)
            case Goodbye(reason, is_final):
                self.kill(reason, ReplicaRefusedError if is_final else EngineDiedError)
            case Crashed(error):
                self.kill(str(unpack_error(error)))
            case _:
                self._on_reply(reply)

    def _watch(self) -> None:
        """Take the socket's events, which tell of the connection's beginning and end."""
        while not self._monitor.closed and is_readable(self._monitor):
            self._note(parse_monitor_message(self._monitor.recv_multipart())["event"])

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._has_shaken_hands.set()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            reason = "it does not know the gateway's key: both need the same key file"
            self.kill(reason, ReplicaRefusedError)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self.kill(self._no_handshake(), ReplicaRefusedError)
        elif self._has_shaken_hands.is_set():
            while not self._ended.is_set() and is_readable(self._socket):
                self._read()  # what came before the end
            self.kill("the connection was closed")
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_DISCONNECTED):
            self.kill(self._no_handshake(), HandshakeError)
        else:
            self.kill("nothing listens there")

    def _no_handshake(self) -> str:
        if self._has_keys:
            return "it did not accept the connection: is the key file the same at both?"
        return "it did not accept the connection: it may want a key (--engine-key)"


def is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """Return whether a message has arrived. Faster than to try, which raises."""
    return bool(cast(int, socket.get(zmq.EVENTS)) & zmq.POLLIN)
