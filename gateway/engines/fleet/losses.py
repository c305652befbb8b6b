"""Requests that lost their replica: which of them met a death, and which a cut connection only.

A request that ends engines must not end many of them, so a loss counts as a death at once. It is
taken back where the replica is found again and turns out to be the process that it was.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.crash_suspects import CrashSuspects
from outrider.gateway.engines.fleet.replica import EngineReplica

_FOUND_WITHIN_S: Final = 60.0


class Lost(Protocol):
    """A request that has lost its replica."""

    request: EngineRequest

    def note_death(self, *, is_suspect: bool) -> None:
        """Take in that the replica has died; `is_suspect`: others had, with such a request."""

    def note_departure(self) -> None:
        """Take in that the replica has ended, as it had said."""

    def uncount_death(self) -> None:
        """Take back a death that was none."""


@dataclass(frozen=True, slots=True)
class _Loss:
    replica: EngineReplica
    generation: str
    lost: Sequence[Lost]
    at_s: float


class Losses:
    """Counts deaths by the requests that met them (`CrashSuspects`)."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects = CrashSuspects(clock=clock)
        self._unconfirmed: list[_Loss] = []

    def check(self, request: EngineRequest) -> None:
        """Raise CrashSuspectError for a request that met too many deaths."""
        self.take_back_survivors()
        self._suspects.check(request)

    def note_served(self, request: EngineRequest) -> None:
        """Note that a request was served to its end."""
        self._suspects.note_served(request)

    def note(self, replica: EngineReplica, generation: str | None, lost: Sequence[Lost]) -> None:
        """Count a replica's end for the requests that it had; `generation`: the process then."""
        self.take_back_survivors()
        if replica.has_said_goodbye(generation):
            for each in lost:
                each.note_departure()
            return
        flags = self._suspects.note_death(each.request for each in lost)
        for each, is_suspect in zip(lost, flags, strict=True):
            each.note_death(is_suspect=is_suspect)
        if generation is not None:
            self._unconfirmed.append(_Loss(replica, generation, lost, self._clock()))

    def take_back_survivors(self) -> None:
        """Take back the losses of replicas that are found again, alive."""
        if not self._unconfirmed:
            return
        oldest_s = self._clock() - _FOUND_WITHIN_S
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        for loss in unconfirmed:
            if not loss.replica.client.is_ready:
                if loss.at_s > oldest_s:
                    self._unconfirmed.append(loss)
            elif loss.replica.generation == loss.generation:
                self._suspects.uncount_death(each.request for each in loss.lost)
                for each in loss.lost:
                    each.uncount_death()
