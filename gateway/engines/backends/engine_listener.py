"""An engine's end of the lines to many gateways: one socket, which any of them connects to.

A connection is one gateway's from its `Hello` to its end. Nothing is lost on one: it is TCP or a
socket file, and where a gateway reads too slowly for the queue the connection ends. So a gateway
that connects again has a new connection, and messages for the old one are dropped.
"""

import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, cast

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from outrider.engine.errors import EngineDiedError, InvalidRequestError
from outrider.engine.events import Ending, EngineInfo
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.connected_gateway import (
    ConnectedGateway,
    ListenerBounds,
    RequestsInFlight,
    submitted_id,
)
from outrider.gateway.engines.backends.fleet_keys import FleetKeys, guard, start_guard
from outrider.gateway.engines.backends.replica_link import is_readable
from outrider.gateway.engines.backends.wire import (
    PROTOCOL_VERSION,
    Abort,
    AdapterReply,
    AnyEvent,
    BlocksChanged,
    BlocksReset,
    Command,
    EngineDraining,
    Events,
    GetBlocks,
    GetStats,
    Goodbye,
    Hello,
    KeepOnTier,
    Ping,
    Pong,
    PrepareAdapter,
    PullBlocks,
    PulledBlocks,
    Refused,
    Reply,
    StatsReply,
    Stop,
    Submit,
    SwitchTier,
    Unpin,
    Welcome,
    decode_command,
    encode,
    pack_error,
    with_id,
)
from outrider.gateway.settings.errors import SettingsError
from outrider.verifier.params import Tier

logger = logging.getLogger(__name__)

DRAINING_MESSAGE: Final = "This engine is being stopped and takes no new requests."

_WAKE_MS: Final = 1000  # when nothing comes, to look for gateways that have gone silent
_MOST_AT_ONCE: Final = 512  # messages taken in between two steps
_MOST_UNREAD: Final = 256  # messages of one gateway that the engine has not come to
_LINGER_MS: Final = 2_000
_HAND_OVER_S: Final = 1.0  # for engines that ask a draining one for blocks


