"""Has requests wait: before the queue for adapters, grammar and peers' blocks, then for a disk."""

from collections.abc import Callable, Iterator
from typing import Final

from outrider.engine.cache.stored_news import StoredNews
from outrider.engine.errors import EngineError, InvalidGrammarError
from outrider.engine.events import StoreStats
from outrider.engine.queue.adapter_queue import AdapterQueue
from outrider.engine.queue.block_exchange import BlockExchange
from outrider.engine.queue.grammar_queue import GrammarQueue
from outrider.engine.queue.restore_queue import RestoreQueue
from outrider.engine.request import EngineRequest
from outrider.engine.sequences.pinned_prompts import PinStore
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.params import Tier

# How long an idle engine sleeps for what is prepared; commands wait behind it.
_PAUSE_S: Final = 0.003


class Preparation:
    """The waiting rooms in front of the scheduler's queue, which a request passes in this order.

    It comes to the last one when it would start, and goes back to the queue from there.
    `exchange`: of blocks with other engines. `restores`: None where no blocks are stored.
    `is_alone`: whether no request is computed.
    """

    def __init__(
        self,
        grammars: GrammarQueue,
        adapters: AdapterQueue,
        exchange: BlockExchange,
        restores: RestoreQueue | None = None,
        *,
        is_alone: Callable[[], bool] = lambda: False,
    ) -> None:
        self.grammars = grammars
        self.adapters = adapters
        self.exchange = exchange
        self.restores = restores
        self._is_alone = is_alone

    def __len__(self) -> int:
        """Count how many sequences wait."""
        return sum(len(room) for room in self._rooms)

    def __contains__(self, request_id: str) -> bool:
        """True if a request waits."""
        return any(request_id in room for room in self._rooms)

    @property
    def _rooms(self) -> tuple[GrammarQueue | AdapterQueue | BlockExchange | RestoreQueue, ...]:
        rooms = (self.adapters, self.grammars, self.exchange)
        return rooms if self.restores is None else (*rooms, self.restores)

    @property
    def pin_store(self) -> PinStore | None:
        """What keeps named prompts beyond a restart; None where no blocks are stored."""
        return None if self.restores is None else self.restores.offload

    @property
    def stored_news(self) -> StoredNews | None:
        """News of what lies on the disk; None where no blocks are stored."""
        return None if self.restores is None else self.restores.offload.news

    @property
    def is_busy(self) -> bool:
        """True if `take_ready` has anything to look at."""
        return bool(len(self)) or self.adapters.is_called

    @property
    def has_other_work(self) -> bool:
        """True if there is something to do though no sequence waits."""
        is_storing = self.restores is not None and self.restores.offload.is_busy
        return self.adapters.is_called or is_storing

    def store_blocks(self, *, is_idle: bool) -> None:
        """Have some of the blocks written that left the caches; `is_idle`: nothing else is done."""
        if self.restores is not None:
            self.restores.offload.step(self.restores.row_s, is_idle=is_idle)

    def store_stats(self) -> StoreStats:
        """Return what became of blocks that left the caches."""
        return StoreStats() if self.restores is None else self.restores.offload.stats()

    def sequences(self) -> Iterator[Sequence]:
        """The sequences that wait."""
        for room in self._rooms:
            yield from room.sequences()

    def count(self, tier: Tier) -> int:
        """Count how many sequences of a tier wait."""
        return sum(sequence.tier == tier for sequence in self.sequences())

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidRequestError where the request's grammar or adapter is not possible."""
        if request.grammar is not None:
            self.grammars.check(request)
        self.adapters.check(request)

    def add(self, sequence: Sequence) -> bool:
        """Have a sequence with its adapters prepared; False where it waits.

        Raises QueueFullError.
        """
        if sequence.request.grammar is None:
            return self.exchange.add(sequence)
        self.grammars.add(sequence)
        return False

    def restore(self, sequence: Sequence) -> bool:
        """Have what a disk has of a sequence's texts read; False where it waits for that."""
        return self.restores is None or self.restores.add(sequence)

    def discard(self, request_id: str) -> bool:
        """Forget a request that ended; False if it did not wait."""
        return any(room.discard(request_id) for room in self._rooms)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended, or never began: give back its adapters."""
        self.discard(sequence.request_id)
        self.adapters.forget(sequence)

    def take_ready(self) -> Iterator[tuple[Sequence, EngineError | InvalidGrammarError | None]]:
        """Sequences that are prepared, or with the reason why they cannot be."""
        for sequence, error in self.adapters.take_ready():
            try:
                if error is not None or self.add(sequence):
                    yield sequence, error
            except EngineError as refused:
                yield sequence, refused
        for sequence, failure in self.grammars.take_ready():
            if failure is not None or self.exchange.add(sequence):
                yield sequence, failure
        for sequence in self.exchange.take_ready(is_alone=self._is_alone()):
            yield sequence, None
        if self.restores is not None:
            yield from self.restores.take_ready(is_alone=self._is_alone())

    def pause(self, timeout_s: float = _PAUSE_S) -> None:
        """Wait a little for whatever comes first: to be called by an idle engine."""
        if len(self.grammars):
            self.grammars.pause(timeout_s)
        elif len(self.exchange):
            self.exchange.pause(timeout_s)
        elif self.restores is not None and len(self.restores):
            self.restores.pause(timeout_s)
        else:
            self.adapters.pause(timeout_s)
