"""Placement by what replicas have in their prefix caches, and by their work: both in seconds."""

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.engine.cache.block_pool import PRIVATE_SALT, prefix_hashes, prefix_root
from outrider.engine.events import TierInfo
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.fleet.block_index import BlockIndex, Depths, block_keys, grid
from outrider.gateway.engines.fleet.block_table import Ints, Keys
from outrider.gateway.engines.fleet.replica_placement import (
    CachedElsewhere,
    Floats,
    Loads,
    least,
)
from outrider.verifier.params import Tier

_PLACED_S: Final = 60.0
MOVE_S: Final = 0.005
"""To ask another replica for blocks, and to take in what it sends."""
_MOST_PLACED: Final = 2**14
_TRUST_WEIGHT: Final = 0.25
# Prompts on their way to one replica for which its cache counts, and beyond that by the mean.
_ALWAYS_COUNTED: Final = 8
_COUNTED_BY_MEAN: Final = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """A request whose prompt is on its way."""

    lane: int
    claimed: int
    """Prompt tokens that the replica is said to have."""
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
        *,
        tiers: Mapping[Tier, TierInfo] | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tiers`: of the replicas whose caches are to be hit; see `note_tiers`."""
        self.index = index
        self._tiers: dict[Tier, TierInfo] = dict(tiers or {})
        self._rng = random.Random(seed)
        self._clock = clock
        self._placed: OrderedDict[str, _Placed] = OrderedDict()
        self._num_placed = np.zeros(index.max_lanes, dtype=np.int64)  # by lane
        self._latest_of_key: dict[int, _Placed] = {}
        self._trust = np.ones(index.max_lanes)

    def note_tiers(self, tiers: Mapping[Tier, TierInfo]) -> None:
        """Hear which models replicas have: blocks of other ones are not looked for from now on."""
        self._tiers.update(tiers)

    def choose(self, request: EngineRequest, candidates: Loads) -> int:
        """Return the candidate that would have computed the rest of the prompt first."""
        return self.place(request, self.keys(request), candidates)

    def keys(self, request: EngineRequest) -> Keys:
        """Return the blocks of a request's text as engines hash them; none where they have none.

        About a microsecond a block, in proportion to the prompt.
        """
        tier = self._tiers.get(request.tier)
        if tier is None or not tier.block_size or request.adapter(request.tier) is not None:
            return block_keys(())
        token_ids = request.prompt_token_ids + (request.resumed_token_ids or ())
        root = prefix_root(tier.numerics, tier.kv_dtype, request.cache_salt)
        return block_keys(tuple(prefix_hashes(root, token_ids, tier.block_size)))

    def place(self, request: EngineRequest, keys: Keys, candidates: Loads) -> int:
        """Return the candidate for a request with these blocks, and note that it goes there."""
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
        seconds = candidates.work_s(num_tokens - counted)
        source = self._source(request, known, num_tokens)
        moving_s = None if source is None else _moving_s(candidates, counted, source, num_tokens)
        chosen = least(seconds if moving_s is None else np.minimum(seconds, moving_s), self._rng)
        if moving_s is None or seconds[chosen] <= moving_s[chosen]:
            source = None
        self._note(
            request.request_id,
            _Placed(
                lane=int(lanes[chosen]),
                claimed=int(claimed[chosen]) if source is None else source.num_tokens,
                hit=int(hits[chosen]) if source is None else source.num_tokens,
                keys=placed_keys,
                until_s=now_s + _PLACED_S,
                source=source,
            ),
        )
        return chosen

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
            lane = placed.lane if placed.source is None else placed.source.lane
            ratio = min(num_cached_tokens / placed.claimed, 1.0)
            self._trust[lane] += _TRUST_WEIGHT * (ratio - self._trust[lane])

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


def _moving_s(
    candidates: Loads, counted: Floats, source: CachedElsewhere, num_tokens: int
) -> Floats:
    """Return the seconds until a prompt is computed behind blocks that came from a source, [n].

    inf where it is not ahead, or nothing comes.
    """
    num_moved = source.num_tokens - counted
    moved_s: Floats = np.full(len(candidates), np.inf)
    np.multiply(num_moved, candidates.moved_token_s, out=moved_s, where=num_moved > 0)
    moved_s += candidates.work_s(num_tokens - source.num_tokens) + MOVE_S
    return moved_s
