"""Knows which replicas have which blocks on a disk, by the codes that stand for them there."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Final

import numpy as np

from outrider.engine.cache.block_pool import BlockHash
from outrider.engine.cache.sealing import code_of
from outrider.gateway.engines.backends.wire import BlocksChanged, BlocksReset
from outrider.gateway.engines.fleet.block_index import BlockIndex, Depths, grid, joined_keys

# Keys of names that a text is looked up by: engines of one key, as those of a folder, share that.
_MOST_KEYS: Final = 16


class StoredIndex:
    """Follows the news of replicas' disks beside a `BlockIndex`, whose lanes it shares."""

    def __init__(self, *, max_blocks: int = 2**21, max_lanes: int = 256) -> None:
        """`max_blocks`: codes that it has room for; of more, some are left out."""
        self._index = BlockIndex(max_blocks=max_blocks, max_lanes=max_lanes)
        self._own_lanes: dict[int, int] = {}
        self._names_keys: dict[int, bytes] = {}  # by lane

    def note(self, lane: int, news: BlocksChanged | BlocksReset) -> None:
        """Take in a message that the `BlockIndex` has taken in."""
        if isinstance(news, BlocksChanged):
            if lane in self._names_keys:
                told = BlocksChanged(news.generation, news.stored, news.unstored)
                self._index.note(self._own_lanes[lane], told)
            return
        if not news.names_key:
            self.remove_lane(lane)
            return
        self._names_keys[lane] = news.names_key
        if lane not in self._own_lanes:
            self._own_lanes[lane] = self._index.add_lane()
        self._index.note(self._own_lanes[lane], BlocksReset(news.generation, news.stored))

    def clear_lane(self, lane: int) -> None:
        """Forget what a replica's disk has: its next news is a reset."""
        if self._names_keys.pop(lane, None) is not None:
            self._index.clear_lane(self._own_lanes[lane])

    def remove_lane(self, lane: int) -> None:
        """Forget a replica."""
        self._names_keys.pop(lane, None)
        if (own := self._own_lanes.pop(lane, None)) is not None:
            self._index.remove_lane(own)

    def depths(self, hashes: Sequence[BlockHash], *, every: int = 1) -> Depths:
        """Return how many leading blocks of a text each replica's disk has, int32 [max_lanes].

        Right to a sixteenth. `every`: blocks between those that a text can go on behind.
        """
        depths = np.zeros(self._index.max_lanes, dtype=np.int32)
        places = grid(len(hashes)) if every == 1 else np.arange(every - 1, len(hashes), every)
        if not len(places) or not self._names_keys:
            return depths
        ends = np.concatenate(([0], places + 1)).astype(np.int32)
        lanes_of: defaultdict[bytes, list[int]] = defaultdict(list)
        for lane, names_key in self._names_keys.items():
            lanes_of[names_key].append(lane)
        for names_key, lanes in islice(lanes_of.items(), _MOST_KEYS):
            codes = (code_of(names_key, hashes[place]).encode() for place in places.tolist())
            found = ends[self._index.depths(joined_keys(b"".join(codes)), is_dense=True)]
            depths[lanes] = found[[self._own_lanes[lane] for lane in lanes]]
        return depths
