"""llguidance as the engine's grammar compiler; imported only when used."""

import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

import llguidance
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.errors import InvalidGrammarError, QueueFullError
from outrider.engine.grammar.cache import GrammarCache
from outrider.engine.grammar.fair_threads import FairThreads, TooManyJobsError
from outrider.engine.grammar.grammar import TokenGrammar
from outrider.engine.grammar.process import (
    DEFAULT_BOUNDS,
    CompileBounds,
    GrammarProcess,
    UnfinishedGrammarError,
)
from outrider.engine.grammar.vocabulary import LIMITS, is_stuck, reason, tokenizer_of
from outrider.engine.request import GrammarSpec

_MAX_CACHED: Final = 128
_MAX_CACHED_BYTES: Final = 256 * 2**20
# One tenant has at most one of them, so another's grammars never wait behind its slow ones.
_NUM_PROCESSES: Final = 2
_MAX_WAITING_EACH: Final = 128
_RETRY_AFTER_S: Final = 1.0


class LLGuidanceCompiler:
    """Compiles for one vocabulary, beside the step loop.

    A grammar is compiled twice: first in a process of its own, within bounds and where it can be
    stopped, then in a thread here, with the interpreter lock released. Tenants take turns. What was
    compiled is kept for each salt apart, and grows with the answers that follow it (states of the
    lexer); a request that asks for what is being compiled for the same salt gets the same future.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        *,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        bounds: CompileBounds = DEFAULT_BOUNDS,
    ) -> None:
        """`token_bytes`: each token's text, b"" for special ones; `vocab_size`: the model's.

        No grammar allows a token without text, except the stop tokens at the end of an answer.
        Raises ValueError without stop tokens: an answer could not end.
        """
        stops = [token_id for token_id in stop_token_ids if token_id < vocab_size]
        if not stops:
            raise ValueError("a grammar needs a stop token to end an answer")
        padded = [b""] * vocab_size
        padded[: min(vocab_size, len(token_bytes))] = token_bytes[:vocab_size]
        for token_id in stops:
            padded[token_id] = b""
        self.vocab_size = vocab_size
        self.stop_token_ids = tuple(stops)
        self._tokenizer = tokenizer_of(padded, stops)
        self._cache = GrammarCache(max_entries=_MAX_CACHED, max_bytes=_MAX_CACHED_BYTES)
        processes = [GrammarProcess(padded, stops, bounds) for _ in range(_NUM_PROCESSES)]
        self._threads: FairThreads[GrammarProcess, TokenGrammar] = FairThreads(
            processes, max_waiting_each=_MAX_WAITING_EACH, name="grammar"
        )
        self.close = weakref.finalize(self, _close, self._threads, processes)

    def compile(
        self, spec: GrammarSpec, *, salt: str = "", tenant: str = ""
    ) -> "Future[TokenGrammar]":
        """Start compiling or find it in the cache. To be called from one thread.

        The future raises InvalidGrammarError with the reason. Raises QueueFullError where the
        tenant has too many grammars waiting.
        """
        future = self._cache.get(spec, salt)
        if future is None or _is_to_be_repeated(future):
            try:
                future = self._threads.submit(tenant, lambda process: self._compile(spec, process))
            except TooManyJobsError as error:
                raise QueueFullError(
                    num_waiting=error.num_waiting, retry_after_s=_RETRY_AFTER_S
                ) from error
            self._cache.put(spec, salt, future)
        return future

    def _compile(self, spec: GrammarSpec, process: GrammarProcess) -> TokenGrammar:
        tried = process.prepare(spec)
        start = llguidance.LLMatcher(self._tokenizer, tried.source, log_level=0, limits=LIMITS)
        if start.is_error():  # it could be compiled a moment ago
            raise InvalidGrammarError(reason(start.get_error()))
        return LLGuidanceGrammar(
            start,
            vocab_size=self.vocab_size,
            stop_token_ids=self.stop_token_ids,
            size_bytes=tried.size_bytes,
            left_out=tried.left_out,
        )


def _close(
    threads: "FairThreads[GrammarProcess, TokenGrammar]", processes: Sequence[GrammarProcess]
) -> None:
    threads.close()
    for process in processes:
        process.close()


def _is_to_be_repeated(future: "Future[TokenGrammar]") -> bool:
    """True if a future ended for reasons that are not its grammar's."""
    if not future.done() or future.cancelled():
        return future.done()
    failure = future.exception()
    is_own = isinstance(failure, InvalidGrammarError) and not isinstance(
        failure, UnfinishedGrammarError
    )
    return failure is not None and not is_own


