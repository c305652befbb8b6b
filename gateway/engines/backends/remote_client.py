"""An engine replica on this or another machine, which other gateways may share."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Final

import zmq

from outrider.engine.errors import EngineDiedError, EngineError
from outrider.gateway.engines.backends.fleet_keys import FleetKeys
from outrider.gateway.engines.backends.replica_link import (
    HandshakeError,
    ReplicaLink,
    ReplicaRefusedError,
)
from outrider.gateway.engines.backends.streams import SHUT_DOWN_MESSAGE
from outrider.gateway.engines.backends.watched_client import (
    MAX_BACKOFF_S,
    MIN_BACKOFF_S,
    Patience,
    WatchedClient,
)
from outrider.gateway.engines.backends.wire import (
    AdapterReply,
    BlocksChanged,
    BlocksReset,
    Command,
    Draining,
    Events,
    Refused,
    Reply,
    StatsReply,
    Submit,
    Welcome,
)
from outrider.verifier.params import Tier

log = logging.getLogger(__name__)

_PATIENCE: Final = Patience()
_MOST_PING_INTERVAL_S: Final = 5.0  # the replica forgets gateways that say nothing for 30 s
_MOST_HANDSHAKES: Final = 3  # that fail in a row, before a start fails


class RemoteEngineClient(WatchedClient):
    """An `EngineClient` over a connection to an engine replica (`outrider engine`).

    Where the connection ends, whatever ended it, the next one is another attempt: the replica
    aborts what the old one had in flight, nothing that it still had to say is heard, and requests
    go on behind what their readers have (`EngineRequest.resumed_token_ids`), or end with `Failed`
    where there is no patience for them. They have met a death where the next replica that welcomes
    us is another process.
    """

    def __init__(
        self,
        endpoint: str,
        keys: FleetKeys | None = None,
        *,
        patience: Patience = _PATIENCE,
        tokenizers: "Future[Mapping[Tier, str]] | None" = None,
        on_lost: Callable[[], None] = lambda: None,
        rng: random.Random | None = None,
    ) -> None:
        """keys: None for a replica without. rng: spreads out the attempts of many gateways.

        `tokenizers`: fingerprints, by tier, from the thread that loads them; a replica with others
        is refused. `on_lost` is called when a connection has ended: the next replica's cache may
        be another.
        """
        super().__init__(patience)
        self.endpoint = endpoint
        self._keys = keys
        self._rng = random.Random() if rng is None else rng
        self._tokenizers = tokenizers
        self._on_lost = on_lost
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._link: ReplicaLink | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._start_lock = asyncio.Lock()
        self._generation = ""
        self._is_draining = False
        self._reason = "it was not tried yet"

    async def start(self) -> None:
        """Connect, and wait until the replica serves, for as long as that takes.

        Raises ReplicaRefusedError where waiting does not help: the key, the version or the models
        are others. A second call waits for the same.
        """
        async with self._start_lock:
            if self._supervisor is not None:
                return
            if self._context is not None:
                raise EngineDiedError("This engine client is closed; make a new one.")
            self._context = zmq.Context()
            try:
                await self._connect_until(may_fail=True)
            except BaseException:
                await self.close()
                raise
            self._supervisor = asyncio.create_task(self._supervise(), name="replica-supervisor")

    async def close(self) -> None:
        """Leave the replica, which aborts our requests. May be called again."""
        self._streams.close(SHUT_DOWN_MESSAGE)
        self._cancel_giving_up()
        self._info = None
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        self._leave()
        if self._context is not None:
            self._context.destroy(linger=0)

    @property
    def is_ready(self) -> bool:
        """True if the replica takes requests, and has answered lately."""
        return super().is_ready and not self._is_draining

    @property
    def generation(self) -> str:
        """The replica's process that welcomed us last: a restarted one has another."""
        return self._generation

    @property
    def is_draining(self) -> bool:
        """True if the replica is about to end: it finishes what it has, and takes nothing new."""
        return self._is_draining

    @property
    def not_ready_reason(self) -> str:
        """Message for clients while the replica is not ready."""
        if self._is_draining:
            return "The engine is being stopped; try again soon."
        return f"The engine cannot be reached ({self._reason}); try again soon."

    def _send(self, command: Command) -> None:
        if self._link is None or not self._streams.is_open:
            return  # nothing is in flight there that a command could be about
        if isinstance(command, Submit) and command.request.arrival_s is not None:
            # The age: another machine has another clock.
            age_s = time.monotonic() - command.request.arrival_s
            command = Submit(replace(command.request, arrival_s=-age_s))
        self._link.send(command)

    async def _supervise(self) -> None:
        """Wait for the connection's end and make the next, for as long as the client is open."""
        while True:
            assert self._link is not None
            await self._watch(self._link, _MOST_PING_INTERVAL_S)
            self._reason = self._link.describe_exit()
            log.error("engine is lost endpoint=%s reason=%s", self.endpoint, self._reason)
            await self._connect_until(may_fail=False)
            log.info("engine is connected again endpoint=%s", self.endpoint)

    async def _connect_until(self, *, may_fail: bool) -> None:
        """Return when a replica has welcomed us; `may_fail`: raise where it never will."""
        backoff_s, num_handshakes = MIN_BACKOFF_S, 0
        while True:
            try:
                await self._connect()
            except EngineError as error:
                if str(error) != self._reason:
                    log.warning("engine cannot be used reason=%s", error)
                self._reason = str(error)
                num_handshakes = num_handshakes + 1 if isinstance(error, HandshakeError) else 0
                is_final = isinstance(error, ReplicaRefusedError)
                if may_fail and (is_final or num_handshakes == _MOST_HANDSHAKES):
                    raise ReplicaRefusedError(str(error)) from None
                # Many gateways wait for one replica: they should not come all at once.
                await asyncio.sleep(backoff_s * self._rng.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S / 6)
            else:
                return

    async def _connect(self) -> None:
        """Make one connection, from socket to welcome. Raises EngineError."""
        assert self._context is not None
        self._leave()
        link = self._link = ReplicaLink(
            self._context,
            self.endpoint,
            self._keys,
            on_reply=self._handle,
            on_end=self._note_lost,
        )
        welcome = await link.welcomed(self._patience.stall_timeout_s)
        await self._check(welcome)
        if self._generation and welcome.generation != self._generation and not self._is_draining:
            self._streams.count_death()
        self._generation, self._is_draining = welcome.generation, False
        self._info = welcome.info
        self._resume()

    async def _check(self, welcome: Welcome) -> None:
        """Raise ReplicaRefusedError for a replica of other models than the gateway's."""
        if self._tokenizers is None:
            return
        expected = await asyncio.shield(asyncio.wrap_future(self._tokenizers))
        for tier, fingerprint in welcome.tokenizers.items():
            if expected.get(tier, fingerprint) != fingerprint:
                raise ReplicaRefusedError(
                    f"The engine at {self.endpoint} serves {welcome.info.tiers[tier].model_id} as "
                    f"its {tier} model, whose tokenizer ({fingerprint[:12]}) is another than that "
                    f"of the gateway's ({expected[tier][:12]}). Give both the same --{tier}."
                )

    def _leave(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _note_lost(self) -> None:
        self._streams.lost(resumes=self._patience.resume_within_s > 0)
        self._give_up_later()
        self._on_lost()

    def _handle(self, reply: Reply) -> None:
        match reply:
            case Events() | Refused() | StatsReply() | AdapterReply():
                self._streams.receive(reply)
            case Draining():
                log.info("engine is draining endpoint=%s", self.endpoint)
                self._is_draining = True
            case BlocksChanged() | BlocksReset():
                self._note_blocks(reply)
