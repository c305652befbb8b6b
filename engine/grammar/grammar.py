"""Grammars over tokens: what an answer may say next, at every node of a tree.

An answer under a grammar has a `GrammarState`. It is a rule on logits, so plain decoding, drafting
and verification all see the same distribution. The drafter learns from it which guesses are
possible, and where only one token is.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.errors import InvalidGrammarError
from outrider.engine.request import GrammarSpec
from outrider.verifier.logit_rules import MaskRule

_WORD_BITS = 32
# Processor time that one answer's way through its grammar may take: a reserve, and so much more
# with each mask. An ordinary schema takes a tenth of a millisecond for a mask and less for a token;
# the compiler's trial refuses what is slow at once, but some grammars become slow with the length.
_FIRST_S: Final = 0.5
_MASK_S: Final = 0.01


class TokenMatcher(Protocol):
    """A place in a grammar: behind the tokens that were accepted."""

    def accept(self, token_id: int) -> bool:
        """Go one token on; False, and no move, where the grammar does not allow it."""

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back, stop tokens included."""

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Set bit i % 32 of word i // 32 where token i may follow; [ceil(vocab_size / 32)].

        Must not be called behind a stop token.
        """


class TokenGrammar(Protocol):
    """A grammar, compiled for one vocabulary. Shared by all answers that conform to it."""

    @property
    def vocab_size(self) -> int:
        """Token ids lie below this."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer; allowed wherever it is complete."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Keywords of lenient schemas that it leaves out, as `place#pointer`."""

    def matcher(self) -> TokenMatcher:
        """A matcher at the beginning of an answer."""

    def mask_logits(self, logits: Tensor, masks: NDArray[np.int32]) -> None:
        """Set logits of tokens whose bit is 0 to -inf, in place.

        `logits`: float32 [num_rows, at most vocab_size]; `masks`: [num_rows, ceil(vocab_size /
        32)].
        """


class GrammarCompiler(Protocol):
    """Compiles grammars for one tokenizer, beside the step loop."""

    def compile(
        self, spec: GrammarSpec, *, salt: str = "", tenant: str = ""
    ) -> "Future[TokenGrammar]":
        """Start compiling, or find what was compiled before for the same `salt`.

        The future raises InvalidGrammarError where the grammar cannot be enforced. Tenants take
        turns. Raises QueueFullError where the tenant has too many grammars waiting.
        """


class GrammarState(MaskRule):
    """One answer's place in its grammar: a `LogitRule`, and what a drafter asks.

    Everything is answered for a text: `token_ids` (prompt and answer so far) and a path of guesses
    behind it. Texts that share a beginning share nodes of a trie below the answer's end. Nodes keep
    their masks, so that a node costs one step and one mask of the matcher, however often drafter
    and verifier ask. What was not accepted is dropped when the answer grows.
    """

    def __init__(
        self,
        grammar: TokenGrammar,
        *,
        num_prompt_tokens: int,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`clock`: seconds of processor time of this thread, so that a busy machine costs nothing.

        Every method raises InvalidGrammarError once masks and moves have taken too much of it.
        """
        self._grammar = grammar
        self._clock = clock
        self._left_s = _FIRST_S
        self._num_prompt_tokens = num_prompt_tokens
        self._num_words = -(-grammar.vocab_size // _WORD_BITS)
        self._stops = frozenset(grammar.stop_token_ids)
        self._stop_mask = np.zeros(self._num_words, dtype=np.int32)
        for token_id in grammar.stop_token_ids:
            self._stop_mask.view(np.uint32)[token_id // _WORD_BITS] |= 1 << token_id % _WORD_BITS
        self._restart()

    def _restart(self) -> None:
        self._matcher = self._grammar.matcher()
        self._answer_len = 0
        self._root = self._here = _Node(token_id=-1, parent=None)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end the answer, whatever the request's own stop tokens are."""
        return self._grammar.stop_token_ids

    @property
    def left_out(self) -> tuple[str, ...]:
        """Keywords of lenient schemas that it leaves out, as `place#pointer`."""
        return self._grammar.left_out

    # ---- what the step asks ---------------------------------------------------------------

    def masks(self, token_ids: list[int], paths: list[list[int]]) -> list[NDArray[np.int32] | None]:
        """Return what may follow each text, [num_words]; None behind a finished or a refused one.

        Masks are kept, so they may be asked for while the rows' logits are computed.
        """
        self._follow(token_ids)
        masks: list[NDArray[np.int32] | None] = [None] * len(paths)
        # Sorted, the paths are a walk through the trie: the matcher goes every edge once.
        for row in sorted(range(len(paths)), key=paths.__getitem__):
            node = self._walk(paths[row])
            if node is not None and not node.is_end:
                masks[row] = self._mask(node)
        return masks

    def apply(self, logits: Tensor, token_ids: list[int], paths: list[list[int]]) -> None:
        """Forbid in each row what the grammar does not allow behind `token_ids + paths[i]`.

        `logits`: float32 [num_rows, vocab_size], in any vocabulary size: what the grammar does not
        know is forbidden. Rows behind a finished or a refused text stay as they are, for nothing
        is emitted from them. Where earlier rules (`min_tokens`) have forbidden all that the grammar
        allows, the grammar wins.
        """
        masks = self.masks(token_ids, paths)
        stacked = [mask for mask in masks if mask is not None]
        if len(stacked) == len(masks):
            self._forbid(logits, np.stack(stacked))
        elif stacked:
            rows = [row for row, mask in enumerate(masks) if mask is not None]
            index = torch.tensor(rows, device=logits.device)
            chosen = logits[index]
            self._forbid(chosen, np.stack(stacked))
            logits.index_copy_(0, index, chosen)

    def _forbid(self, logits: Tensor, masks: NDArray[np.int32]) -> None:
        """Apply masks [num_rows, num_words] to logits [num_rows, any vocabulary size]."""
        self._grammar.mask_logits(logits, masks)
        logits[:, self._grammar.vocab_size :] = -torch.inf
        is_empty = logits.amax(-1).isneginf()
        if is_empty.any():
            equal = torch.zeros_like(logits[is_empty])
            self._grammar.mask_logits(equal, masks[is_empty.cpu().numpy()])
            logits[is_empty] = equal

    def forced_tokens(self, token_ids: list[int], path: list[int], limit: int) -> list[int]:
        """Return what must follow `token_ids + path`: as long as one token alone is possible.

        At most `limit` tokens; the last of them may be a stop token.
        """
        self._follow(token_ids)
        node = self._walk(path)
        forced: list[int] = []
        while node is not None and not node.is_end and len(forced) < limit:
            token_id = _only_bit(self._mask(node))
            if token_id is None:
                break
            forced.append(token_id)
            node = self._child(node, token_id)
        return forced

    def num_valid(self, token_ids: list[int], path: list[int], tokens: Sequence[int]) -> int:
        """Count the first of `tokens` that may follow `token_ids + path` one by one."""
        self._follow(token_ids)
        node = self._walk(path)
        for index, token_id in enumerate(tokens):
            node = None if node is None or node.is_end else self._child(node, token_id)
            if node is None:
                return index
        return len(tokens)

    # ---- the trie -------------------------------------------------------------------------

    def _follow(self, token_ids: list[int]) -> None:
        """Move the root of the trie to the end of the answer so far."""
        length = len(token_ids) - self._num_prompt_tokens
        has_restarted = length < self._answer_len or (
            self._answer_len > 0
            and token_ids[self._num_prompt_tokens + self._answer_len - 1] != self._root.token_id
        )
        if has_restarted:
            self._restart()
        for token_id in token_ids[self._num_prompt_tokens + self._answer_len :]:
            root = None if self._root.is_end else self._child(self._root, token_id)
            if root is None:  # behind the end, or an answer that left its grammar: all is free
                root = _Node(token_id=token_id, parent=None, is_end=True)
            if not root.is_end:
                self._go(root)
            self._root = self._here = root
            root.parent = None
            self._answer_len += 1

    def _walk(self, path: Sequence[int]) -> "_Node | None":
        """The node at the end of a path; None where the grammar refuses it.

        A path that goes on behind the end ends there.
        """
        node: _Node | None = self._root
        for token_id in path:
            if node is None or node.is_end:
                return node
            node = self._child(node, token_id)
        return node

    def _child(self, node: "_Node", token_id: int) -> "_Node | None":
        """The node behind one more token; None where it is not allowed."""
        child = node.children.get(token_id)
        if child is None and _has_bit(self._mask(node), token_id):
            child = _Node(token_id=token_id, parent=node, is_end=token_id in self._stops)
            node.children[token_id] = child
        return child

    def _mask(self, node: "_Node") -> NDArray[np.int32]:
        """Bits of the tokens that may follow a node, [num_words]; the end alone if stuck."""
        if node.mask is None:
            self._go(node)
            began_s = self._clock()
            mask = np.full(self._num_words, -1, dtype=np.int32)
            self._matcher.fill_mask(mask)
            if spare := self._grammar.vocab_size % _WORD_BITS:
                mask[-1] &= (1 << spare) - 1
            node.mask = mask if mask.any() else self._stop_mask
            self._spend(self._clock() - began_s - _MASK_S)
        return node.mask

    def _spend(self, spent_s: float) -> None:
        self._left_s = min(self._left_s - spent_s, _FIRST_S)  # no credit piles up
        if self._left_s < 0.0:
            raise InvalidGrammarError(
                "finding the tokens that it allows takes too long; simplify it"
            )

    def _go(self, node: "_Node") -> None:
        """Move the matcher to a node, which the masks on the way have allowed."""
        if node is self._here:
            return
        began_s = self._clock()
        place, ahead = self._here, node
        num_back = 0
        way: list[int] = []
        while ahead is not place:  # up from both until they meet
            if ahead.depth > place.depth:
                way.append(ahead.token_id)
                ahead = ahead.above()
            else:
                num_back += 1
                place = place.above()
        if num_back:
            self._matcher.rollback(num_back)
        for token_id in reversed(way):
            accepted = self._matcher.accept(token_id)
            assert accepted, "the matcher refuses a token that its mask allowed"
        self._here = node
        self._spend(self._clock() - began_s)


class _Node:
    """A text in front of a row. `depth`: its tokens. `is_end`: the last of them ends the answer."""

    __slots__ = ("children", "depth", "is_end", "mask", "parent", "token_id")

    def __init__(self, *, token_id: int, parent: "_Node | None", is_end: bool = False) -> None:
        self.token_id = token_id
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.is_end = is_end
        self.children: dict[int, _Node] = {}
        self.mask: NDArray[np.int32] | None = None

    def above(self) -> "_Node":
        """The parent of a node that is not the root."""
        assert self.parent is not None, "the matcher has left the trie"
        return self.parent


def _has_bit(mask: NDArray[np.int32], token_id: int) -> bool:
    word, bit = divmod(token_id, _WORD_BITS)
    return 0 <= word < len(mask) and bool(int(mask[word]) >> bit & 1)


def _only_bit(mask: NDArray[np.int32]) -> int | None:
    """The one bit that is set; None where it is not exactly one."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    value = int(mask[words[0]]) & 0xFFFFFFFF
    if value & (value - 1):
        return None
    return int(words[0]) * _WORD_BITS + value.bit_length() - 1
