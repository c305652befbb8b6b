"""News of a prefix cache: the prefixes that requests can go on from, and those that went.

A placement that sends requests to where their prefix is listens to them. Where there is no
listener, nothing is collected.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.engine.cache.block_pool import BlockHash, BlockPool
from outrider.engine.cache.stored_news import StoredNews


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBlock:
    """A block that was published."""

    block_hash: BlockHash
    parent: BlockHash
    """The block before it, over which its hash chains."""
    root: BlockHash
    """The hash at which the chain starts."""
    token_ids: Sequence[int]
    """Its own; empty for a checkpoint of recurrent layers."""
    model: str = ""
    """The engine's model that it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChanges:
    """What came and what went since the last time; no hash is in both."""

    kept: Sequence[KeptBlock]
    dropped: Sequence[BlockHash]
    stored: bytes = b""
    """Codes of blocks that came to lie on a disk (`StoredNews`)."""
    unstored: bytes = b""


class BlockNews:
    """Collects the news of one model's pool, as its listener.

    A hash that is kept is one that a prefix hit may end with:

    - of a model whose layers all see everything: a published block;
    - of layers with a window: a published block whose windowed keys are there as well. A hit needs
      those of the whole window before its end; they go in the order in which they came.
    - of recurrent layers: a checkpoint, while the block that it stands behind is there.

    Of two models' pools with one chain of hashes, what one drops counts as dropped.
    """

    def __init__(self, pool: BlockPool, states: BlockPool | None = None, model: str = "") -> None:
        """`states`: the checkpoints of recurrent layers. `model`: a name for the listeners."""
        self._pool = pool
        self._model = model
        self._states = states
        self._ends = pool if states is None else states
        self._changes: dict[BlockHash, KeptBlock | None] = {}

    def listen(self) -> None:
        """Collect from now on; once is enough."""
        self._pool.listener = self._ends.listener = self
        if self._pool.window is not None:
            self._pool.window.on_detach = self._note_window_gone

    def hashes(self) -> list[BlockHash]:
        """Return all that is kept now."""
        return [found for found, block in self._ends.published() if self._is_end(block, found)]

    def take(self, kept: list[KeptBlock], dropped: list[BlockHash]) -> None:
        """Move the changes since the last call to two lists."""
        for block_hash, block in self._changes.items():
            if block is None:
                dropped.append(block_hash)
            else:
                kept.append(block)
        self._changes.clear()

    def note_published(
        self,
        source: BlockPool,
        block: int,
        block_hash: BlockHash,
        *,
        parent: BlockHash,
        root: BlockHash,
        token_ids: Sequence[int],
    ) -> None:
        """Hear of a block, or a state, that can be found from now on."""
        if source is self._ends and self._is_end(block, block_hash):
            self._changes[block_hash] = KeptBlock(
                block_hash=block_hash,
                parent=parent,
                root=root,
                token_ids=token_ids,
                model=self._model,
            )

    def note_forgotten(self, source: BlockPool, block_hash: BlockHash) -> None:
        """Hear of one that cannot be found any more."""
        if source is self._ends or self._ends.find(block_hash) is not None:
            self._changes[block_hash] = None

    def _note_window_gone(self, block: int) -> None:
        if (block_hash := self._pool.hash_of(block)) is not None:
            self._changes[block_hash] = None

    def _is_end(self, block: int, block_hash: BlockHash) -> bool:
        if self._states is not None:
            return self._pool.find(block_hash) is not None
        return self._pool.window is None or self._pool.window.has(block)


class BlockFeed:
    """The news of all of an engine's models, for any number of sinks."""

    def __init__(self, news: Sequence[BlockNews] = (), stored: StoredNews | None = None) -> None:
        """`stored`: of a folder on a disk, None without one."""
        self.stored = stored
        self._news = news
        self._sinks: list[Callable[[BlockChanges], None]] = []

    def add_sink(self, sink: Callable[[BlockChanges], None]) -> None:
        """Have a sink called with all changes from now on, at most once a step."""
        self.deliver()
        for each in self._news:
            each.listen()
        self._sinks.append(sink)

    def hashes(self) -> list[BlockHash]:
        """Return all that is kept, after the changes that were delivered."""
        self.deliver()
        return [block_hash for each in self._news for block_hash in each.hashes()]

    def deliver(self) -> None:
        """Give the sinks what has changed since the last call, if anything has."""
        if not self._sinks:
            return
        kept: list[KeptBlock] = []
        dropped: list[BlockHash] = []
        for each in self._news:
            each.take(kept, dropped)
        stored, unstored = (b"", b"") if self.stored is None else self.stored.take()
        if kept or dropped or stored or unstored:
            changes = BlockChanges(kept=kept, dropped=dropped, stored=stored, unstored=unstored)
            for sink in self._sinks:
                sink(changes)
