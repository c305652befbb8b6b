"""Requests whose prompt is partly on a disk: they wait here while it is read, the steps go on.

They come when they would start: what was read sooner could be evicted while others are served.

A request waits only where computing those tokens is likely to take longer than reading them, and no
longer than computing them would have taken.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Final

from outrider.engine.cache.extent_store import ExtentStore
from outrider.engine.cache.extents import Extent, ExtentError
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.protocols import Drafter
from outrider.engine.queue.block_offload import BlockOffload, Restorable
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.params import TIERS, Tier

# Copied into the caches in a step while others wait for it.
_BYTES_PER_STEP: Final = 16 * 2**20
# All that waits to be copied, of all requests.
_MOST_BYTES: Final = 512 * 2**20
# A part of a cache's blocks that is left to running answers.
_SPARE_PART: Final = 16
_FIXED_S: Final = 0.002
_LEAST_WAIT_S: Final = 0.05


@dataclass(slots=True, kw_only=True)
class _Text:
    """A text that comes back."""

    restorable: Restorable
    futures: "list[Future[Extent | None]]"
    held: list[int] = field(default_factory=list)
    num_imported: int = 0
    """Extents."""

    @property
    def runner(self) -> ModelRunner:
        return self.restorable.cache.runner

    @property
    def is_done(self) -> bool:
        return self.num_imported == len(self.futures)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Restoring:
    """A sequence that waits."""

    sequence: Sequence
    texts: list[_Text]
    saved_s: float
    """What computing would take."""
    begun_s: float
    num_bytes: int


class RestoreQueue:
    """Reads what the disk has of a sequence's texts before it starts.

    `drafter`: names what would be computed of it beside its own tier. `row_s`: what a token costs,
    by tier.
    """

    def __init__(
        self,
        offload: BlockOffload,
        *,
        drafter: Drafter | None,
        row_s: Callable[[Tier], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.offload = offload
        self._drafter = drafter
        self._row_s = row_s
        self._clock = clock
        self._waiting: dict[str, _Restoring] = {}

    def row_s(self, name: str) -> float | None:
        """Return what computing a token of a cache's model takes; None where it is not known."""
        return next((self._row_s(tier) for tier in TIERS if tier == name), None)

    def __len__(self) -> int:
        """Count how many sequences wait."""
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        """True if a request waits for its blocks."""
        return request_id in self._waiting

    def sequences(self) -> Iterator[Sequence]:
        """The sequences that wait."""
        return (each.sequence for each in self._waiting.values())

    def add(self, sequence: Sequence) -> bool:
        """Begin to read what is worth it; True where there is nothing to wait for."""
        if sequence.was_restored:
            return True
        sequence.was_restored = True
        found = list(self._worthwhile(sequence))
        num_bytes = sum(each.num_bytes for each in found)
        total = num_bytes + sum(each.num_bytes for each in self._waiting.values())
        if not found or total > _MOST_BYTES:
            return True
        store = self.offload.store
        self._waiting[sequence.request_id] = _Restoring(
            sequence=sequence,
            texts=[
                _Text(
                    restorable=each,
                    futures=[store.read(each.cache.space, stored) for stored in each.stored],
                )
                for each in found
            ],
            saved_s=sum(self._saved_s(each) for each in found),
            begun_s=self._clock(),
            num_bytes=num_bytes,
        )
        for each in found:
            store.touch(each.cache.space, each.stored)
        return False

    def _worthwhile(self, sequence: Sequence) -> Iterator[Restorable]:
        """Yield the texts of which reading is likely to be faster than computing."""
        own = (sequence.tier, sequence.view, sequence.cacheable_token_ids)
        others = () if self._drafter is None else self._drafter.texts(sequence)
        for name, view, token_ids in (own, *others):
            cache = self.offload.caches.get(name)
            found = None if cache is None else self.offload.restorable(cache, view, token_ids)
            if found is None:
                continue
            read_s = _FIXED_S + self.offload.store.read_s(found.num_bytes)
            if read_s < self._saved_s(found):
                yield found

    def _saved_s(self, restorable: Restorable) -> float:
        """Return what computing would take: as measured here, or by an earlier engine."""
        cache = restorable.cache
        return (self.row_s(cache.name) or cache.space.about.row_s) * restorable.num_tokens

    def discard(self, request_id: str) -> bool:
        """Forget a request that ended; False if it did not wait."""
        restoring = self._waiting.pop(request_id, None)
        if restoring is None:
            return False
        for text in restoring.texts:
            for future in text.futures:
                future.cancel()
            text.runner.pool.release(reversed(text.held))
        return True

    def take_ready(self, *, is_alone: bool) -> Iterator[tuple[Sequence, None]]:
        """Copy what was read into the caches; yield the sequences that need wait no longer.

        `is_alone`: no other request waits for what is copied.
        """
        left = _MOST_BYTES if is_alone else _BYTES_PER_STEP
        for restoring in list(self._waiting.values()):
            for text in restoring.texts:
                left -= self._import(text, left)
            waited_s = self._clock() - restoring.begun_s
            is_late = waited_s > max(restoring.saved_s, _LEAST_WAIT_S)
            if is_late or all(text.is_done for text in restoring.texts):
                # Now the blocks may be evicted again, but are those that were used last.
                self._count(restoring, waited_s)
                self.discard(restoring.sequence.request_id)
                yield restoring.sequence, None

    def _import(self, text: _Text, most_bytes: int) -> int:
        """Copy the extents that have been read, in order; returns their bytes."""
        num_bytes = 0
        while not text.is_done and num_bytes < most_bytes:
            future = text.futures[text.num_imported]
            if not future.done():
                break
            extent = future.result()
            if extent is None or not self._take_in(text, extent):
                del text.futures[text.num_imported :]  # they cannot be used without it
                break
            text.num_imported += 1
            num_bytes += extent.num_bytes
        return num_bytes

    def _take_in(self, text: _Text, extent: Extent) -> bool:
        """Copy an extent into its cache; False where that has no room, or it is of another text."""
        pool, restorable = text.runner.pool, text.restorable
        spare = pool.num_blocks // _SPARE_PART
        if pool.num_available < len(extent.header.hashes) + spare:
            return False  # answers that run need them
        try:
            text.runner.extents.import_blocks(
                [extent], root=restorable.root, token_ids=restorable.token_ids, keep=text.held
            )
        except ExtentError as error:
            self.offload.store.note_damaged(error)
            return False
        return pool.find(extent.header.hashes[0]) is not None

    def _count(self, restoring: _Restoring, waited_s: float) -> None:
        sequence = restoring.sequence
        for text in restoring.texts:
            if text.restorable.cache.name == sequence.tier:
                num_now = sequence.view.count_cached_tokens(sequence.cacheable_token_ids)
                num_tokens = max(num_now - text.restorable.num_held, 0)
                sequence.num_restored_tokens += num_tokens
                saved_s = self._saved_s(text.restorable) * num_tokens / text.restorable.num_tokens
                self.offload.note_restored(num_tokens, max(saved_s - waited_s, 0.0))

    def pause(self, timeout_s: float) -> None:
        """Wait until an extent was read, but not for long: to be called by an idle engine."""
        texts = (text for each in self._waiting.values() for text in each.texts)
        next_ones = [text.futures[text.num_imported] for text in texts if not text.is_done]
        wait(next_ones[:1], timeout=timeout_s)


def restores_from(
    store: ExtentStore | None,
    runners: Mapping[Tier, ModelRunner],
    drafter: Drafter | None,
    row_s: Callable[[Tier], float | None],
) -> RestoreQueue | None:
    """Return the queue of an engine whose blocks go to a store, if any. Raises EngineError."""
    if store is None:
        return None
    return RestoreQueue(BlockOffload(store, runners, drafter), drafter=drafter, row_s=row_s)
