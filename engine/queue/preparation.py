"""Has requests wait, before they are queued, first for their adapters, then for their grammar."""

from collections.abc import Iterator

from outrider.engine.errors import EngineError, InvalidGrammarError
from outrider.engine.queue.adapter_queue import AdapterQueue
from outrider.engine.queue.grammar_queue import GrammarQueue
from outrider.engine.request import EngineRequest
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.params import Tier


class Preparation:
    """Both waiting rooms in front of the scheduler's queue."""

    def __init__(self, grammars: GrammarQueue, adapters: AdapterQueue) -> None:
        self.grammars = grammars
        self.adapters = adapters

    def __len__(self) -> int:
        """Count how many sequences wait."""
        return len(self.grammars) + len(self.adapters)

    def __contains__(self, request_id: str) -> bool:
        """True if a request waits."""
        return request_id in self.grammars or request_id in self.adapters

    @property
    def is_busy(self) -> bool:
        """True if `take_ready` has anything to look at."""
        return bool(len(self)) or self.adapters.is_called

    def sequences(self) -> Iterator[Sequence]:
        """The sequences that wait."""
        yield from self.grammars.sequences()
        yield from self.adapters.sequences()

    def count(self, tier: Tier) -> int:
        """Count how many sequences of a tier wait."""
        return sum(sequence.tier == tier for sequence in self.sequences())

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidRequestError where the request's grammar or adapter is not possible."""
        if request.grammar is not None:
            self.grammars.check(request)
        self.adapters.check(request)

    def add_grammar(self, sequence: Sequence) -> bool:
        """Have a sequence's grammar compiled; False where it waits. Raises QueueFullError."""
        if sequence.request.grammar is None:
            return True
        self.grammars.add(sequence)
        return False

    def discard(self, request_id: str) -> bool:
        """Forget a request that ended; False if it did not wait."""
        return self.grammars.discard(request_id) or self.adapters.discard(request_id)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended, or never began: give back its adapters."""
        self.discard(sequence.request_id)
        self.adapters.forget(sequence)

    def take_ready(self) -> Iterator[tuple[Sequence, EngineError | InvalidGrammarError | None]]:
        """Sequences that are prepared, or with the reason why they cannot be."""
        for sequence, error in self.adapters.take_ready():
            try:
                if error is not None or self.add_grammar(sequence):
                    yield sequence, error
            except EngineError as refused:
                yield sequence, refused
        yield from self.grammars.take_ready()

    def pause(self, timeout_s: float) -> None:
        """Wait a little for whatever comes first: to be called by an idle engine."""
        if len(self.grammars):
            self.grammars.pause(timeout_s)
        else:
            self.adapters.pause(timeout_s)
