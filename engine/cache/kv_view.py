"""One sequence's window into one model's KV cache."""

from collections.abc import Sequence

from engine.cache.block_pool import BlockHash, BlockPool, OutOfBlocksError, chain_hash


class KVView:
    """A block table and how far it is valid.

    Slots are logical: slot s lies in block `block_table[s // block_size]`. Slots below
    `num_computed_tokens` hold accepted tokens; what lies behind is scratch for the next pass.
    """

    def __init__(self, pool: BlockPool, *, root: BlockHash, prefix_caching: bool = True) -> None:
        self.pool = pool
        self.block_table: list[int] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self._prefix_caching = prefix_caching
        self._root = root
        self._hashes: list[BlockHash] = []  # of the leading full blocks that were published or hit

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        """Take the blocks that hold a prefix already; returns the number of tokens they give.

        At least one token is left to compute, because its logits are wanted. Only for a view that
        is empty.
        """
        assert not self.block_table
        if not self._prefix_caching:
            return 0
        block_size = self.pool.block_size
        parent = self._root
        for start in range(0, len(token_ids) - block_size + 1, block_size):
            block_hash = chain_hash(parent, token_ids[start : start + block_size])
            block = self.pool.find(block_hash)
            if block is None:
                break
            self.pool.share(block)
            self.block_table.append(block)
            self._hashes.append(block_hash)
            parent = block_hash
        num_matched = len(self.block_table) * block_size
        self.num_computed_tokens = self.num_cached_tokens = min(num_matched, len(token_ids) - 1)
        return self.num_cached_tokens

    def num_blocks_needed(self, num_slots: int) -> int:
        """Blocks to allocate before `num_slots` slots can be written, copies of shared ones too."""
        missing = -(-num_slots // self.pool.block_size) - len(self.block_table)
        return max(missing, 0) + len(self._unwritable(num_slots))

    def reserve(self, num_slots: int) -> list[tuple[int, int]]:
        """Make slots up to `num_slots` writable beyond the computed ones, all or nothing.

        Returns the (source, copy) block pairs whose content must be copied first, because others
        hold or may find the source. Raises OutOfBlocksError.
        """
        if self.num_blocks_needed(num_slots) > self.pool.num_available:
            raise OutOfBlocksError
        copies = []
        for index in self._unwritable(num_slots):
            source, copy = self.block_table[index], self.pool.allocate()
            self.block_table[index] = copy
            del self._hashes[index:]
            copies.append((source, copy))
        while len(self.block_table) * self.pool.block_size < num_slots:
            self.block_table.append(self.pool.allocate())
        # Sources are let go only now: an allocation above must not evict what is to be copied.
        self.pool.release(source for source, _ in copies)
        return copies

    def _unwritable(self, num_slots: int) -> list[int]:
        """Table indices of blocks that would be written to but are shared or published."""
        first = self.num_computed_tokens // self.pool.block_size
        last = min(-(-num_slots // self.pool.block_size), len(self.block_table))
        return [
            index
            for index in range(first, last)
            if self.pool.ref_count(self.block_table[index]) > 1
            or self.pool.is_published(self.block_table[index])
        ]

    def advance(self, num_computed_tokens: int, token_ids: Sequence[int]) -> None:
        """Slots below `num_computed_tokens` now hold accepted tokens: publish the full blocks."""
        self.num_computed_tokens = num_computed_tokens
        if not self._prefix_caching:
            return
        block_size = self.pool.block_size
        while (len(self._hashes) + 1) * block_size <= num_computed_tokens:
            index = len(self._hashes)
            parent = self._hashes[-1] if self._hashes else self._root
            block_hash = chain_hash(
                parent, token_ids[index * block_size : (index + 1) * block_size]
            )
            self.pool.publish(self.block_table[index], block_hash)
            self._hashes.append(block_hash)

    def rewind(self, num_tokens: int) -> None:
        """Forget what was computed behind `num_tokens`, and give those blocks back."""
        self.num_computed_tokens = min(self.num_computed_tokens, max(num_tokens, 0))
        del self._hashes[self.num_computed_tokens // self.pool.block_size :]
        self.trim()

    def trim(self) -> None:
        """Give back the blocks that hold no accepted token."""
        keep = -(-self.num_computed_tokens // self.pool.block_size)
        if len(self.block_table) > keep:
            self.pool.release(reversed(self.block_table[keep:]))
            del self.block_table[keep:]

    def release(self) -> None:
        """Give everything back; published blocks stay findable until they are evicted."""
        self.pool.release(reversed(self.block_table))
        self.block_table.clear()
        self._hashes.clear()
        self.num_computed_tokens = 0

    def slot(self, logical: int) -> int:
        """The cache slot of a logical one."""
        block_size = self.pool.block_size
        return self.block_table[logical // block_size] * block_size + logical % block_size
