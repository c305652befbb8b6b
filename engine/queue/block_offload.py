"""Blocks that leave for a folder on a disk, and what of a text can come back from there.

A text's blocks are read from the cache when its view lets them go, a few in each step, as long as
they are still there. Threads do the rest (`outrider.engine.cache.extent_store`).
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Final

from outrider.engine.cache.block_pool import BlockHash, is_private, prefix_hashes
from outrider.engine.cache.extent_space import About, ExtentSpace, StoredExtent
from outrider.engine.cache.extent_store import ExtentStore
from outrider.engine.cache.kv_view import KVView
from outrider.engine.cache.pin_files import read_pins, remove_pin, write_pin
from outrider.engine.cache.recurrent_lines import BOUNDARY
from outrider.engine.cache.stored_news import StoredNews
from outrider.engine.events import StoreStats
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.protocols import Drafter
from outrider.engine.request import EngineRequest
from outrider.engine.sequences.pinned_prompts import KeptPrompt
from outrider.verifier.params import Tier

RowSeconds = Callable[[str], float | None]
"""Seconds that computing a token takes, by the name of a cache; None where it is not known."""

# Runs that wait to be read from a cache; of more the oldest are dropped.
_MOST_WAITING: Final = 4096
# How long an idle engine sleeps for the disk; commands wait behind it.
_PAUSE_S: Final = 0.003
# The share of the time that reading blocks may take where answers wait for it; and where it is made
# up for later, so many seconds of it: while all fits in the caches, and where blocks are evicted
# soon. There an answer's may be gone with the next one, and computing them takes far longer.
_CALM_PACE: Final = (0.01, 0.0)
_PRESSED_PACE: Final = (0.05, 0.05)
# Extents that a step reads from the caches with nothing else to do, or while blocks are evicted.
_MOST_EXTENTS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Blocks of a text that are to be written as an extent."""

    cache: "StoredCache"
    first: int
    parent: BlockHash
    hashes: tuple[BlockHash, ...]
    owner: str


