"""A prompt that a prefill replica computes for a request which another replica answers."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Final, Protocol, cast

from outrider.engine.errors import EngineError
from outrider.engine.events import EngineEvent, Failed, Finished, PrefillDone, RequestStats
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.seen_work import joined, retracted
from outrider.gateway.engines.fleet.replica import EngineReplica
from outrider.gateway.engines.fleet.replica_attempt import is_loss

logger = logging.getLogger(__name__)

_LAST_WORD_S: Final = 0.2


class PrefillNotes(Protocol):
    """Hears what became of a prompt: a pool."""

    def note_prefill(self, request_id: str, num_cached_tokens: int) -> None:
        """Hear that a replica has computed a prompt."""

    def note_departure(self, request_id: str) -> None:
        """Hear that a request is no longer at its replica."""


class RemotePrompt:
    """Begins in the constructor. `leave` must be called; it may be called again.

    `was_lost`: the replica ended with it. What it computed is in nobody's text but through the
    blocks that the answering replica asks it for, so nothing needs to be done where it fails.
    """

    def __init__(
        self, request: EngineRequest, replica: EngineReplica, notes: PrefillNotes, num_tokens: int
    ) -> None:
        """`num_tokens`: of the prompt, that the replica has to compute."""
        self.was_lost = False
        self._request = request
        self._replica = replica
        self._notes = notes
        self._stats: RequestStats | None = None
        replica.begin(request.request_id, num_tokens)
        self._task = asyncio.create_task(self._run(), name="remote-prompt")

    async def _run(self) -> None:
        request_id, replica = self._request.request_id, self._replica
        try:
            stream = replica.client.submit(self._request)
            async with aclosing(cast("AsyncGenerator[EngineEvent, None]", stream)) as events:
                async for event in events:
                    self._take(event)
        except EngineError as error:
            logger.info("a prompt is computed by its own replica reason=%s", error)
        finally:
            replica.end(request_id)
            self._notes.note_departure(request_id)

    def _take(self, event: EngineEvent) -> None:
        match event:
            case PrefillDone():
                self._replica.note_computed(event.request_id)
                self._notes.note_prefill(event.request_id, event.num_cached_tokens)
            case Finished() | Failed():
                self._stats = event.stats
                self.was_lost = is_loss(event)

    async def until_told(self) -> None:
        """Wait a moment for the replica's last word, where its blocks have come already."""
        await asyncio.wait((self._task,), timeout=_LAST_WORD_S)

    def leave(self) -> None:
        """End what is still computed: nobody waits for it."""
        self._task.cancel()

    # ---- whose work it was ------------------------------------------------------------------

    def prefill_of(self, event: PrefillDone) -> PrefillDone:
        """Return what the answering replica says of the prompt, as one replica would say it.

        What was computed for this request alone is not cached.
        """
        if self._stats is None:
            return event
        num_cached = min(event.num_cached_tokens, self._stats.num_cached_tokens)
        return replace(event, num_cached_tokens=num_cached)

    def stats_of(self, stats: RequestStats) -> RequestStats:
        """Return the answer's stats with the work of both replicas."""
        if self._stats is None:
            return stats
        num_cached = min(stats.num_cached_tokens, self._stats.num_cached_tokens)
        return replace(joined(retracted(self._stats), stats), num_cached_tokens=num_cached)
