"""Placement by what replicas have in their prefix caches, and by their work: both in seconds."""

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from outrider.engine.cache.block_pool import (
    PRIVATE_SALT,
    BlockHash,
    prefix_hashes,
    prefix_root,
)
from outrider.engine.events import TierInfo
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.wire import BlocksChanged, BlocksReset
from outrider.gateway.engines.fleet.block_index import BlockIndex, Depths, block_keys, grid
from outrider.gateway.engines.fleet.block_table import Ints, Keys
from outrider.gateway.engines.fleet.replica_placement import (
    CachedElsewhere,
    Floats,
    Loads,
    least,
)
from outrider.gateway.engines.fleet.stored_index import StoredIndex
from outrider.verifier.params import Tier

_PLACED_S: Final = 60.0
MOVE_S: Final = 0.005
"""To ask another replica for blocks, or a disk, and to take in what comes."""
_MOST_PLACED: Final = 2**14
_TRUST_WEIGHT: Final = 0.25
# Prompts on their way to one replica for which its cache counts, and beyond that by the mean.
_ALWAYS_COUNTED: Final = 8
_COUNTED_BY_MEAN: Final = 2.0
# The ways in which a prompt's beginning comes; the first is from the cache.
_BY_DISK: Final = 1
_BY_PEER: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """A request whose prompt is on its way."""

    lane: int
    trust: Floats
    """Of all lanes, for what this one is to have; this is where `claimed` is judged."""
    trusted_lane: int
    claimed: int
    """Prompt tokens that a replica is said to have."""
    hit: int
    """Prompt tokens that it is trusted with."""
    keys: tuple[int, ...]
    """Keys of its text, at the places of `grid`."""
    until_s: float
    source: CachedElsewhere | None
    """Where the replica is to get what the hit has beyond its own cache."""


