"""The blocks of a KV cache: free, shared, or kept for a later prefix hit."""

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterable, Iterator, Sequence
from typing import Final, Protocol

from outrider.engine.cache.retained_blocks import RetainedBlocks, Retention
from outrider.engine.cache.window_blocks import WindowBlocks

BlockHash = bytes
PRIVATE_SALT: Final = "private\0"
_HASH_BYTES: Final = 16
_PRIVATE_MARK: Final = b"private"
# A long prompt needs window blocks for one chunk at a time, so they bound what is available only
# where they would not do for that.
_STEP_TOKENS = 4096
_FREE_PART: Final = 4


class OutOfBlocksError(Exception):
    """No block is free and none can be evicted. The scheduler answers with pre-emption."""


def root_hash(*parts: str) -> BlockHash:
    """The hash that every chain starts from: numerics fingerprint, KV dtype, tenant salt."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=_HASH_BYTES).digest()


def prefix_root(
    numerics: str, kv_dtype: str, cache_salt: str, adapter_digest: str = ""
) -> BlockHash:
    """Return where the chain of a model's texts starts, with an adapter's digest where it has one.

    `numerics`: the fingerprint of the model and its arithmetic. `kv_dtype`: as torch names it.
    `cache_salt`: a private text's begins with PRIVATE_SALT, and its root says so (`is_private`).
    """
    if adapter_digest:
        numerics += f"+{adapter_digest}"
    root = root_hash(numerics, kv_dtype, cache_salt)
    return root + _PRIVATE_MARK if cache_salt.startswith(PRIVATE_SALT) else root


def owner_tag(cache_salt: str) -> str:
    """Return what says in an extent whose it is, so that it can be erased with its tenant.

    A head's salt is its tenant's and more, behind a colon.
    """
    salt, _, _ = cache_salt.partition(":")
    return hashlib.blake2b(salt.encode(), digest_size=8, person=b"owner").hexdigest()


def is_private(root: BlockHash) -> bool:
    """Return whether a root's texts may not leave the engine."""
    return len(root) > _HASH_BYTES


def chain_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of a full block: its own tokens and, through `parent`, all tokens before them."""
    text = parent + array("q", token_ids).tobytes()
    return hashlib.blake2b(text, digest_size=_HASH_BYTES).digest()


def prefix_hashes(
    root: BlockHash, token_ids: Sequence[int], block_size: int
) -> Iterator[BlockHash]:
    """Yield the chain of the full blocks that a text begins with."""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        root = chain_hash(root, token_ids[start : start + block_size])
        yield root


class PoolListener(Protocol):
    """Receives what a pool lets be found, and what not any more."""

    def note_published(
        self,
        source: "BlockPool",
        block: int,
        block_hash: BlockHash,
        *,
        parent: BlockHash,
        root: BlockHash,
        token_ids: Sequence[int],
    ) -> None:
        """A block can be found by its hash from now on."""

    def note_forgotten(self, source: "BlockPool", block_hash: BlockHash) -> None:
        """The hash finds no block any more."""


class BlockPool:
    """Reference-counted blocks with a prefix cache.

    A block is free (not held, nothing worth keeping), evictable (not held, but it can
    be found by its hash; least recently used goes first) or held by `ref_count` sequences.
    `window`: where the layers with a window have a smaller cache of their own.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        window: WindowBlocks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window = window
        self.listener: PoolListener | None = None
        self.on_leave: Callable[[BlockHash, Sequence[BlockHash], str], None] | None = None
        """Told the root and the hashes of a text whose view lets its blocks go."""
        self._step_blocks = _STEP_TOKENS // block_size
        # popped from the end, so low numbers first: a lone sequence gets ascending blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._retained = RetainedBlocks(num_blocks, clock)  # evictable too, but later
        self._ref_counts = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._block_of_hash: dict[BlockHash, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that could be allocated now, and held by a view with their windowed keys."""
        available = len(self._free) + self._num_evictable
        if self.window is None or self.window.num_available >= self._step_blocks:
            return available
        return min(available, self.window.num_available)

    @property
    def is_filling(self) -> bool:
        """True if few blocks are free: soon others are taken that could be found."""
        return len(self._free) < self.num_blocks // _FREE_PART

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - len(self._free) - self._num_evictable

    @property
    def _num_evictable(self) -> int:
        return len(self._evictable) + len(self._retained)

    def ref_count(self, block: int) -> int:
        """Count how many sequences hold the block."""
        return self._ref_counts[block]

    def allocate(self) -> int:
        """Take a block that no other sequence sees. Raises OutOfBlocksError."""
        if self._free:
            block = self._free.pop()
        else:
            block = self._evicted()
            self._forget(block)
        self._ref_counts[block] = 1
        return block

    def _evicted(self) -> int:
        """Take the least valuable block that no one holds. Raises OutOfBlocksError."""
        if (due := self._retained.pop_due()) is not None:
            return due
        if self._evictable:
            return self._evictable.popitem(last=False)[0]
        if (last := self._retained.pop()) is None:
            raise OutOfBlocksError
        return last

    def share(self, block: int) -> None:
        """Hold a block that was found by its hash."""
        if self._ref_counts[block] == 0 and not self._retained.discard(block):
            del self._evictable[block]
        self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int], keep: Retention | None = None) -> None:
        """Let go of blocks; give a prefix's tail first so that it is evicted first.

        `keep`: whose they are, and how much longer than others they are wanted.
        """
        if keep is not None:
            self._retained.note(keep.tenant)
        for block in blocks:
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, f"block {block} was released twice"
            if self._ref_counts[block] == 0:
                if self._hashes[block] is None:
                    self._free_block(block)
                elif keep is not None and keep.seconds:
                    self._evictable.update(dict.fromkeys(self._retained.add(block, keep)))
                else:
                    self._evictable[block] = None

    def publish(
        self,
        block: int,
        block_hash: BlockHash,
        *,
        parent: BlockHash = b"",
        root: BlockHash = b"",
        token_ids: Sequence[int] = (),
    ) -> None:
        """Make a full block findable. Where an equal block is known already, that one stays.

        `parent`, `root`, `token_ids`: what the hash is made of, for the listener.
        """
        if block_hash not in self._block_of_hash and self._hashes[block] is None:
            self._block_of_hash[block_hash] = block
            self._hashes[block] = block_hash
            if self.listener is not None:
                self.listener.note_published(
                    self, block, block_hash, parent=parent, root=root, token_ids=token_ids
                )

    def published(self) -> ItemsView[BlockHash, int]:
        """Return all hashes that find a block, with the blocks."""
        return self._block_of_hash.items()

    def hash_of(self, block: int) -> BlockHash | None:
        """Return the hash that finds the block; None where none does."""
        return self._hashes[block]

    def is_published(self, block: int) -> bool:
        """True if others may find the block: then it must not be written to."""
        return self._hashes[block] is not None

    def is_seen(self, block: int) -> bool:
        """True if others hold the block or may find it."""
        return self._ref_counts[block] > 1 or self._hashes[block] is not None

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
            if self.listener is not None:
                self.listener.note_forgotten(self, block_hash)