class EngineListener:
    """A `Channel` with many gateways at its end. Made, used and closed in one thread."""

    def __init__(
        self,
        endpoint: str,
        keys: FleetKeys | None,
        bounds: ListenerBounds,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the address. Gateways that come before `open` wait. Raises SettingsError."""
        self._bounds = bounds
        self._clock = clock
        self._welcome: Welcome | None = None
        self._gateways: dict[bytes, ConnectedGateway] = {}
        self._requests = RequestsInFlight()
        self._num_seen = 0
        self._calls: dict[int, tuple[ConnectedGateway, int]] = {}
        self._num_calls = 0
        self._aborts: list[Command] = []
        self._look_s = 0.0
        self._drain_timeout_s: float | None = None
        self._ends_s: float | None = None
        self._busy_s = 0.0  # when it last had a request or a call, while it drains
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self._bind(endpoint, keys)
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_out, zmq.POLLIN)

    def _bind(self, endpoint: str, keys: FleetKeys | None) -> None:
        self._socket.linger = _LINGER_MS
        self._socket.router_mandatory = True  # a send to one that has gone says so
        self._socket.sndhwm, self._socket.rcvhwm = self._bounds.max_queued, _MOST_UNREAD
        self._socket.maxmsgsize = self._bounds.max_message_bytes
        self._socket.ipv6 = "[" in endpoint
        self._is_local = endpoint.startswith("ipc://")
        if keys is not None:
            self._authenticator = start_guard(self._context, keys)
            guard(self._socket, keys)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise SettingsError(
                f"cannot listen on {endpoint}: {zmq.strerror(error.errno or 0).lower()}. Choose "
                "another address with --listen (port 0 takes any free one) or stop what listens "
                "there."
            ) from None

    @property
    def endpoint(self) -> str:
        """The address that gateways connect to."""
        return cast(bytes, self._socket.last_endpoint).rstrip(b"\0").decode()

    def open(self, info: EngineInfo, tokenizers: Mapping[Tier, str]) -> None:
        """Let gateways in from now on. `tokenizers`: fingerprints, by tier."""
        self._welcome = Welcome(secrets.token_hex(8), info, dict(tokenizers))

    # ---- the loop's side --------------------------------------------------------------------

    def receive(self, *, wait: bool) -> list[Command]:
        """Return what has arrived; with `wait`, nothing after a while. At the end, `Stop`."""
        if wait:
            for readable, _ in self._poller.poll(0 if self._aborts else _WAKE_MS):
                if readable is not self._socket:
                    self._wake_out.recv(64)
        commands = self._take_all()
        self._part_with_silent()
        if self._drain_timeout_s is not None:
            self._drain()
        commands += self._aborts
        self._aborts.clear()
        if self._has_drained:
            self._say_to_all(Goodbye("the engine was stopped"))
            commands.append(Stop())
        return commands

    def send(self, reply: Reply, /) -> None:
        """Send a reply to the gateway that it is for; what is for one that has gone is dropped."""
        match reply:
            case Events():
                self._send_events(reply)
            case Refused(engine_id, error):
                if (owner := self._requests.remove(engine_id)) is not None:
                    gateway, own_id = owner
                    self._say(gateway, Refused(own_id, error))
            case StatsReply() | AdapterReply() | PulledBlocks():
                gateway, call_id = self._calls.pop(reply.call_id)
                gateway.num_calls -= 1
                self._say(gateway, msgspec.structs.replace(reply, call_id=call_id))
            case BlocksChanged() | BlocksReset():
                self._send_blocks(reply)
            case _:
                self._say_to_all(reply)

    def _send_blocks(self, news: BlocksChanged | BlocksReset) -> None:
        """Send news of the prefix cache to the gateways that asked for them."""
        is_reset = isinstance(news, BlocksReset)
        for gateway in list(self._gateways.values()):
            if gateway.wants_reset if is_reset else gateway.wants_blocks:
                gateway.wants_blocks, gateway.wants_reset = True, False
                self._say(gateway, news)

    def _send_events(self, events: Events) -> None:
        """Send each gateway its part of a step's events."""
        parts: dict[ConnectedGateway, list[AnyEvent]] = {}
        for envelope in events.envelopes:
            engine_id = envelope.event.request_id
            if (owner := self._requests.owner(engine_id)) is not None:
                gateway, own_id = owner
                parts.setdefault(gateway, []).append(with_id(envelope, own_id))
                if isinstance(envelope.event, Ending):
                    self._requests.remove(engine_id)
        for gateway, own_events in parts.items():
            self._say(gateway, Events(own_events))

    # ---- the gateways' side -----------------------------------------------------------------

    def _take_all(self) -> list[Command]:
        commands: list[Command] = []
        if self._welcome is None:
            return commands
        for _ in range(_MOST_AT_ONCE):
            if not is_readable(self._socket):
                break
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            commands += self._take(identity, frames)
        return commands

    def _take(self, identity: bytes, frames: list[bytes]) -> list[Command]:
        """Return what the engine is to do about one message; answer what is not its business."""
        gateway = self._gateways.get(identity)
        try:
            (frame,) = frames
            command = decode_command(frame)
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            self._note_malformed(identity, frames, str(error))
            return []
        if isinstance(command, Hello):
            self._greet(identity, gateway, command)
            return []
        if gateway is None:
            self._turn_away(identity, "the engine knows this connection no more; connect again")
            return []
        gateway.heard_s = self._clock()
        return self._translated(gateway, command)

    def _note_malformed(self, identity: bytes, frames: list[bytes], error: str) -> None:
        """Refuse a request that has values that no engine takes; end the connection otherwise."""
        gateway = self._gateways.get(identity)
        refused_id = submitted_id(frames[0]) if len(frames) == 1 else None
        if gateway is None or refused_id is None or refused_id in gateway.engine_ids:
            self._turn_away(identity, f"a message could not be read: {error}")
        else:
            self._say(gateway, Refused(refused_id, pack_error(InvalidRequestError(error))))

    def _translated(self, gateway: ConnectedGateway, command: Command) -> list[Command]:
        """Return a command as the engine knows it, with its own ids."""
        match command:
            case Submit(request):
                return self._admitted(gateway, request)
            case SwitchTier() | KeepOnTier() | Abort():
                engine_id = gateway.engine_ids.get(command.request_id)
                if engine_id is not None:
                    return [msgspec.structs.replace(command, request_id=engine_id)]
            case Unpin():
                return [command]
            case GetStats() | PrepareAdapter() | PullBlocks() if (
                gateway.num_calls < self._bounds.max_calls
            ):
                self._num_calls += 1
                gateway.num_calls += 1
                self._calls[self._num_calls] = (gateway, command.call_id)
                return [msgspec.structs.replace(command, call_id=self._num_calls)]
            case GetBlocks():
                is_asked = any(each.wants_reset for each in self._gateways.values())
                gateway.wants_blocks, gateway.wants_reset = False, True
                return [] if is_asked else [command]
            case Ping():
                self._say(gateway, Pong())
            case Stop():
                self._part_with(gateway, "it left")
            case _:
                self._turn_away(gateway.identity, "a message that no gateway sends", is_final=True)
        return []

    def _admitted(self, gateway: ConnectedGateway, request: EngineRequest) -> list[Command]:
        """Return the submission as the engine knows it, or refuse it."""
        refusal = gateway.refusal(request, self._bounds)
        if self._drain_timeout_s is not None:
            refusal = EngineDiedError(DRAINING_MESSAGE)
        if refusal is not None:
            self._say(gateway, Refused(request.request_id, pack_error(refusal)))
            return []
        engine_id = self._requests.add(gateway, request.request_id)
        return [Submit(gateway.here(request, engine_id, self._clock(), is_local=self._is_local))]

    def _greet(self, identity: bytes, gateway: ConnectedGateway | None, hello: Hello) -> None:
        assert self._welcome is not None
        if hello.protocol != PROTOCOL_VERSION:
            self._turn_away(
                identity,
                f"it speaks version {PROTOCOL_VERSION} of the protocol, the gateway version "
                f"{hello.protocol}: install the same release of Outrider at both",
                is_final=True,
            )
        elif gateway is not None:
            self._turn_away(identity, "a second hello", is_final=True)
        elif len(self._gateways) >= self._bounds.max_gateways:
            most = self._bounds.max_gateways
            self._turn_away(identity, f"{most} gateways are connected, and no more are taken")
        else:
            self._num_seen += 1
            gateway = ConnectedGateway(
                number=self._num_seen,
                identity=identity,
                heard_s=self._clock(),
            )
            self._gateways[identity] = gateway
            logger.info("gateway connected number=%d", gateway.number)
            self._say(gateway, self._welcome)
            if self._drain_timeout_s is not None:
                self._say(gateway, EngineDraining())

    def _turn_away(self, identity: bytes, reason: str, *, is_final: bool = False) -> None:
        """Tell a connection that it has ended, and abort its requests."""
        if (gateway := self._gateways.get(identity)) is not None:
            self._part_with(gateway, reason)
        self._transmit(identity, Goodbye(reason, is_final))

    def _part_with(self, gateway: ConnectedGateway, reason: str) -> None:
        logger.info(
            "gateway has gone number=%d requests=%d reason=%s",
            gateway.number,
            len(gateway.engine_ids),
            reason,
        )
        del self._gateways[gateway.identity]
        self._aborts += [Abort(engine_id) for engine_id in gateway.engine_ids.values()]

    def _part_with_silent(self) -> None:
        """Abort the requests of gateways that were not heard for too long.

        A process of this machine may have been stopped for a while: sending shows if it has ended.
        """
        now_s = self._clock()
        if now_s < self._look_s:
            return
        self._look_s = now_s + min(1.0, self._bounds.silent_after_s / 4)
        oldest_s = now_s - self._bounds.silent_after_s
        for gateway in [each for each in self._gateways.values() if each.heard_s < oldest_s]:
            if self._is_local:
                self._say(gateway, Pong())
            else:
                self._turn_away(
                    gateway.identity, f"it was silent for {self._bounds.silent_after_s:g} s"
                )

    def _say(self, gateway: ConnectedGateway, reply: Reply) -> None:
        """Send a reply to a gateway, if it has not gone."""
        if gateway.identity in self._gateways:
            failure = self._transmit(gateway.identity, reply)
            if failure is not None:
                self._part_with(gateway, failure)

    def _say_to_all(self, reply: Reply) -> None:
        for gateway in list(self._gateways.values()):
            self._say(gateway, reply)

    def _transmit(self, identity: bytes, reply: Reply) -> str | None:
        """Send without waiting; return why it could not be sent, or None."""
        message = encode(reply)
        try:
            self._socket.send(identity, zmq.NOBLOCK | zmq.SNDMORE)  # half send_multipart's time
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return "it reads too slowly"
        except zmq.ZMQError as error:  # EHOSTUNREACH
            return zmq.strerror(error.errno or 0).lower()
        return None

    # ---- the end ----------------------------------------------------------------------------

    def drain(self, timeout_s: float) -> None:
        """Take no new requests, and stop when the running ones have ended or after `timeout_s`.

        May be called from a signal handler, or another thread.
        """
        self._drain_timeout_s = timeout_s
        with suppress(OSError):  # it has ended
            self._wake_in.send(b"\0")

    def _drain(self) -> None:
        assert self._drain_timeout_s is not None
        if self._ends_s is None:
            self._busy_s = self._clock()
            self._ends_s = self._busy_s + self._drain_timeout_s
            self._say_to_all(EngineDraining())

    @property
    def _has_drained(self) -> bool:
        if self._ends_s is None:
            return False
        now_s, gateways = self._clock(), self._gateways.values()
        if self._calls or any(gateway.engine_ids for gateway in gateways):
            self._busy_s = now_s
            return now_s >= self._ends_s
        # Those that follow its cache have answers go on elsewhere, which get their blocks here.
        lingers = any(gateway.wants_blocks or gateway.wants_reset for gateway in gateways)
        return now_s >= min(self._busy_s + (_HAND_OVER_S if lingers else 0.0), self._ends_s)

    def close(self) -> None:
        """Close the socket; the last messages have a moment to leave."""
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        self._wake_out.close()
        self._wake_in.close()
