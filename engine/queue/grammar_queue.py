"""Requests whose grammar is being compiled: they wait here, the step loop goes on."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Final

from outrider.engine.errors import InvalidGrammarError, InvalidRequestError
from outrider.engine.grammar.grammar import GrammarCompiler, GrammarState, TokenGrammar
from outrider.engine.request import EngineRequest
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.params import Tier

COMPILE_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A sequence that is not in the scheduler's queue yet."""

    sequence: Sequence
    future: "Future[TokenGrammar]"
    started_s: float


class GrammarQueue:
    """Compiles each request's grammar and gives its sequence a `GrammarState`.

    A tier without a compiler has no structured output.
    """

    def __init__(
        self,
        compilers: Mapping[Tier, GrammarCompiler],
        *,
        timeout_s: float = COMPILE_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compilers = dict(compilers)
        self._timeout_s = timeout_s
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        """Count how many sequences wait."""
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        """True if a request waits for its grammar."""
        return request_id in self._waiting

    def sequences(self) -> Iterator[Sequence]:
        """The sequences that wait."""
        return (item.sequence for item in self._waiting.values())

    def count(self, tier: Tier) -> int:
        """Count how many sequences of a tier wait."""
        return sum(item.sequence.tier == tier for item in self._waiting.values())

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidRequestError where a grammar is not possible."""
        if request.tier not in self._compilers:
            raise InvalidRequestError(
                f"structured output is not available: the {request.tier} tier's engine has no "
                "grammar compiler for its tokenizer"
            )
        if request.sampling.min_tokens:  # a grammar may allow nothing but the end
            raise InvalidRequestError("min_tokens is not supported together with a grammar")

    def add(self, sequence: Sequence) -> None:
        """Start compiling the sequence's grammar. Raises QueueFullError."""
        request = sequence.request
        assert request.grammar is not None
        self._waiting[sequence.request_id] = _Waiting(
            sequence=sequence,
            future=self._compilers[sequence.tier].compile(
                request.grammar, salt=request.cache_salt, tenant=request.tenant
            ),
            started_s=self._clock(),
        )

    def discard(self, request_id: str) -> bool:
        """Forget a request that ended; False if it did not wait.

        Its grammar is not compiled any more unless that has begun or others wait for it.
        """
        item = self._waiting.pop(request_id, None)
        if item is None:
            return False
        if all(other.future is not item.future for other in self._waiting.values()):
            item.future.cancel()
        return True

    def take_ready(self) -> Iterator[tuple[Sequence, InvalidGrammarError | None]]:
        """Sequences whose grammar is there, or with the reason why there will be none."""
        now_s = self._clock()
        for request_id, item in list(self._waiting.items()):
            error: InvalidGrammarError | None = None
            if item.future.done():
                error = _attach(item.sequence, item.future)
            elif now_s - item.started_s > self._timeout_s:
                error = InvalidGrammarError(
                    f"compiling the grammar took more than {self._timeout_s:g} s; simplify it"
                )
            else:
                continue
            self.discard(request_id)
            yield item.sequence, error

    def pause(self, timeout_s: float) -> None:
        """Wait until a grammar is there, but not for long: to be called by an idle engine."""
        futures = [item.future for item in self._waiting.values()]
        wait(futures, timeout=timeout_s, return_when=FIRST_COMPLETED)


def _attach(sequence: Sequence, future: "Future[TokenGrammar]") -> InvalidGrammarError | None:
    """Make the grammar the first rule; a budget of thinking forces only what it allows.

    Penalties come first anyway. Returns why there is none. A failure that is kept for other
    requests is never raised here: each time it would keep a frame, and with it a sequence, for as
    long as itself.
    """
    try:
        failure = future.exception()
        if failure is None:
            grammar = future.result()
            sequence.grammar = GrammarState(grammar, num_prompt_tokens=sequence.num_given_tokens)
            if sequence.judge is None:
                sequence.rules.insert(0, sequence.grammar)
            else:
                sequence.judge.follow(sequence.grammar)
            return None
    except Exception as other:  # noqa: BLE001 - a compiler's own, for this request only
        failure = other
    if isinstance(failure, InvalidGrammarError):
        return failure
    return InvalidGrammarError(f"it cannot be compiled ({type(failure).__name__})")