class LLGuidanceGrammar:
    """A compiled grammar; see `TokenGrammar`."""

    def __init__(
        self,
        start: llguidance.LLMatcher,
        *,
        vocab_size: int,
        stop_token_ids: tuple[int, ...],
        size_bytes: int,
        left_out: tuple[str, ...] = (),
    ) -> None:
        """`start`: a matcher at the beginning of an answer, which never moves."""
        self.vocab_size = vocab_size
        self.stop_token_ids = stop_token_ids
        self.size_bytes = size_bytes
        self.left_out = left_out
        self._start = start

    def matcher(self) -> "LLGuidanceMatcher":
        """A matcher at the beginning of an answer; it can roll back any number of tokens."""
        return LLGuidanceMatcher(
            self._start, frozenset(self.stop_token_ids), num_words=-(-self.vocab_size // 32)
        )

    def mask_logits(self, logits: Tensor, masks: NDArray[np.int32]) -> None:
        """Set logits of tokens whose bit is 0 to -inf; see `TokenGrammar`."""
        width = min(logits.shape[1], self.vocab_size)
        if logits.device.type == "cpu":
            bits = np.unpackbits(masks.view(np.uint8), axis=1, count=width, bitorder="little")
            logits[:, :width].masked_fill_(torch.from_numpy(bits == 0), -torch.inf)
            return
        words = torch.from_numpy(masks).to(logits.device)  # [num_rows, num_words]
        shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = (words[:, :, None] >> shifts & 1).view(len(masks), -1)[:, :width]
        logits[:, :width].masked_fill_(allowed == 0, -torch.inf)


class LLGuidanceMatcher:
    """A place in a grammar; see `TokenMatcher`."""

    def __init__(
        self, start: llguidance.LLMatcher, stops: frozenset[int], *, num_words: int
    ) -> None:
        self._start = start
        self._stops = stops
        self._num_words = num_words
        self._matcher = start.deep_copy()
        self._token_ids: list[int] = []  # accepted; a stop token is the last and not the matcher's
        self._mask_place = 0  # behind how many of them the last mask was computed

    def accept(self, token_id: int) -> bool:
        """Go one token on, if the grammar allows it."""
        if token_id in self._stops:
            accepted = self._matcher.is_accepting()
        else:
            accepted = self._matcher.try_consume_tokens([token_id]) == 1
        self._check()
        if accepted:
            self._token_ids.append(token_id)
        return accepted

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        if num_tokens and self._token_ids[-1] in self._stops:
            self._token_ids.pop()
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._check()
            del self._token_ids[-num_tokens:]
            if self._mask_place > len(self._token_ids):
                # llguidance 1.9.1 keeps the last mask and takes it for that of another text as long
                # as the one that was taken back. The mask of what both begin with replaces it.
                self.fill_mask(np.empty(self._num_words, dtype=np.int32))

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may follow; none where the vocabulary has no such."""
        self._mask_place = len(self._token_ids)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error() and is_stuck(self._matcher.get_error()):
            mask[:] = 0
            self._matcher = self._start.deep_copy()  # one that failed takes nothing back
            self._matcher.consume_tokens(self._token_ids)
        self._check()

    def _check(self) -> None:
        """Raise InvalidGrammarError where a bound was met: a matcher that failed stays failed."""
        if self._matcher.is_error():
            raise InvalidGrammarError(reason(self._matcher.get_error()))
