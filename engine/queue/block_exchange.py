"""Blocks of prompts that other engines have: requests wait here while they come, steps go on.

A request that names a source asks it for the blocks that are missing here, an extent each, in the
text's order. A source that is still computing the text sends each as soon as it is there. What has
come is a prefix hit like any other. Nobody waits longer than computing would have taken.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field, replace
from typing import Final

from outrider.engine.cache.block_pool import BlockHash, is_private, prefix_hashes
from outrider.engine.cache.extents import Extent, ExtentError
from outrider.engine.cache.peers import MOST_WAIT_S, BlocksWanted, PeerError, Peers
from outrider.engine.events import PeerStats
from outrider.engine.parallel.runner import ParallelRunner
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import BlockSource
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.params import Tier

logger = logging.getLogger(__name__)

# Extents of a request that are under way at once, and requests that wait; of more, prompts are
# computed. So what waits in memory is bounded.
_AHEAD: Final = 16
_MOST_WAITING: Final = 32
# Copied into the caches in a step while others wait for it, and otherwise.
_BYTES_PER_STEP: Final = 4 * 2**20
_BYTES_ALONE: Final = 512 * 2**20
# A part of a cache's blocks that is left to running answers.
_SPARE_PART: Final = 16
LEAST_WAIT_S = 0.05  # nobody waits less
_FORGETTING: Final = 0.98  # of the fastest rate, at each request


@dataclass(eq=False, slots=True, kw_only=True)
class _Pull:
    """A sequence whose blocks come."""

    sequence: Sequence
    source: BlockSource
    runner: ModelRunner
    num_held: int
    """Tokens that were here."""
    unasked: deque[BlocksWanted]
    until_s: float
    asked: "deque[tuple[BlocksWanted, Future[list[Extent]]]]" = field(default_factory=deque)
    held: list[int] = field(default_factory=list)
    begun_s: float | None = None
    """When the first extent had come."""
    num_bytes: int = 0
    """Of those behind it."""

    @property
    def is_done(self) -> bool:
        return not self.asked and not self.unasked

    def end(self) -> None:
        """Ask for nothing more."""
        self.unasked.clear()
        for _, future in self.asked:
            future.cancel()
        self.asked.clear()


class BlockExchange:
    """Sends blocks of an engine's caches to others, and takes in theirs.

    `peers`: the lines to other engines; None where nothing is taken in. `row_s`: what computing a
    token takes, by tier, None where it is not known.
    """

    def __init__(
        self,
        runners: Mapping[Tier, ModelRunner],
        peers: Peers | None,
        row_s: Callable[[Tier], float | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runners = runners
        self._peers = peers
        self._row_s = row_s
        self._clock = clock
        self._waiting: dict[str, _Pull] = {}
        self._stats = PeerStats()

    def stats(self) -> PeerStats:
        """Return what was sent and taken in so far."""
        return self._stats

    # ---- out --------------------------------------------------------------------------------

    def export(self, wanted: BlocksWanted) -> list[Extent] | None:
        """Return blocks for another engine; None where the last of them is not there.

        Raises PeerError for blocks of another model, arithmetic or cache.
        """
        runner = self._runners.get(wanted.tier)
        own = "" if runner is None else kv_fingerprint(runner)
        if runner is None or not own or own != wanted.fingerprint:
            raise PeerError(
                f"keys and values of the {wanted.tier} tier are {own or 'not sent from'} here, and "
                f"{wanted.fingerprint or 'nothing'} is wanted: the checkpoint, the arithmetic, the "
                "cache, the release or the processor is another."
            )
        if runner.pool.find(wanted.hashes[-1]) is None:
            return None
        extents = runner.extents.export_blocks(
            wanted.hashes, first=wanted.first, parent=wanted.parent
        )
        self._count(num_sent_bytes=sum(each.num_bytes for each in extents))
        return extents

    # ---- in: the waiting room -------------------------------------------------------------

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
        """Begin to ask for a sequence's blocks; True where there is nothing to wait for."""
        pull = self._begun(sequence)
        if pull is None:
            return True
        self._waiting[sequence.request_id] = pull
        self._ask(pull)
        return False

    def _begun(self, sequence: Sequence) -> _Pull | None:
        source, view = sequence.request.source, sequence.view
        runner = self._runners[sequence.tier]
        if source is None or self._peers is None or is_private(view.root):
            return None
        if len(self._waiting) >= _MOST_WAITING or not kv_fingerprint(runner):
            return None
        token_ids = sequence.cacheable_token_ids
        num_held = view.count_cached_tokens(token_ids)
        num_missing = min(source.num_tokens, len(token_ids)) - num_held
        if num_missing < view.pool.block_size:
            return None
        row_s = self._row_s(sequence.tier)
        wait_s = source.wait_s if row_s is None else row_s * num_missing
        wait_s = min(max(wait_s, LEAST_WAIT_S), MOST_WAIT_S)
        size = view.pool.block_size
        hashes = list(prefix_hashes(view.root, token_ids[: source.num_tokens], size))
        first = num_held // size
        return _Pull(
            sequence=sequence,
            source=source,
            runner=runner,
            num_held=num_held,
            unasked=deque(_runs(runner, sequence.tier, view.root, hashes, first, wait_s)),
            until_s=self._clock() + wait_s,
        )

    def _ask(self, pull: _Pull) -> None:
        assert self._peers is not None, "it has begun"
        while pull.unasked and len(pull.asked) < _AHEAD:
            wanted = pull.unasked.popleft()
            left_s = max(pull.until_s - self._clock(), 0.0)
            wanted = replace(wanted, wait_s=min(left_s, wanted.wait_s))
            pull.asked.append((wanted, self._peers.pull(pull.source.endpoint, wanted)))

    def discard(self, request_id: str) -> bool:
        """Forget a request that ended; False if it did not wait."""
        pull = self._waiting.pop(request_id, None)
        if pull is None:
            return False
        pull.end()
        pull.runner.pool.release(reversed(pull.held))
        return True

    def take_ready(self, *, is_alone: bool) -> Iterator[Sequence]:
        """Copy what came into the caches; yield the sequences that need wait no longer.

        `is_alone`: no other request waits for what is copied.
        """
        left = _BYTES_ALONE if is_alone else _BYTES_PER_STEP
        for pull in list(self._waiting.values()):
            left -= self._import(pull, left)
            self._ask(pull)
            is_late = self._clock() > pull.until_s
            if is_late or pull.is_done:
                self._note_end(pull, is_late=not pull.is_done)
                self.discard(pull.sequence.request_id)
                yield pull.sequence

    def _import(self, pull: _Pull, most_bytes: int) -> int:
        """Copy the extents that have come, in order; returns their bytes."""
        num_bytes = 0
        while pull.asked and num_bytes < most_bytes and pull.asked[0][1].done():
            wanted, future = pull.asked.popleft()
            extents = self._received(wanted, future, pull.source)
            num_bytes += sum(each.num_bytes for each in extents)
            if not extents or not self._take_in(pull, wanted, extents):
                pull.end()  # what follows cannot be used without it
        self._count(num_pulled_bytes=num_bytes)
        self._note_rate(pull, num_bytes)
        return num_bytes

    def _received(
        self, wanted: BlocksWanted, future: "Future[list[Extent]]", source: BlockSource
    ) -> list[Extent]:
        """Return what an engine has sent; nothing where that cannot be used."""
        try:
            extents = future.result()
            if not all(set(each.header.hashes) <= set(wanted.hashes) for each in extents):
                raise ExtentError("of blocks that nobody asked for")
        except ExtentError as error:
            self._note_damaged(source, error)
            return []
        except (PeerError, CancelledError) as error:
            logger.warning("blocks are computed here source=%s reason=%s", source.endpoint, error)
            self._count(num_failed=1)
            return []
        if not extents:
            self._count(num_failed=1)
        return extents

    def _take_in(self, pull: _Pull, wanted: BlocksWanted, extents: list[Extent]) -> bool:
        """Copy extents into the cache; False without room, or where they are of another text."""
        pool, view = pull.runner.pool, pull.sequence.view
        if pool.num_available < len(wanted.hashes) + pool.num_blocks // _SPARE_PART:
            return False  # answers that run need them
        try:
            pull.runner.extents.import_blocks(
                extents,
                root=view.root,
                token_ids=pull.sequence.cacheable_token_ids,
                keep=pull.held,
            )
        except ExtentError as error:
            self._note_damaged(pull.source, error)
            return False
        return pool.find(wanted.hashes[-1]) is not None

    def _note_damaged(self, source: BlockSource, error: ExtentError) -> None:
        logger.warning("blocks are computed here source=%s damaged=%s", source.endpoint, error)
        self._count(num_damaged=1)

    def _note_rate(self, pull: _Pull, num_bytes: int) -> None:
        """Learn how fast blocks come, from those behind a request's first."""
        if not num_bytes:
            return
        if pull.begun_s is None:
            pull.begun_s = self._clock()
        else:
            pull.num_bytes += num_bytes

    def _note_end(self, pull: _Pull, *, is_late: bool) -> None:
        sequence = pull.sequence
        num_now = sequence.view.count_cached_tokens(sequence.cacheable_token_ids)
        num_pulled = max(num_now - pull.num_held, 0)
        sequence.num_pulled_tokens += num_pulled
        self._count(num_pulled_tokens=num_pulled, num_late=int(is_late))
        if pull.begun_s is not None and pull.num_bytes:
            # A source that computes sends no faster than that: the best of late is the line's.
            rate = pull.num_bytes / max(self._clock() - pull.begun_s, 1e-3)
            best = self._stats.bytes_per_s * _FORGETTING
            self._stats = replace(self._stats, bytes_per_s=max(rate, best))

    def _count(self, **more: int) -> None:
        if any(more.values()):
            sums = {name: getattr(self._stats, name) + number for name, number in more.items()}
            self._stats = replace(self._stats, **sums)

    def pause(self, timeout_s: float) -> None:
        """Wait until blocks have come, but not for long: to be called by an idle engine."""
        next_ones = [pull.asked[0][1] for pull in self._waiting.values() if pull.asked]
        wait(next_ones, timeout=timeout_s, return_when="FIRST_COMPLETED")


def kv_fingerprint(runner: ModelRunner) -> str:
    """Return the fingerprint of keys and values that may be sent; empty where they may not.

    From and to a GPU each block would wait for a copy, and of a shared model a device has a part.
    """
    can_be_sent = runner.device.type == "cpu" and not isinstance(runner, ParallelRunner)
    return runner.extents.fingerprint if can_be_sent and runner.prefix_caching else ""


def _runs(
    runner: ModelRunner,
    tier: Tier,
    root: BlockHash,
    hashes: list[BlockHash],
    first: int,
    wait_s: float,
) -> Iterator[BlocksWanted]:
    """Yield what is to be asked for, an extent each, from a block on."""
    most = runner.extents.blocks_per_extent
    while first < len(hashes):
        end = min((first // most + 1) * most, len(hashes))
        yield BlocksWanted(
            tier=tier,
            fingerprint=runner.extents.fingerprint,
            first=first,
            parent=hashes[first - 1] if first else root,
            hashes=tuple(hashes[first:end]),
            wait_s=wait_s,
        )
        first = end