@dataclass(eq=False, slots=True, kw_only=True)
class StoredCache:
    """A runner's prefix cache and its extents on the disk."""

    name: str
    """large, small or head."""
    runner: ModelRunner
    space: ExtentSpace
    queued: set[BlockHash] = field(default_factory=set)
    """The last hashes of the runs that wait to be written."""

    @property
    def letter(self) -> str:
        """That of the files whose blocks a text can go on behind (`StoredExtent.letter`)."""
        if self.runner.model.config.recurrence is not None:
            return "s"
        return "b" if self.runner.pool.window is None else "w"

    def is_wanted(
        self, stored: StoredExtent, hashes: Sequence[BlockHash], start: int, end: int
    ) -> bool:
        """Return whether the cache holds windowed keys that the extent on the disk lacks."""
        pool = self.runner.pool
        if pool.window is None or stored.letter == "w":
            return False
        blocks = [pool.find(each) for each in hashes[start:end]]
        return all(block is not None and pool.window.has(block) for block in blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorable:
    """What the disk has of a text beyond what the cache has."""

    cache: StoredCache
    root: BlockHash
    token_ids: Sequence[int]
    stored: list[StoredExtent]
    num_held: int
    """Tokens that the cache has."""
    num_tokens: int
    """Tokens that need not be computed then, beyond those."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes to read."""
        return sum(each.num_bytes for each in self.stored)


class BlockOffload:
    """Offloads the prefix caches of an engine's runners to one store."""

    def __init__(
        self, store: ExtentStore, runners: Mapping[Tier, ModelRunner], drafter: Drafter | None
    ) -> None:
        """Raise EngineError where the store's folder cannot be written."""
        self.store = store
        named: dict[str, ModelRunner] = dict(runners.items())
        if drafter is not None and drafter.features is not None:
            named["head"] = drafter.features.runner
        self.caches = {
            name: StoredCache(name=name, runner=runner, space=store.folder.space(_about(runner)))
            for name, runner in named.items()
        }
        spaces = [
            (cache.space, cache.letter) for name, cache in self.caches.items() if name != "head"
        ]
        self.news = StoredNews(spaces, names_key=store.folder.names_key)
        self._waiting: deque[_Run] = deque()
        self._num_dropped = 0
        # When the next extent is due beside passes, by pace.
        self._next_s = dict.fromkeys((_CALM_PACE, _PRESSED_PACE), -math.inf)
        self._restored_tokens = 0
        self._saved_s = 0.0
        store.collect()
        for cache in self.caches.values():
            cache.runner.pool.on_leave = partial(self._note_leaving, cache)

    # ---- out --------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """True if `step` has something to do, now or when there is room."""
        return bool(self._waiting)

    def _note_leaving(
        self, cache: StoredCache, root: BlockHash, hashes: Sequence[BlockHash], owner: str
    ) -> None:
        """Have those blocks of a text written that the disk has not."""
        if is_private(root):
            return
        most, start = cache.runner.extents.blocks_per_extent, 0
        known: list[StoredExtent] = []
        while start < len(hashes):
            found = cache.space.match(hashes, start)
            if found is not None and not cache.is_wanted(found[0], hashes, start, found[1]):
                known.append(found[0])
                start = found[1]
                continue
            end = min((start // most + 1) * most, len(hashes))
            parent = hashes[start - 1] if start else root
            run = _Run(
                cache=cache, first=start, parent=parent, hashes=(*hashes[start:end],), owner=owner
            )
            self._add(run)
            start = end
        self.store.touch(cache.space, known)

    def _add(self, run: _Run) -> None:
        last, queued = run.hashes[-1], run.cache.queued
        if last in queued:
            return
        if len(self._waiting) >= _MOST_WAITING:
            oldest = self._waiting.popleft()
            oldest.cache.queued.discard(oldest.hashes[-1])
            self._num_dropped += 1
        queued.add(last)
        self._waiting.append(run)

    def step(self, row_s: RowSeconds, *, is_idle: bool) -> None:
        """Read what waits from the caches: now and then beside passes, at once where none are.

        `row_s`: what computing a token of a cache's model takes, None where it is not known.
        """
        if self._waiting and is_idle and not self.store.has_room:
            time.sleep(_PAUSE_S)
        for cache in self.caches.values() if self._waiting else ():
            now_s = row_s(cache.name)
            if now_s is not None and not _is_near(now_s, cache.space.about.row_s):
                self.store.note_row_s(cache.space, now_s)
        for _ in range(_MOST_EXTENTS):
            is_due = is_idle or perf_counter() >= self._next_s[self._pace()]
            if not self._waiting or not self.store.has_room or not is_due:
                return
            self._export(self._waiting.popleft())

    def _export(self, run: _Run) -> None:
        begun_s = perf_counter()
        run.cache.queued.discard(run.hashes[-1])
        extents = run.cache.runner.extents.export_blocks(
            run.hashes, first=run.first, parent=run.parent, owner=run.owner
        )
        if not extents:  # evicted meanwhile
            self._num_dropped += 1
        for extent in extents:
            self.store.write(run.cache.space, extent)
        ended_s = perf_counter()
        for (share, burst_s), next_s in self._next_s.items():
            due_s = max(next_s, ended_s - burst_s / share)
            self._next_s[share, burst_s] = due_s + (ended_s - begun_s) / share

    def _pace(self) -> tuple[float, float]:
        is_pressed = any(cache.runner.pool.is_filling for cache in self.caches.values())
        return _PRESSED_PACE if is_pressed else _CALM_PACE

    # ---- named prompts ----------------------------------------------------------------------

    def keep(self, kept: KeptPrompt) -> None:
        """Have a named prompt known after a restart; its blocks are written as all others are."""
        cache, view, request = self.caches[kept.request.tier], kept.view, kept.request
        if is_private(view.root):
            return
        hashes = prefix_hashes(view.root, request.prompt_token_ids, view.pool.block_size)
        until_s = time.time() + kept.pin.ttl_s
        self.store.run(partial(write_pin, cache.space, request, list(hashes), until_s))

    def let_go(self, kept: KeptPrompt) -> None:
        """Have a named prompt forgotten; its blocks stay as all others do."""
        space = self.caches[kept.request.tier].space
        self.store.run(partial(remove_pin, space, kept.request))

    def requests(self) -> list[EngineRequest]:
        """Return what has the prompts kept again that were kept before a restart."""
        spaces = [cache.space for name, cache in self.caches.items() if name != "head"]
        found = [request for space in spaces for request in read_pins(space, time.time())]
        return list({request.request_id: request for request in found}.values())

    # ---- in ---------------------------------------------------------------------------------

    def restorable(
        self, cache: StoredCache, view: KVView, token_ids: Sequence[int]
    ) -> Restorable | None:
        """Return what the disk has of a text beyond the cache; None where that is nothing."""
        size = view.pool.block_size
        if is_private(view.root) or not len(cache.space) or len(token_ids) <= size:
            return None
        hashes = list(prefix_hashes(view.root, token_ids, size))
        held = view.count_cached_tokens(token_ids)
        # Blocks that are cached may lack the windowed keys that a pass needs.
        has_window = view.pool.window is not None
        start = held // size if has_window else sum(1 for _ in _while_found(view, hashes))
        stored: list[StoredExtent] = []
        ends: list[int] = []
        while start < len(hashes) and (found := cache.space.match(hashes, start)) is not None:
            stored.append(found[0])
            ends.append(start := found[1])
        end = _usable_end(stored, ends, cache, view, hashes, len(token_ids))
        num_tokens = min(end * size, len(token_ids) - 1) - held
        if num_tokens <= 0:
            return None
        stored = [each for each in stored if each.first < end]
        if view.line is not None and (state := cache.space.state(hashes[end - 1])):
            stored.append(state)
        return Restorable(
            cache=cache,
            root=view.root,
            token_ids=token_ids,
            stored=stored,
            num_held=held,
            num_tokens=num_tokens,
        )

    def note_restored(self, num_tokens: int, saved_s: float) -> None:
        """Count tokens that came back from the disk, and the seconds that this saved."""
        self._restored_tokens += num_tokens
        self._saved_s += saved_s

    def stats(self) -> StoreStats:
        """Return gauges and counters."""
        counts = self.store.counts
        return StoreStats(
            num_extents=sum(len(each.space) for each in self.caches.values()),
            num_bytes=self.store.folder.num_bytes,
            num_restored_tokens=self._restored_tokens,
            saved_s=self._saved_s,
            num_written_bytes=counts.num_written_bytes,
            num_read_bytes=counts.num_read_bytes,
            num_dropped=counts.num_dropped + self._num_dropped,
            num_failed=counts.num_failed,
            num_damaged=counts.num_damaged,
            bytes_per_s=self.store.measured_bytes_per_s,
        )


def _about(runner: ModelRunner) -> About:
    return About(
        model=runner.model.config.model_id,
        fingerprint=runner.extents.fingerprint,
        block_size=runner.block_size,
    )


def _is_near(one: float, other: float) -> bool:
    return other / 2 < one < other * 2


def _while_found(view: KVView, hashes: Sequence[BlockHash]) -> Iterable[int]:
    for block_hash in hashes:
        if (block := view.pool.find(block_hash)) is None:
            return
        yield block


def _usable_end(
    stored: Sequence[StoredExtent],
    ends: Sequence[int],
    cache: StoredCache,
    view: KVView,
    hashes: Sequence[BlockHash],
    num_tokens: int,
) -> int:
    """Return how many blocks a text of `num_tokens` could go on behind, with what is stored.

    `ends`: where the text parts from each extent.
    """
    pool, size = view.pool, view.pool.block_size
    end = ends[-1] if ends else 0
    if view.line is not None:
        per_state = BOUNDARY // size
        most = min(end, (num_tokens - 1) // size) // per_state * per_state
        ends = range(most, 0, -per_state)
        return next((n for n in ends if cache.space.state(hashes[n - 1])), 0)
    window = pool.window
    if window is None:
        return end
    has_window = [
        *(window.has(block) for block in _while_found(view, hashes)),
        *[False] * len(hashes),
    ]
    for each, last in zip(stored, ends, strict=True):
        if each.letter == "w":
            has_window[each.first : last] = [True] * (last - each.first)
    while end and not all(has_window[window.first_seen(min(end * size, num_tokens - 1)) : end]):
        end -= 1
    return end
