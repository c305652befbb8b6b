"""Answers other engines that ask for blocks: at once, or when a step has computed them."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from outrider.engine.cache.extents import Extent, pack_extent
from outrider.engine.cache.peers import BlocksWanted
from outrider.engine.errors import EngineError
from outrider.gateway.engines.backends.wire import (
    PullBlocks,
    PulledBlocks,
    Reply,
    WireError,
    pack_error,
)

logger = logging.getLogger(__name__)

# Answers between two steps; others wait for the next ones.
_BESIDE_STEPS: Final = 8
# An engine that computes nothing for so long is not about to have what it is asked for.
_IDLE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A call that was not answered yet."""

    command: PullBlocks
    until_s: float


class BlockServer:
    """Sends blocks to those that ask. Belongs to the loop's thread.

    `export`: `StepEngine.export_blocks`.
    """

    def __init__(
        self,
        export: Callable[[BlocksWanted], list[Extent] | None],
        send: Callable[[Reply], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._export = export
        self._send = send
        self._clock = clock
        self._waiting: list[_Waiting] = []
        self._busy_s = clock()

    def add(self, command: PullBlocks) -> None:
        """Take a call in. Their number is bounded by the socket that they come from."""
        self._busy_s = self._clock()  # what it asks for may be on its way
        self._waiting.append(_Waiting(command, self._busy_s + command.wanted.wait_s))

    def step(self, *, is_idle: bool) -> None:
        """Answer what can be answered now; `is_idle`: no step waits for it."""
        if not is_idle:
            self._busy_s = self._clock()
        most = len(self._waiting) if is_idle else _BESIDE_STEPS
        left: list[_Waiting] = []
        for waiting in self._waiting:
            if most and self._answers(waiting):
                most -= 1
            else:
                left.append(waiting)
        self._waiting = left

    def _answers(self, waiting: _Waiting) -> bool:
        """Answer a call if there is something to say; False where it waits on."""
        command = waiting.command
        error: WireError | None = None
        try:
            extents = self._export(command.wanted)
        except EngineError as refused:
            extents, error = [], pack_error(refused)
        except Exception as failure:  # of these blocks; the answers that run have no part in it
            logger.exception("blocks could not be read")
            extents, error = [], pack_error(failure)
        if extents is None:
            if self._clock() < min(waiting.until_s, self._busy_s + _IDLE_S):
                return False
            extents = []
        packed = [pack_extent(extent) for extent in extents]
        self._send(PulledBlocks(command.call_id, packed, error))
        return True
