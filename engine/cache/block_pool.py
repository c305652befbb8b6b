"""The blocks of a KV cache: free, shared, or kept for a later prefix hit."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.cache.window_blocks import WindowBlocks

BlockHash = bytes
# A long prompt needs window blocks for one chunk at a time, so they bound what is available only
# where they would not do for that.
_STEP_TOKENS = 4096


class OutOfBlocksError(Exception):
    """No block is free and none can be evicted. The scheduler answers with pre-emption."""


def root_hash(*parts: str) -> BlockHash:
    """The hash that every chain starts from: numerics fingerprint, KV dtype, tenant salt."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).digest()


def chain_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of a full block: its own tokens and, through `parent`, all tokens before them."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """Reference-counted blocks with a prefix cache.

    A block is free (not held, nothing worth keeping), evictable (not held, but it can
    be found by its hash; least recently used goes first) or held by `ref_count` sequences.
    `window`: where the layers with a window have a smaller cache of their own.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, window: WindowBlocks | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window = window
        self._step_blocks = _STEP_TOKENS // block_size
        # popped from the end, so low numbers first: a lone sequence gets ascending blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._block_of_hash: dict[BlockHash, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that could be allocated now, and held by a view with their windowed keys."""
        available = len(self._free) + len(self._evictable)
        if self.window is None or self.window.num_available >= self._step_blocks:
            return available
        return min(available, self.window.num_available)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - len(self._free) - len(self._evictable)

    def ref_count(self, block: int) -> int:
        """Count how many sequences hold the block."""
        return self._ref_counts[block]

    def allocate(self) -> int:
        """Take a block that no other sequence sees. Raises OutOfBlocksError."""
        if self._free:
            block = self._free.pop()
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            self._forget(block)
        else:
            raise OutOfBlocksError
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Hold a block that was found by its hash."""
        if self._ref_counts[block] == 0:
            del self._evictable[block]
        self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of blocks; give a prefix's tail first so that it is evicted first."""
        for block in blocks:
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, f"block {block} was released twice"
            if self._ref_counts[block] == 0:
                if self._hashes[block] is None:
                    self._free_block(block)
                else:
                    self._evictable[block] = None

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """Make a full block findable. Where an equal block is known already, that one stays."""
        if block_hash not in self._block_of_hash and self._hashes[block] is None:
            self._block_of_hash[block_hash] = block
            self._hashes[block] = block_hash

    def is_published(self, block: int) -> bool:
        """True if others may find the block: then it must not be written to."""
        return self._hashes[block] is not None

    def find(self, block_hash: BlockHash) -> int | None:
        """The block that holds this prefix, if it is still there."""
        return self._block_of_hash.get(block_hash)

    def _free_block(self, block: int) -> None:
        self._free.append(block)
        if self.window is not None:
            self.window.forget(block)

    def _forget(self, block: int) -> None:
        if self.window is not None:
            self.window.forget(block)
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._block_of_hash[block_hash]
            self._hashes[block] = None
