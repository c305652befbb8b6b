"""xgrammar as the engine's grammar compiler; imported only when used."""

import codecs
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.errors import QueueFullError
from outrider.engine.grammar.cache import GrammarCache
from outrider.engine.grammar.fair_threads import FairThreads, TooManyJobsError
from outrider.engine.grammar.grammar import InvalidGrammarError, TokenGrammar
from outrider.engine.grammar.import_xgrammar import import_xgrammar
from outrider.engine.grammar.process import (
    DEFAULT_BOUNDS,
    CompileBounds,
    GrammarProcess,
    UnfinishedGrammarError,
)
from outrider.engine.grammar.source import compile_source, reason
from outrider.engine.request import GrammarSpec

if TYPE_CHECKING:
    import xgrammar

_MAX_CACHED: Final = 128
_MAX_CACHED_BYTES: Final = 256 * 2**20
# One tenant has at most one of them, so another's grammars never wait behind its slow ones.
_NUM_PROCESSES: Final = 2
_MAX_WAITING_EACH: Final = 128
_RETRY_AFTER_S: Final = 1.0
_NO_TEXT: Final = b"\xff"
_CONTINUATION_BYTES: Final = bytes(range(0x80, 0xC0))


class XGrammarCompiler:
    """Compiles for one vocabulary, beside the step loop.

    A grammar is compiled twice: first in a process of its own, within bounds and where it can be
    stopped, then in a thread here, with the interpreter lock released. Tenants take turns. What was
    compiled is kept for each salt apart; a request that asks for what is being compiled for the
    same salt gets the same future.
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
        xgrammar = import_xgrammar()
        stops = [token_id for token_id in stop_token_ids if token_id < vocab_size]
        if not stops:
            raise ValueError("a grammar needs a stop token to end an answer")
        padded = [b""] * vocab_size
        padded[: min(vocab_size, len(token_bytes))] = token_bytes[:vocab_size]
        for token_id in stops:
            padded[token_id] = b""
        # In no text, but not empty: structural tags name special tokens by their ids.
        padded = [
            text if i in stops or (text and _may_be_utf8(text)) else _NO_TEXT
            for i, text in enumerate(padded)
        ]
        self._utf8 = _Utf8(padded)
        info = xgrammar.TokenizerInfo(
            padded, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=stops
        )
        self.vocab_size = vocab_size
        self.stop_token_ids = tuple(stops)
        # Its own cache would keep everything; ours below knows what was used last.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
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
        source = process.prepare(spec)
        try:
            compiled = compile_source(self._compiler, source)
        except RuntimeError as error:  # it could be compiled a moment ago
            raise InvalidGrammarError(reason(error)) from error
        grammar = XGrammar(
            compiled,
            vocab_size=self.vocab_size,
            stop_token_ids=self.stop_token_ids,
            utf8=self._utf8,
        )
        mask = np.full(-(-self.vocab_size // 32), -1, dtype=np.int32)
        grammar.matcher().fill_mask(mask)
        if not _has_bits(mask, self.vocab_size).any():
            raise InvalidGrammarError("no text conforms to it")
        return grammar


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


class XGrammar:
    """A compiled grammar; see `TokenGrammar`."""

    def __init__(
        self,
        compiled: "xgrammar.CompiledGrammar",
        *,
        vocab_size: int,
        stop_token_ids: tuple[int, ...],
        utf8: "_Utf8",
    ) -> None:
        self._utf8 = utf8
        self.vocab_size = vocab_size
        self.stop_token_ids = stop_token_ids
        self.size_bytes: int = compiled.memory_size_bytes
        self._compiled = compiled

    def matcher(self) -> "XGrammarMatcher":
        """A matcher at the beginning of an answer; it can roll back any number of tokens."""
        import xgrammar

        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._utf8)

    def mask_logits(self, logits: Tensor, masks: NDArray[np.int32]) -> None:
        """Set logits of tokens whose bit is 0 to -inf; see `TokenGrammar`."""
        width = min(logits.shape[1], self.vocab_size)
        if logits.device.type == "cpu" and logits.is_contiguous():
            import xgrammar

            xgrammar.apply_token_bitmask_inplace(
                logits, torch.from_numpy(masks), vocab_size=width, backend="cpu"
            )
            return
        words = torch.from_numpy(masks).to(logits.device)  # [num_rows, num_words]
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = (words[:, :, None] >> bits & 1).view(len(masks), -1)[:, :width]
        logits[:, :width].masked_fill_(allowed == 0, -torch.inf)


class XGrammarMatcher:
    """A place in a grammar; see `TokenMatcher`."""

    def __init__(self, matcher: "xgrammar.GrammarMatcher", utf8: "_Utf8") -> None:
        self._matcher = matcher
        self._utf8 = utf8
        self._token_ids: list[int] = []

    def accept(self, token_id: int) -> bool:
        """Go one token on, if the grammar allows it."""
        accepted: bool = self._matcher.accept_token(token_id)
        if accepted:
            self._token_ids.append(token_id)
        return accepted

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        self._matcher.rollback(num_tokens)
        del self._token_ids[len(self._token_ids) - num_tokens :]

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may follow; bits beyond the vocabulary are undefined."""
        self._matcher.fill_next_token_bitmask(mask)
        if self._token_ids:
            self._utf8.restrict(mask, self._token_ids[-1])


class _Utf8:
    """Restriction of tokens that continue a character which the token before has begun.

    xgrammar takes any continuation byte after any first byte of a character, so also overlong
    forms, surrogates and code points beyond U+10FFFF. A reader would see replacement characters,
    of another number than the grammar counted. After four first bytes the second is restricted
    (RFC 3629, section 4); for all others a byte's class is enough.
    """

    _SECOND_BYTES: Final = {
        0xE0: range(0xA0, 0xC0),
        0xED: range(0x80, 0xA0),
        0xF0: range(0x90, 0xC0),
        0xF4: range(0x80, 0x90),
    }

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._last_bytes = [text[-1] if text else 0 for text in token_bytes]
        self._masks: dict[int, NDArray[np.int32]] = {}
        num_words = -(-len(token_bytes) // 32)
        for first, seconds in self._SECOND_BYTES.items():
            bits = np.zeros(num_words * 32, dtype=np.uint8)
            bits[[i for i, text in enumerate(token_bytes) if text and text[0] in seconds]] = 1
            self._masks[first] = np.packbits(bits, bitorder="little").view(np.int32)

    def restrict(self, mask: NDArray[np.int32], last_token_id: int) -> None:
        """Take out of the mask what would break a character."""
        allowed = self._masks.get(self._last_bytes[last_token_id])
        if allowed is not None:
            mask &= allowed


def _may_be_utf8(text: bytes) -> bool:
    """True if bytes may stand in well-formed UTF-8; characters may be cut at both ends."""
    num_continuing = len(text) - len(text.lstrip(_CONTINUATION_BYTES))
    if num_continuing > 3:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text[num_continuing:])
    except UnicodeDecodeError:
        return False
    return True


def _has_bits(mask: NDArray[np.int32], vocab_size: int) -> NDArray[np.uint8]:
    return np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab_size)
