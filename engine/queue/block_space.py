"""Room for sequences in the KV caches, taken from held answers and drafts where blocks run out."""

from collections.abc import Collection, Mapping, Reversible
from typing import Protocol

from outrider.engine.cache.block_pool import BlockPool, OutOfBlocksError
from outrider.engine.cache.kv_view import KVView
from outrider.engine.cache.retained_blocks import Retention
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.params import Tier


class BlockCache(Protocol):
    """The KV cache of a tier."""

    @property
    def pool(self) -> BlockPool:
        """The blocks that its sequences share."""

    def copy_blocks(self, pairs: list[tuple[int, int]], /) -> None:
        """Copy the content of blocks: (source, destination)."""


class HeadBlocks(Protocol):
    """Blocks of a head's cache; see `outrider.engine.protocols.FeatureReader`."""

    def begin(self, sequence: Sequence, num_cached: int) -> int:
        """Take what the cache has; returns how many cached tokens the sequence is to begin with."""

    def forget(self, sequence: Sequence) -> None:
        """Give back what `begin` took."""


class DraftBlocks(Protocol):
    """Blocks of the small cache that are held for drafts; see
    `outrider.engine.protocols.Drafter`.
    """

    @property
    def features(self) -> HeadBlocks | None:
        """The blocks of a head, which are no small ones; None where there is none."""

    def release(self, sequence: Sequence) -> None:
        """Give back what is held for a sequence."""

    def reclaim(self, num_blocks: int) -> None:
        """Give back at least so many blocks if they are held."""


class BlockSpace:
    """Gives blocks to sequences. Never takes one from a sequence that runs."""

    def __init__(
        self,
        caches: Mapping[Tier, BlockCache],
        held: Reversible[Sequence],
        drafts: DraftBlocks | None,
    ) -> None:
        """`held`: answers that have ended and may still switch their tier, the latest last."""
        self._caches = caches
        self._held = held
        self._drafts = drafts

    def reserve(self, sequence: Sequence, num_slots: int) -> bool:
        """Give a sequence slots for so many tokens in all; False if there are not enough blocks."""
        view = sequence.view
        while True:
            try:
                copies = view.reserve(num_slots)
            except OutOfBlocksError:
                needed = view.num_blocks_needed(num_slots)
                if not view.can_hold_line:
                    if not self._make_line(view, sequence.tier):
                        return False
                    continue
                is_short = needed > view.pool.num_available  # else window blocks are short
                if not is_short or not self._make_room(sequence.tier, needed):
                    return False
            else:
                if copies:
                    self._caches[sequence.tier].copy_blocks(copies)
                return True

    def fits(self, newcomer: Sequence, running: Collection[Sequence]) -> bool:
        """Match the prefix cache and see whether the whole prompt can be held beside the others.

        One block for each running sequence is kept free, or the newcomer would soon be pre-empted.
        """
        tier, view = newcomer.tier, newcomer.view
        pool = self._caches[tier].pool
        headroom = len(running)
        if pool.num_available <= headroom and not self._make_room(tier, headroom + 1):
            return False
        self._match_prefix(newcomer)
        needed = view.num_blocks_needed(len(newcomer.token_ids)) + headroom
        has_room = needed <= pool.num_available or self._make_room(tier, needed)
        if not has_room or not (view.can_hold_line or self._make_line(view, tier)):
            view.release()
            if tier == "large" and self._heads is not None:
                self._heads.forget(newcomer)
            return False
        return True

    def _match_prefix(self, newcomer: Sequence) -> None:
        """Take the cached blocks of a prompt: fewer where a head lacks some of the last ones."""
        view, token_ids = newcomer.view, newcomer.cacheable_token_ids
        num_cached = view.match_prefix(token_ids)
        if newcomer.tier != "large" or self._heads is None:
            return
        if (num_wanted := self._heads.begin(newcomer, num_cached)) < num_cached:
            view.release()
            view.match_prefix(token_ids[: num_wanted + 1])  # one token is always left to compute

    @property
    def _heads(self) -> HeadBlocks | None:
        return None if self._drafts is None else self._drafts.features

    def _make_line(self, view: KVView, tier: Tier) -> bool:
        """Release what running answers do not need until a line of recurrent layers is free."""
        while not view.can_hold_line:
            num_available = view.pool.num_available
            if not self._make_room(tier, num_available + 1):
                return False
        return True

    def _make_room(self, tier: Tier, num_blocks: int) -> bool:
        """Release blocks that running answers do not need; True if that made enough room.

        Held answers go first: their blocks may never be needed again.
        """
        pool = self._caches[tier].pool
        for sequence in reversed(self._held):
            if pool.num_available >= num_blocks:
                return True
            if sequence.tier == tier:
                sequence.view.release()
        if tier == "small" and self._drafts is not None:
            self._drafts.reclaim(num_blocks - pool.num_available)
        return pool.num_available >= num_blocks

    def release(self, sequence: Sequence) -> None:
        """Give back a sequence's blocks and drafts."""
        request = sequence.request
        sequence.view.release(Retention(request.tenant, request.retention_s))
        if self._drafts is not None:
            self._drafts.release(sequence)