class CacheAware:
    """The replica that would have computed the prompt first, with the prefix that it has already.

    A conversation follows its blocks by itself. A hot prefix cannot sink a replica: when its queue
    is longer than computing the prefix takes elsewhere, another replica computes it, and has it
    from then on; and of prompts on their way its cache counts for a bounded number. What replicas
    are said to have is measured by what they turn out to have had (`note_prefill`), so one that
    lies loses its credit. Requests with an adapter are placed by work alone.
    """

    def __init__(
        self,
        index: BlockIndex,
        stored: StoredIndex | None = None,
        *,
        tiers: Mapping[Tier, TierInfo] | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stored`: of what is on disks, which counts for nothing without one.

        `tiers`: of the replicas whose caches are to be hit; see `note_tiers`.
        """
        self.index = index
        self._stored = stored
        self._tiers: dict[Tier, TierInfo] = dict(tiers or {})
        self._rng = random.Random(seed)
        self._clock = clock
        self._placed: OrderedDict[str, _Placed] = OrderedDict()
        self._num_placed = np.zeros(index.max_lanes, dtype=np.int64)  # by lane
        self._latest_of_key: dict[int, _Placed] = {}
        self._trust = np.ones(index.max_lanes)
        self._stored_trust = np.ones(index.max_lanes)

    def note_news(self, lane: int, news: BlocksChanged | BlocksReset) -> bool:
        """Take in a replica's message. False where one is missing before it: ask for a reset."""
        is_known = self.index.note(lane, news)
        if is_known and self._stored is not None:
            self._stored.note(lane, news)
        return is_known

    def clear_lane(self, lane: int) -> None:
        """Forget what a replica has: it has ended, or its connection."""
        self.index.clear_lane(lane)
        if self._stored is not None:
            self._stored.clear_lane(lane)

    def remove_lane(self, lane: int) -> None:
        """Forget a replica."""
        self.index.remove_lane(lane)
        if self._stored is not None:
            self._stored.remove_lane(lane)

    def note_tiers(self, tiers: Mapping[Tier, TierInfo]) -> None:
        """Hear which models replicas have: blocks of other ones are not looked for from now on."""
        self._tiers.update(tiers)

    def choose(self, request: EngineRequest, candidates: Loads) -> int:
        """Return the candidate that would have computed the rest of the prompt first."""
        hashes = self.hashes(request)
        return self.place(request, block_keys(hashes), candidates, hashes)

    def hashes(self, request: EngineRequest) -> tuple[BlockHash, ...]:
        """Return the blocks of a request's text as engines hash them; none where they have none.

        About a microsecond a block, in proportion to the prompt.
        """
        tier = self._tiers.get(request.tier)
        if tier is None or not tier.block_size or request.adapter(request.tier) is not None:
            return ()
        token_ids = request.prompt_token_ids + (request.resumed_token_ids or ())
        root = prefix_root(tier.numerics, tier.kv_dtype, request.cache_salt)
        return tuple(prefix_hashes(root, token_ids, tier.block_size))

    def place(
        self,
        request: EngineRequest,
        keys: Keys,
        candidates: Loads,
        hashes: Sequence[BlockHash] = (),
    ) -> int:
        """Return the candidate for a request with these blocks, and note that it goes there.

        `hashes`: of the blocks, where what is on disks is to count.
        """
        now_s = self._clock()
        self._forget_old(now_s)
        num_tokens = len(request.prompt_token_ids) + len(request.resumed_token_ids or ())
        lanes = candidates.lanes
        places = grid(len(keys))
        placed_keys = tuple(keys[places].tolist())
        known = self._known_depths(request.tier, keys)
        depths = self._soon(request.tier, known, places, placed_keys)[lanes]
        claimed = np.minimum(depths, num_tokens - 1.0)
        hits = claimed * self._trust[lanes]
        most = _ALWAYS_COUNTED + _COUNTED_BY_MEAN * len(self._placed) / len(candidates)
        counted = hits * (self._num_placed[lanes] <= most)
        stored = np.minimum(self._stored_depths(request, hashes)[lanes], num_tokens - 1.0)
        on_disk = stored * self._stored_trust[lanes]
        source = self._source(request, known, num_tokens)
        seconds = _seconds(candidates, counted, on_disk, source, num_tokens)
        soonest = seconds.min(axis=0)
        chosen = least(soonest, self._rng)
        placed = _Placed(
            lane=int(lanes[chosen]),
            trust=self._trust,
            trusted_lane=int(lanes[chosen]),
            claimed=int(claimed[chosen]),
            hit=int(hits[chosen]),
            keys=placed_keys,
            until_s=now_s + _PLACED_S,
            source=None,
        )
        way = int(seconds[:, chosen].argmin())
        if way == _BY_DISK:
            placed = replace(
                placed,
                trust=self._stored_trust,
                claimed=int(stored[chosen]),
                hit=int(on_disk[chosen]),
            )
        elif way == _BY_PEER and source is not None:
            num_there = source.num_tokens
            placed = replace(
                placed, trusted_lane=source.lane, claimed=num_there, hit=num_there, source=source
            )
        self._note(request.request_id, placed)
        return chosen

    def _stored_depths(self, request: EngineRequest, hashes: Sequence[BlockHash]) -> Depths:
        """Return how many tokens of a text each lane has on its disk, [max_lanes]."""
        if self._stored is None or not hashes or request.cache_salt.startswith(PRIVATE_SALT):
            return np.zeros(self.index.max_lanes, dtype=np.int32)
        info = self._tiers[request.tier]
        every = info.checkpoint_tokens // info.block_size or 1
        return self._stored.depths(hashes, every=every) * np.int32(info.block_size)

    def _source(
        self, request: EngineRequest, known: Depths, num_tokens: int
    ) -> CachedElsewhere | None:
        """Return the replica that has most of a text, as far as it is trusted; None without one."""
        if request.cache_salt.startswith(PRIVATE_SALT):
            return None
        trusted = np.minimum(known, num_tokens - 1) * self._trust
        lane = int(trusted.argmax())
        best = int(trusted[lane])
        return CachedElsewhere(lane=lane, num_tokens=best) if best else None

    def _known_depths(self, tier: Tier, keys: Keys) -> Depths:
        """Return how many blocks of a text each lane has, [max_lanes]."""
        if not len(keys):
            return np.zeros(self.index.max_lanes, dtype=np.int32)
        info = self._tiers[tier]
        if info.checkpoint_tokens:
            every = info.checkpoint_tokens // info.block_size
            depths = self.index.depths(keys[every - 1 :: every], is_dense=True) * every
        else:
            depths = self.index.depths(keys)
        return depths * np.int32(info.block_size)

    def _soon(
        self, tier: Tier, known: Depths, places: Ints, placed_keys: tuple[int, ...]
    ) -> Depths:
        """Return how many tokens of a text each lane has or will have soon, [max_lanes]."""
        if not placed_keys or not self._latest_of_key:
            return known
        depths, block_size = known.copy(), self._tiers[tier].block_size
        latest = map(self._latest_of_key.get, placed_keys)
        for place, placed in zip(places.tolist(), latest, strict=True):
            if placed is not None and depths[placed.lane] <= place * block_size:
                depths[placed.lane] = (place + 1) * block_size
        return depths

    # ---- requests on their way ------------------------------------------------------------

    def expected_hit(self, request_id: str) -> int:
        """Return how many prompt tokens the chosen replica should have in its cache."""
        placed = self._placed.get(request_id)
        return 0 if placed is None else placed.hit

    def source(self, request_id: str) -> CachedElsewhere | None:
        """Return where the chosen replica should get blocks from; None where it should compute."""
        placed = self._placed.get(request_id)
        return None if placed is None else placed.source

    def note_prefill(self, request_id: str, num_cached_tokens: int) -> None:
        """Compare what the cache had, or was sent, with what it was said to have.

        Of a replica that has promised blocks and sends none, nobody expects any later.
        """
        placed = self._forget(request_id)
        if placed is not None and placed.claimed:
            trust, lane = placed.trust, placed.trusted_lane
            ratio = min(num_cached_tokens / placed.claimed, 1.0)
            trust[lane] += _TRUST_WEIGHT * (ratio - trust[lane])

    def note_end(self, request_id: str) -> None:
        """Forget a request that ended before its prompt was computed."""
        self._forget(request_id)

    def _note(self, request_id: str, placed: _Placed) -> None:
        self._forget(request_id)
        if len(self._placed) >= _MOST_PLACED:
            self._forget(next(iter(self._placed)))
        self._placed[request_id] = placed
        self._num_placed[placed.lane] += 1
        self._latest_of_key.update(dict.fromkeys(placed.keys, placed))

    def _forget(self, request_id: str) -> _Placed | None:
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return None
        self._num_placed[placed.lane] -= 1
        for key in placed.keys:
            if self._latest_of_key.get(key) is placed:
                del self._latest_of_key[key]
        return placed

    def _forget_old(self, now_s: float) -> None:
        while self._placed:
            request_id, placed = next(iter(self._placed.items()))
            if placed.until_s > now_s:
                break
            self._forget(request_id)


def _seconds(
    candidates: Loads,
    counted: Floats,
    on_disk: Floats,
    source: CachedElsewhere | None,
    num_tokens: int,
) -> Floats:
    """Return the seconds until a prompt is computed, [3, n]: by the way its beginning comes.

    From the candidate's cache alone, or beyond that from its disk or from the source.
    """
    seconds: Floats = np.full((3, len(candidates)), np.inf)
    seconds[0] = candidates.work_s(num_tokens - counted)
    if on_disk.any():
        token_s = candidates.stored_token_s
        seconds[_BY_DISK] = _fetched_s(candidates, counted, on_disk, token_s, num_tokens)
    if source is not None:
        there = np.full(len(candidates), float(source.num_tokens))
        token_s = candidates.moved_token_s
        seconds[_BY_PEER] = _fetched_s(candidates, counted, there, token_s, num_tokens)
    return seconds


def _fetched_s(
    candidates: Loads, counted: Floats, there: Floats, token_s: Floats, num_tokens: int
) -> Floats:
    """Return the seconds until a prompt is computed behind blocks that came from somewhere, [n].

    `there`: tokens of the prompt whose blocks are there; `token_s`: what one takes to come. inf
    where they are no more than the `counted` ones in the cache, or nothing comes.
    """
    num_fetched = there - counted
    fetched_s: Floats = np.full(len(candidates), np.inf)
    np.multiply(num_fetched, token_s, out=fetched_s, where=num_fetched > 0)
    fetched_s += candidates.work_s(num_tokens - there) + MOVE_S
    return fetched_s
