"""The clients of engines that can end: they notice it, and answers wait for the next engine."""

import asyncio
import logging
import time
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Final

import zmq

from outrider.engine.errors import EngineDiedError, EngineError
from outrider.gateway.engines.backends.client import LOADING_REASON
from outrider.gateway.engines.backends.command_client import CommandClient
from outrider.gateway.engines.backends.fleet_keys import FleetKeys
from outrider.gateway.engines.backends.replica_link import ReplicaLink
from outrider.gateway.engines.backends.streams import SHUT_DOWN_MESSAGE
from outrider.gateway.engines.backends.wire import Command, Submit, Welcome

logger = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 30.0

_MOST_PING_INTERVAL_S: Final = 5.0  # a replica forgets gateways that say nothing for 30 s

# An engine that uses so much of a processor computes: a long step, on a busy machine, is no death.
_COMPUTING_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconnectPolicy:
    """Limits on waiting for an engine."""

    stall_timeout_s: float = 120.0
    """An engine that sent nothing for so long is given up in any case."""
    unready_after_s: float = 10.0
    """An engine that sent nothing for so long, and does not compute, takes no new requests until it
    sends again."""
    resume_within_s: float = 60.0
    """Requests in flight wait so long for the next engine. 0: they end with `Failed` at once, and
    new ones are refused."""
    max_waiting: int = 512
    """New requests wait as well while fewer than this do."""


class SupervisedClient(CommandClient):
    """A `CommandClient` whose engine may end, or go silent, and is followed by another."""

    def __init__(self, policy: ReconnectPolicy) -> None:
        super().__init__(policy.max_waiting)
        self._policy = policy
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._link: ReplicaLink | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._start_lock = asyncio.Lock()
        self._start_error: EngineError | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        self._is_quiet = False

    async def start(self) -> None:
        """Return when the engine serves. Raises the EngineError of a start that fails for good.

        A second call waits for the same start, and fails as it did.
        """
        async with self._start_lock:
            if self._start_error is not None:
                raise self._start_error
            if self._supervisor is None:
                await self._start()

    async def _start(self) -> None:
        if self._context is not None:
            raise EngineDiedError("This engine client is closed; make a new one.")
        self._context = zmq.Context()
        try:
            await self._reach_first()
        except BaseException as error:
            self._start_error = error if isinstance(error, EngineError) else None
            await self.close()
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    @abstractmethod
    async def _reach_first(self) -> None:
        """Return when an engine serves for the first time. Raises EngineError."""

    @abstractmethod
    async def _supervise(self) -> None:
        """Wait for the engine's end and reach the next, for as long as the client is open."""

    @abstractmethod
    def _note_lost(self) -> None:
        """Have what is in flight wait for the next engine: the link has ended."""

    async def close(self) -> None:
        """Leave the engine, which aborts our requests. May be called again."""
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
        """True if the engine serves requests, and has answered lately."""
        return self._streams.is_open and not self._is_quiet

    @property
    def not_ready_reason(self) -> str:
        """Message for clients while the engine is not ready."""
        return LOADING_REASON

    async def _meet(
        self, endpoint: str, keys: FleetKeys | None, timeout_s: float | None = None
    ) -> Welcome:
        """Make a connection, from socket to welcome. Raises EngineError."""
        assert self._context is not None
        self._leave()
        self._link = ReplicaLink(
            self._context, endpoint, keys, on_reply=self._handle, on_end=self._note_lost
        )
        return await self._link.welcomed(timeout_s)

    def _leave(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _send(self, command: Command) -> None:
        if self._link is None or not self._streams.is_open:
            return  # nothing is in flight there that a command could be about
        if (
            isinstance(command, Submit)
            and command.request.arrival_s is not None
            and not self._link.is_local
        ):  # the age: another machine has another clock
            age_s = time.monotonic() - command.request.arrival_s
            command = Submit(replace(command.request, arrival_s=-age_s))
        self._link.send(command)

    def _resume(self) -> None:
        """Go on with what waits: another engine serves."""
        self._is_quiet = False
        self._cancel_giving_up()
        num_new = self._streams.paused.num_now
        if num_resumed := self._streams.resume():
            logger.info("requests are resumed count=%d new=%d", num_resumed, num_new)
        self._ask_for_blocks()

    def _give_up_later(self) -> None:
        within_s = self._policy.resume_within_s
        if within_s > 0 and self._info is not None and self._giving_up is None:
            loop = asyncio.get_running_loop()
            self._giving_up = loop.call_later(within_s, self._streams.give_up)
            self._streams.hold()

    def _cancel_giving_up(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    async def _until_lost(self) -> str:
        """Return why the link has ended; end it when its engine has stopped answering."""
        assert self._link is not None
        link = self._link
        quiet_intervals, policy = 0, self._policy
        # Several intervals, not one deadline: a pause of the gateway itself counts as one.
        least_s = min(policy.stall_timeout_s, policy.unready_after_s)
        interval_s = min(least_s / 4, _MOST_PING_INTERVAL_S)
        used_s = self._processor_s()
        while not await link.wait_exit(interval_s):
            quiet_intervals = 0 if link.was_heard() else quiet_intervals + 1
            quiet_s = quiet_intervals * interval_s
            before_s, used_s = used_s, self._processor_s()
            computes = (
                used_s is not None
                and before_s is not None
                and used_s - before_s >= _COMPUTING_SHARE * interval_s
            )
            self._note_quiet(is_quiet=quiet_s >= policy.unready_after_s and not computes)
            if quiet_s >= policy.stall_timeout_s:
                self._give_up_on(link, f"it did not answer for {policy.stall_timeout_s:g} s")
                await link.wait_exit(None)
                break
            link.ping()
        return link.describe_exit()

    def _processor_s(self) -> float | None:
        """Return the processor time that the engine has used; None where it cannot be read."""
        return None

    def _give_up_on(self, link: ReplicaLink, reason: str) -> None:
        """End the link to an engine that has stopped answering."""
        link.kill(reason)

    def _note_quiet(self, *, is_quiet: bool) -> None:
        """Take new requests or not, from now on."""
        if is_quiet and not self._is_quiet:
            logger.warning("engine does not answer quiet_s=%.1f", self._policy.unready_after_s)
        elif self._is_quiet and not is_quiet:
            logger.info("engine answers again")
        self._is_quiet = is_quiet
