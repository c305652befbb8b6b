"""Publishes an engine's prefix cache in vLLM's format, for routers that place requests by it.

The format is that of vLLM 0.24 and later (vllm/distributed/kv_events.py): a ZeroMQ PUB socket sends
(topic, sequence number in 8 bytes, big-endian, msgpack of [time, events, rank]), where an event is
a map with its name under "type". A ROUTER socket sends again, to those that ask with a sequence
number, (number, msgpack) from there on, and at the end (-1, nothing). Private texts are left out.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import zmq

from outrider.engine.cache.block_news import BlockChanges, KeptBlock
from outrider.engine.cache.block_pool import BlockHash, is_private, prefix_root
from outrider.engine.errors import EngineError
from outrider.engine.events import TierInfo
from outrider.gateway.engines.backends.fleet_keys import FleetKeys, guard, start_guard

logger = logging.getLogger(__name__)

_MEDIUM: Final = "GPU"  # their word for the memory that the model computes with
_MOST_QUEUED: Final = 10_000
_MOST_REPLAYED: Final = 10_000
_END: Final = (-1).to_bytes(8, "big", signed=True)


class _Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of the events: maps by field name."""


class BlockStored(_Event, frozen=True):
    """Blocks that follow each other."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """The block before them; None at the start of a text."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...]] | None = None
    """For each block what its hash covers beside the text, as for tenants and adapters."""


class BlockRemoved(_Event, frozen=True):
    """Blocks that are gone."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event, frozen=True):
    """No block is kept: the engine has just started."""


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of a step."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = 0


class KvEventPublisher:
    """Sends from a thread of its own; `publish` only queues.

    A subscriber that is slow loses messages, and can ask for the last ones again. Where the queue
    is full, messages are left out; the numbers show no gap then, so `AllBlocksCleared` comes first.
    """

    def __init__(
        self,
        tier: TierInfo,
        *,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        keys: FleetKeys | None = None,
    ) -> None:
        """Take the addresses. Raises EngineError naming one that cannot be taken.

        `keys`: subscribers need the fleet's.
        """
        self._model = tier.tier
        self._block_size = tier.block_size
        self._plain_root = prefix_root(tier.numerics, tier.kv_dtype, "")
        self._topic = topic.encode()
        self._stored: set[BlockHash] = set()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=_MOST_REPLAYED)
        self._number = 0
        self._queue: queue.Queue[BlockChanges | None] = queue.Queue(maxsize=_MOST_QUEUED)
        self._was_full = True  # what was published before this engine is void
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._keys = keys
        self._guard = None if keys is None else start_guard(self._context, keys)
        try:
            self._pub = self._bound(zmq.PUB, "kv_events", endpoint)
            self._replay = (
                None
                if replay_endpoint is None
                else self._bound(zmq.ROUTER, "kv_events_replay", replay_endpoint)
            )
        except EngineError:
            self._release(linger_ms=0)
            raise
        logger.info(
            "prefix cache is published endpoints=%s keys=%s",
            ",".join(self.endpoints),
            "no" if keys is None else "yes",
        )
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, setting: str, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        if self._keys is not None:
            guard(socket, self._keys)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise EngineError(
                f"engine.{setting}={endpoint!r} cannot be taken ({error}); give a free address "
                "such as tcp://*:5557 or tcp://127.0.0.1:5557."
            ) from error
        return socket

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Return the addresses that were taken, with their ports."""
        sockets = (self._pub, self._replay)
        return tuple(
            each.getsockopt_string(zmq.LAST_ENDPOINT) for each in sockets if each is not None
        )

    def publish(self, changes: BlockChanges) -> None:
        """Queue the changes of a step; never waits."""
        try:
            self._queue.put_nowait(changes)
        except queue.Full:
            self._was_full = True

    def close(self) -> None:
        """Send what is queued and give the addresses back."""
        self._queue.put(None)
        self._thread.join()
        self._release(linger_ms=500)

    def _release(self, *, linger_ms: int) -> None:
        if self._guard is not None:
            self._guard.stop()
        self._context.destroy(linger=linger_ms)

    # In its thread.

    def _run(self) -> None:
        while True:
            try:
                changes = self._queue.get(timeout=0.05)
                if changes is None:
                    return
                self._send(changes)
            except queue.Empty:
                pass
            except Exception:
                logger.exception("events of the prefix cache could not be published")
            self._answer_replays()

    def _send(self, changes: BlockChanges) -> None:
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        if self._was_full:
            self._was_full = False
            self._stored.clear()
            events.append(AllBlocksCleared())
        dropped = [each for each in changes.dropped if each in self._stored]
        if dropped:
            events.append(BlockRemoved([_number(each) for each in dropped], _MEDIUM))
            self._stored.difference_update(dropped)
        own = [each for each in changes.kept if self._is_told(each)]
        self._stored.update(each.block_hash for each in own)
        events += [self._event(run) for run in _runs(own)]
        if not events:
            return
        payload = self._encoder.encode(KvEventBatch(time.time(), events))
        self._pub.send_multipart((self._topic, self._number.to_bytes(8, "big"), payload))
        self._sent.append((self._number, payload))
        self._number += 1

    def _is_told(self, block: KeptBlock) -> bool:
        return block.model == self._model and bool(block.token_ids) and not is_private(block.root)

    def _event(self, run: Sequence[KeptBlock]) -> BlockStored:
        first = run[0]
        is_plain = first.root == self._plain_root
        return BlockStored(
            block_hashes=[_number(each.block_hash) for each in run],
            parent_block_hash=None if first.parent == first.root else _number(first.parent),
            token_ids=[token_id for each in run for token_id in each.token_ids],
            block_size=self._block_size,
            lora_id=None,
            medium=_MEDIUM,
            lora_name=None,
            extra_keys=None if is_plain else [(first.root.hex(),)] * len(run),
        )

    def _answer_replays(self) -> None:
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            client, empty, start = frames
            first = int.from_bytes(start, "big")
            for number, payload in self._sent:
                if number >= first:
                    self._replay.send_multipart((client, empty, number.to_bytes(8, "big"), payload))
            self._replay.send_multipart((client, empty, _END, b""))


def _runs(blocks: Sequence[KeptBlock]) -> Iterator[list[KeptBlock]]:
    """Yield the blocks in groups that follow each other in one text."""
    run: list[KeptBlock] = []
    for block in blocks:
        if run and block.parent != run[-1].block_hash:
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _number(block_hash: BlockHash) -> int:
    return int.from_bytes(block_hash[:8], "big")
