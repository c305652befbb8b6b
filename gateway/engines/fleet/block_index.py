"""Knows which replicas have which blocks of the prefix cache, by the news that they send.

Arrays, so that a pair of block and replica takes some 25 bytes, and all sizes are fixed at the
start: memory is touched as it is filled. What finds no room is left out. A wrong entry costs time,
never an answer: the engine looks for itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.gateway.engines.backends.wire import HASH_BYTES, BlocksChanged, BlocksReset
from outrider.gateway.engines.fleet.block_table import BlockTable, Ints, Keys

Depths = npt.NDArray[np.int32]

_FLUSHED_AT: Final = 2048
_SWEPT_SLOTS: Final = 8192
# Positions that are looked up at first: all of the first so many, then as many in each octave.
_PER_OCTAVE: Final = 16
_FEW: Final = 4


def block_keys(hashes: Sequence[bytes]) -> Keys:
    """Return what the index knows of hashes, uint64 [n]."""
    return joined_keys(b"".join(block_hash[:HASH_BYTES] for block_hash in hashes))


def joined_keys(joined: bytes) -> Keys:
    """Read hashes as they come on the wire; a last one that is cut off is left out."""
    whole = len(joined) // HASH_BYTES * HASH_BYTES
    keys = np.frombuffer(joined[:whole], dtype="<u8").astype(np.uint64)
    keys[keys == 0] = 1  # 0 is an empty slot
    return keys


@lru_cache(maxsize=2**12)
def grid(num_blocks: int) -> Ints:
    """Return ascending positions that show to a sixteenth how deep a prefix goes, int64 [n].

    They depend on the length only at the end, so that two texts with one beginning have the same.
    """
    parts = [np.arange(min(num_blocks, _PER_OCTAVE))]
    start, stride = _PER_OCTAVE, 1
    while start < num_blocks:
        parts.append(np.arange(start, min(2 * start, num_blocks), stride))
        start, stride = 2 * start, 2 * stride
    found = np.concatenate(parts)
    if num_blocks and found[-1] != num_blocks - 1:
        found = np.append(found, num_blocks - 1)
    found = found.astype(np.int64)
    found.flags.writeable = False
    return found


def _behind_the_deepest(depths: Depths, looked: Ints) -> Ints:
    """Return positions between the end of the deepest prefix and the next one looked at.

    None where many have it: they are as good as each other, whatever it is exactly.
    """
    end = int(depths[1:].max())
    after = int(looked.searchsorted(end))
    if not end or after == len(looked) or looked[after] == end:
        return looked[:0]
    if np.count_nonzero(depths[1:] == end) > _FEW:
        return looked[:0]
    return np.linspace(end, looked[after] - 1, _PER_OCTAVE).astype(np.int64)


@dataclass(slots=True)
class _Lane:
    """A replica in the index."""

    most_blocks: int
    """It can have no more."""
    code: int
    """Its number in the table; another one after each reset."""
    generation: int | None = None


class BlockIndex:
    """Follows the news of replicas, each of which has a lane, and tells how much of a prompt each
    has.

    Not thread-safe; it belongs to one event loop.
    """

    def __init__(self, *, max_blocks: int = 2**21, max_lanes: int = 256, seed: int = 0) -> None:
        """`max_blocks`: hashes that it has room for; of more, some are left out."""
        self.max_lanes = max_lanes
        # After a reset a lane has another code, until the old one is swept out of the table.
        self._table = BlockTable(max_blocks, num_codes=max_lanes + max_lanes // 4 + 8, seed=seed)
        self._free_codes = list(range(self._table.num_codes, 0, -1))
        self._lanes: dict[int, _Lane] = {}
        self._code_of_lane = np.zeros(max_lanes, dtype=np.int64)  # 0: none
        self._pending: list[tuple[Keys, int, bool]] = []
        self._num_pending = 0
        self.num_gaps = 0
        self.num_refused = 0

    # ---- replicas -------------------------------------------------------------------------

    def add_lane(self, *, most_blocks: int = 2**20) -> int:
        """Return the number of a new replica. Raises ValueError where `max_lanes` are taken.

        `most_blocks`: the replica can keep no more; what it claims beyond is not taken in.
        """
        lane = next((number for number in range(self.max_lanes) if number not in self._lanes), None)
        if lane is None:
            raise ValueError(f"the index has room for {self.max_lanes} replicas; all are taken")
        self._lanes[lane] = _Lane(most_blocks, self._take_code())
        self._code_of_lane[lane] = self._lanes[lane].code
        return lane

    def limit_lane(self, lane: int, most_blocks: int) -> None:
        """Take in no more of a replica from now on than it can have."""
        if (found := self._lanes.get(lane)) is not None:
            found.most_blocks = most_blocks

    def remove_lane(self, lane: int) -> None:
        """Forget a replica and what it has."""
        self._retire(self._lanes.pop(lane).code)
        self._code_of_lane[lane] = 0

    def clear_lane(self, lane: int) -> None:
        """Forget what a replica has: it has ended, or its connection. Its next news is a reset."""
        found = self._lanes[lane]
        found.generation = None
        self._renew(lane, found)

    # ---- news -----------------------------------------------------------------------------

    def note(self, lane: int, news: BlocksChanged | BlocksReset) -> bool:
        """Take in a message. False where one is missing before it: ask the replica for a reset.

        Changes are left out until the reset has come. A reset that says what is known already
        changes nothing. Of a lane that was removed nothing is taken in.
        """
        if (found := self._lanes.get(lane)) is None:
            return True
        if isinstance(news, BlocksReset):
            if news.generation != found.generation:
                found.generation = news.generation
                self._renew(lane, found)
                self._add(found, joined_keys(news.kept))
            return True
        if found.generation is None:
            return True  # the reset was asked for, and is on its way
        if news.generation <= found.generation:
            return True  # from before the reset
        if news.generation != found.generation + 1:
            self.num_gaps += 1
            found.generation = None
            return False
        found.generation = news.generation
        self._queue(joined_keys(news.dropped), found.code, is_kept=False)
        self._add(found, joined_keys(news.kept))
        return True

    def _add(self, lane: _Lane, keys: Keys) -> None:
        if self._table.num_pairs_of(lane.code) + len(keys) + self._num_pending > lane.most_blocks:
            self.flush()
            room = max(lane.most_blocks - self._table.num_pairs_of(lane.code), 0)
            self.num_refused += max(len(keys) - room, 0)
            keys = keys[:room]
        self._queue(keys, lane.code, is_kept=True)

    def _queue(self, keys: Keys, code: int, *, is_kept: bool) -> None:
        if not len(keys):
            return
        self._pending.append((keys, code, is_kept))
        self._num_pending += len(keys)
        if self._num_pending >= _FLUSHED_AT:
            self.flush()

    def flush(self) -> None:
        """Enter the news that were put together: many at once take less time."""
        if not self._pending:
            return
        pending, self._pending, self._num_pending = self._pending, [], 0
        keys = np.concatenate([each for each, _, _ in pending])
        sizes = [len(each) for each, _, _ in pending]
        codes = np.repeat(np.array([code for _, code, _ in pending], dtype=np.uint16), sizes)
        kept = np.repeat(np.array([is_kept for _, _, is_kept in pending]), sizes)
        # Of several news of one pair the last one counts.
        pairs = keys ^ (codes.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        _, last = np.unique(pairs[::-1], return_index=True)
        last = len(pairs) - 1 - last
        keys, codes, kept = keys[last], codes[last], kept[last]
        self._table.remove(keys[~kept], codes[~kept])
        self._table.add(keys[kept], codes[kept])
        self._free_codes += self._table.sweep(_SWEPT_SLOTS)

    def _renew(self, lane: int, found: _Lane) -> None:
        self._retire(found.code)
        found.code = self._take_code()
        self._code_of_lane[lane] = found.code

    def _retire(self, code: int) -> None:
        self.flush()
        if self._table.num_pairs_of(code):
            self._table.retire(code)
        else:
            self._free_codes.append(code)

    def _take_code(self) -> int:
        while not self._free_codes:
            self._free_codes += self._table.sweep(self._table.num_slots)
        return self._free_codes.pop()

    # ---- what is known --------------------------------------------------------------------

    def depths(self, keys: Keys, *, is_dense: bool = False) -> Depths:
        """Return how many leading blocks of a text each lane has, int32 [max_lanes].

        `keys`: of the text's blocks. A lane has a prefix if it has its last block: blocks go in the
        order of their last use, those at the end of a text first. Depths are right to a sixteenth;
        the deepest, where few have it, to a 256th. `is_dense`: look at every block, for replicas
        that have single prefixes (checkpoints).
        """
        self.flush()
        depths = np.zeros(self._table.num_codes + 1, dtype=np.int32)
        if len(keys):
            looked = np.arange(len(keys)) if is_dense else grid(len(keys))
            self._table.mark(keys, looked, depths)
            if len(between := _behind_the_deepest(depths, looked)):
                self._table.mark(keys, between, depths)
        return depths[self._code_of_lane]

    @property
    def num_pairs(self) -> int:
        """Pairs of block and replica that are known."""
        return int(sum(self._table.num_pairs_of(lane.code) for lane in self._lanes.values()))

    @property
    def num_lost(self) -> int:
        """Pairs that found no room, since the start."""
        return self._table.num_lost

    @property
    def num_bytes(self) -> int:
        """Size of the arrays; what was never filled takes no memory."""
        return self._table.num_bytes
