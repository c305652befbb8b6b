"""The clients of engines that can end: they notice it, and answers wait for the next engine."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from outrider.gateway.engines.backends.client import LOADING_REASON
from outrider.gateway.engines.backends.command_client import CommandClient

log = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 30.0

# An engine that uses so much of a processor computes: a long step, on a busy machine, is no death.
_COMPUTING_SHARE = 0.02


class EngineLink(Protocol):
    """A line to an engine that serves: a process's, or a connection."""

    def ping(self) -> None:
        """Ask for a sign of life."""

    def was_heard(self) -> bool:
        """Return whether a message arrived since the last call."""

    def processor_s(self) -> float | None:
        """Return the processor time that the engine has used; None where it cannot be read."""

    async def wait_exit(self, timeout_s: float | None) -> bool:
        """Wait for its end, at most `timeout_s`. Whether it has ended."""

    def kill(self, reason: str) -> None:
        """End it at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long an engine is waited for.

    One that was not heard for `unready_after_s`, and does not compute, takes no new requests until
    it is heard again; after `stall_timeout_s` it is given up in any case. Requests in flight wait
    `resume_within_s` for the next engine, and so do new ones while fewer than `max_waiting` do;
    with 0 they end with `Failed` at once, and new ones are refused.
    """

    stall_timeout_s: float = 120.0
    unready_after_s: float = 10.0
    resume_within_s: float = 60.0
    max_waiting: int = 512


class WatchedClient(CommandClient):
    """A `CommandClient` whose engine may end, or go silent, and is followed by another."""

    def __init__(self, patience: Patience) -> None:
        super().__init__(patience.max_waiting)
        self._patience = patience
        self._giving_up: asyncio.TimerHandle | None = None
        self._is_quiet = False

    @property
    def is_ready(self) -> bool:
        """True if the engine serves requests, and has answered lately."""
        return self._streams.is_open and not self._is_quiet

    @property
    def not_ready_reason(self) -> str:
        """Message for clients while the engine is not ready."""
        return LOADING_REASON

    def _resume(self) -> None:
        """Go on with what waits: another engine serves."""
        self._is_quiet = False
        self._cancel_giving_up()
        num_new = self._streams.paused.num_now
        if num_resumed := self._streams.resume():
            log.info("requests are resumed count=%d new=%d", num_resumed, num_new)
        self._watch_again()

    def _note_death(self) -> None:
        """The engine has died; have its answers wait for the next."""
        self._streams.died(resumes=self._patience.resume_within_s > 0)
        self._give_up_later()

    def _give_up_later(self) -> None:
        within_s = self._patience.resume_within_s
        if within_s > 0 and self._info is not None and self._giving_up is None:
            loop = asyncio.get_running_loop()
            self._giving_up = loop.call_later(within_s, self._streams.give_up)
            self._streams.hold()

    def _cancel_giving_up(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    async def _watch(self, link: EngineLink, most_interval_s: float = float("inf")) -> None:
        """Return when the link has ended; end it when its engine has stopped answering.

        most_interval_s: between two pings.
        """
        quiet_intervals, patience = 0, self._patience
        # Several intervals, not one deadline: a pause of the gateway itself counts as one.
        least_s = min(patience.stall_timeout_s, patience.unready_after_s)
        interval_s = min(least_s / 4, most_interval_s)
        used_s = link.processor_s()
        while not await link.wait_exit(interval_s):
            quiet_intervals = 0 if link.was_heard() else quiet_intervals + 1
            quiet_s = quiet_intervals * interval_s
            before_s, used_s = used_s, link.processor_s()
            computes = (
                used_s is not None
                and before_s is not None
                and used_s - before_s >= _COMPUTING_SHARE * interval_s
            )
            self._note_quiet(is_quiet=quiet_s >= patience.unready_after_s and not computes)
            if quiet_s >= patience.stall_timeout_s:
                link.kill(f"it did not answer for {patience.stall_timeout_s:g} s")
                await link.wait_exit(None)
                return
            link.ping()

    def _note_quiet(self, *, is_quiet: bool) -> None:
        """Take new requests or not, from now on."""
        if is_quiet and not self._is_quiet:
            log.warning("engine does not answer quiet_s=%.1f", self._patience.unready_after_s)
        elif self._is_quiet and not is_quiet:
            log.info("engine answers again")
        self._is_quiet = is_quiet
