"""One sequence's window into one model's KV cache."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outrider.engine.cache.block_pool import (
    BlockHash,
    BlockPool,
    OutOfBlocksError,
    chain_hash,
    prefix_hashes,
)
from outrider.engine.cache.recurrent_lines import LINE_TREE_ROWS, RecurrentLine, RecurrentPool
from outrider.engine.cache.retained_blocks import Retention

if TYPE_CHECKING:  # it loads torch, which the queue does without
    from outrider.kernels.layers.lora import LoraWeights


class KVView:
    """A block table and how far it is valid.

    Slots are logical: slot s lies in block `block_table[s // block_size]`. Slots below
    `num_computed_tokens` hold accepted tokens; what lies behind is scratch for the next pass.

    Where layers with a window have a smaller cache, `window_table` says where the same blocks lie
    in it: 0 for those that the window has passed. It is empty where they have none.

    `adapter`: of every row whose keys and values it holds; its hash is part of `root`.
    `line`: the state of recurrent layers, None where the model has none. `owner`: whose texts they
    are, as extents say (`owner_tag`).
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        root: BlockHash,
        prefix_caching: bool = True,
        adapter: "LoraWeights | None" = None,
        recurrent: RecurrentPool | None = None,
        owner: str = "",
    ) -> None:
        self.pool = pool
        self.owner = owner
        self.adapter = adapter
        self.line = None if recurrent is None else RecurrentLine(recurrent)
        self.block_table: list[int] = []
        self.window_table: list[int] = []
        self._num_passed = 0  # leading blocks of which the window block is not held
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self._prefix_caching = prefix_caching
        self._root = root
        self._hashes: list[BlockHash] = []  # of the leading full blocks that were published or hit

    def twin(self) -> "KVView":
        """Return an empty view of the same texts."""
        return KVView(
            self.pool,
            root=self._root,
            prefix_caching=self._prefix_caching,
            adapter=self.adapter,
            recurrent=None if self.line is None else self.line.pool,
            owner=self.owner,
        )

    @property
    def has_prefix_caching(self) -> bool:
        """True if it takes blocks of earlier texts, and leaves its own for later ones."""
        return self._prefix_caching

    @property
    def root(self) -> BlockHash:
        """The hash at which the chain of its blocks starts."""
        return self._root

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        """Take the blocks that hold a prefix already; returns the number of tokens they give.

        At least one token is left to compute, because its logits are wanted. Only for a view that
        is empty.
        """
        assert not self.block_table
        if not self._prefix_caching:
            return 0
        found = self._find_prefix(token_ids)
        for block, block_hash in found:
            self.pool.share(block)
            self.block_table.append(block)
            self._hashes.append(block_hash)
        num_matched = len(found) * self.pool.block_size
        self.num_computed_tokens = self.num_cached_tokens = min(num_matched, len(token_ids) - 1)
        self._hold_window()
        if self.line is not None and found:
            self.line.take(found[-1][1], self.num_cached_tokens)
        return self.num_cached_tokens

    def count_cached_tokens(self, token_ids: Sequence[int]) -> int:
        """Count the tokens that `match_prefix` would find."""
        num_found = len(self._find_prefix(token_ids)) if self._prefix_caching else 0
        return min(num_found * self.pool.block_size, len(token_ids) - 1)

    def _find_prefix(self, token_ids: Sequence[int]) -> list[tuple[int, BlockHash]]:
        """Return the blocks, with their hashes, of the longest prefix that a pass can go on from.

        A pass needs the windowed keys of the last tokens, which may be gone where the others are
        still there.
        """
        block_size, window = self.pool.block_size, self.pool.window
        found: list[tuple[int, BlockHash]] = []
        num_usable, first_present = 0, 0
        for block_hash in prefix_hashes(self._root, token_ids, block_size):
            block = self.pool.find(block_hash)
            if block is None:
                break
            found.append((block, block_hash))
            if window is None:
                num_usable = len(found)
                continue
            if not window.has(block):
                first_present = len(found)
            num_tokens = min(len(found) * block_size, len(token_ids) - 1)
            if window.first_seen(num_tokens) >= first_present:
                num_usable = len(found)
        if self.line is None:
            return found[:num_usable]
        hashes = [block_hash for _, block_hash in found]
        limit = min(len(found) * block_size, len(token_ids) - 1)
        return found[: self.line.find(self._prefix_hash(hashes), limit) // block_size]

    def _prefix_hash(self, hashes: Sequence[BlockHash]) -> Callable[[int], BlockHash | None]:
        """Return what gives the hash of a prefix of some tokens, from those of its blocks."""
        block_size = self.pool.block_size

        def prefix_hash(num_tokens: int) -> BlockHash | None:
            number = num_tokens // block_size
            return hashes[number - 1] if 0 < number <= len(hashes) else None

        return prefix_hash

    def _hold_window(self) -> None:
        """Hold the window blocks of a prefix that was found."""
        window = self.pool.window
        if window is None:
            return
        self._num_passed = min(window.first_seen(self.num_computed_tokens), len(self.block_table))
        self.window_table = [0] * self._num_passed
        self.window_table += [window.hold(each) for each in self.block_table[self._num_passed :]]

    def num_blocks_needed(self, num_slots: int) -> int:
        """Blocks to allocate before `num_slots` slots can be written, copies of shared ones too."""
        num_missing = -(-num_slots // self.pool.block_size) - len(self.block_table)
        return max(num_missing, 0) + len(self._unwritable(num_slots))

    @property
    def can_hold_line(self) -> bool:
        """True unless recurrent layers have no line left for the view."""
        return self.line is None or self.line.can_hold

    def reserve(self, num_slots: int) -> list[tuple[int, int]]:
        """Make slots up to `num_slots` writable beyond the computed ones, all or nothing.

        Returns the (source, copy) block pairs whose content must be copied first, because others
        hold or may find the source. Raises OutOfBlocksError.
        """
        unwritable, window = self._unwritable(num_slots), self.pool.window
        num_missing = -(-num_slots // self.pool.block_size) - len(self.block_table)
        needed = max(num_missing, 0) + len(unwritable)
        if needed and needed > self.pool.num_available:
            raise OutOfBlocksError
        if self.line is not None:
            self.line.hold()
        if window is not None and needed > window.num_available:
            raise OutOfBlocksError
        if not needed:  # as for most levels of a tree
            return []
        copies = [self._copied(index) for index in unwritable]
        while len(self.block_table) * self.pool.block_size < num_slots:
            block = self.pool.allocate()
            self.block_table.append(block)
            if window is not None:
                self.window_table.append(window.hold(block))
        # Sources are let go only now: an allocation above must not evict what is to be copied.
        if window is not None:
            for source, _ in copies:
                window.let_go(source)
        self.pool.release(source for source, _ in copies)
        return copies

    def _copied(self, index: int) -> tuple[int, int]:
        """Take a block in the place of one that others see; return that one and its copy."""
        source, copy = self.block_table[index], self.pool.allocate()
        self.block_table[index] = copy
        del self._hashes[index:]
        if (window := self.pool.window) is not None:
            self.window_table[index] = window.copy(source, copy)
        return source, copy

    def _unwritable(self, num_slots: int) -> list[int]:
        """Table indices of blocks that would be written to but are shared or published."""
        pool = self.pool
        first = self.num_computed_tokens // pool.block_size
        own = self.block_table[first : -(-num_slots // pool.block_size)]
        if not any(map(pool.is_seen, own)):  # as nearly always
            return []
        return [index for index, block in enumerate(own, start=first) if pool.is_seen(block)]

    def advance(self, num_computed_tokens: int, token_ids: Sequence[int]) -> None:
        """Slots below `num_computed_tokens` now hold accepted tokens: publish the full blocks."""
        self.num_computed_tokens = num_computed_tokens
        self._pass_window()
        if not self._prefix_caching:
            return
        block_size = self.pool.block_size
        while (len(self._hashes) + 1) * block_size <= num_computed_tokens:
            index = len(self._hashes)
            parent = self._hashes[-1] if self._hashes else self._root
            own = token_ids[index * block_size : (index + 1) * block_size]
            block_hash = chain_hash(parent, own)
            self.pool.publish(
                self.block_table[index],
                block_hash,
                parent=parent,
                root=self._root,
                token_ids=own,
            )
            self._hashes.append(block_hash)

    def _pass_window(self) -> None:
        """Let go of the window blocks that no later row sees."""
        window = self.pool.window
        if window is None:
            return
        first = min(window.first_kept(self.num_computed_tokens), len(self.block_table))
        for index in range(self._num_passed, first):
            window.let_go(self.block_table[index])
            self.window_table[index] = 0
        self._num_passed = max(self._num_passed, first)

    def rewind(self, num_tokens: int) -> None:
        """Forget what was computed behind `num_tokens`, and give those blocks back.

        All of it is forgotten where the window has passed tokens that would be seen again, and what
        recurrent layers have no state before.
        """
        kept = min(self.num_computed_tokens, max(num_tokens, 0))
        window = self.pool.window
        if window is not None and window.first_seen(kept) < self._num_passed:
            kept = 0
        if self.line is not None and kept < self.line.num_tokens:
            prefix_hash = self._prefix_hash(self._hashes)
            kept = self.line.find(prefix_hash, kept)
            self.line.take(prefix_hash(kept), kept)
        self.num_computed_tokens = kept
        del self._hashes[self.num_computed_tokens // self.pool.block_size :]
        self.trim()

    def trim(self) -> None:
        """Give back the blocks that hold no accepted token."""
        self._keep(-(-self.num_computed_tokens // self.pool.block_size))

    def release(self, keep: Retention | None = None) -> None:
        """Give everything back; published blocks stay findable until they are evicted.

        `keep`: whose they are, and how much longer than others they are wanted.
        """
        if self.line is not None:
            self.keep_checkpoint()
            self.line.release()
        has_own = len(self._hashes) * self.pool.block_size > self.num_cached_tokens
        if has_own and self.pool.on_leave is not None:
            self.pool.on_leave(self._root, tuple(self._hashes), self.owner)
        self._keep(0, keep)
        self._hashes.clear()
        self.num_computed_tokens = 0

    def keep_checkpoint(self) -> None:
        """Let later prefixes go on from the state of the recurrent layers, until it is evicted.

        For where texts part: the ends of prompts and of answers.
        """
        if self.line is not None and self._prefix_caching:
            prefix = self._prefix_hash(self._hashes)(self.line.num_tokens)
            if prefix is not None:
                self.line.publish(prefix)

    @property
    def num_tree_slots(self) -> int:
        """Slots that a tree may have, its root's included."""
        return sys.maxsize if self.line is None else LINE_TREE_ROWS

    def _keep(self, num_blocks: int, keep: Retention | None = None) -> None:
        """Give back the blocks behind the first `num_blocks`."""
        if num_blocks >= len(self.block_table):
            return
        window = self.pool.window
        if window is not None:
            for block in reversed(self.block_table[max(num_blocks, self._num_passed) :]):
                window.let_go(block)
            del self.window_table[num_blocks:]
            self._num_passed = min(self._num_passed, num_blocks)
        self.pool.release(reversed(self.block_table[num_blocks:]), keep)
        del self.block_table[num_blocks:]

    def slot(self, logical: int) -> int:
        """The cache slot of a logical one."""
        block_size = self.pool.block_size
        return self.block_table[logical // block_size] * block_size + logical % block_size
