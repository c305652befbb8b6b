"""Conversations of a replica that drains: others take their blocks before the next turn comes.

The gateway remembers the texts of late answers, never private ones, in a bounded memory. Where a
replica is about to go, the one that the placement would choose for such a text pulls its blocks,
if that is sooner than computing them, and computes nothing.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, Protocol, cast
from uuid import uuid4

from outrider.engine.errors import EngineError
from outrider.engine.events import EngineEvent, Finished
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.fleet.block_sources import LEAST_TOKENS, Source, may_move
from outrider.gateway.engines.fleet.candidates import Wanted
from outrider.gateway.engines.fleet.replica import EngineReplica
from outrider.gateway.engines.fleet.replica_attempt import ReplicaAttempt
from outrider.verifier.params import SamplingParams, Tier

logger = logging.getLogger(__name__)

RECENT_S: Final = 600.0
"""A conversation whose last answer is older is not handed over."""
MOST_TEXTS: Final = 256
MOST_BYTES: Final = 2**24
_AT_ONCE: Final = 4
_LOOK_S: Final = 0.2  # between two looks for replicas that drain


class HandoverFleet(Protocol):
    """A pool, as handovers see it."""

    async def place(self, wanted: Wanted) -> EngineReplica | None:
        """Choose the replica for a request; None where there is none now."""

    def find_source(
        self, request: EngineRequest, replica: EngineReplica, *, may_prefill: bool
    ) -> Source | None:
        """Return where the replica that a request was placed at gets its blocks from, if any."""

    def note_departure(self, request_id: str) -> None:
        """Hear that a request is no longer at its replica."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Text:
    """A conversation as it was after its last answer."""

    replica: str
    tier: Tier
    cache_salt: str
    tenant: str
    token_ids: bytes
    prompt: bytes
    """Its beginning that was asked with: the next turn's prompt begins so, too."""
    at_s: float

    @property
    def num_bytes(self) -> int:
        return len(self.token_ids) + len(self.prompt)

    def is_continued_by(self, later: "_Text") -> bool:
        """Return whether another text is a later turn of this one."""
        is_same = (self.tier, self.cache_salt) == (later.tier, later.cache_salt)
        return is_same and later.token_ids.startswith(self.prompt)

    def request(self) -> EngineRequest:
        """Return the request of nobody that stands for it."""
        token_ids = array("I")
        token_ids.frombytes(self.token_ids)
        return EngineRequest(
            request_id=f"handover-{uuid4().hex}",
            prompt_token_ids=tuple(token_ids),
            tier=self.tier,
            sampling=SamplingParams(max_tokens=0),
            cache_salt=self.cache_salt,
            tenant=self.tenant,
        )


class Handovers:
    """Remembers a pool's late conversations, and has those of replicas that drain handed over."""

    def __init__(self, replicas: Mapping[str, EngineReplica], fleet: HandoverFleet) -> None:
        """`replicas` are the pool's, which may change."""
        self._replicas = replicas
        self._fleet = fleet
        self._texts: list[_Text] = []  # the oldest first
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self.num_moved = 0

    def __len__(self) -> int:
        """Count the conversations that are remembered."""
        return len(self._texts)

    async def close(self) -> None:
        """Forget all conversations. May be called again."""
        self._texts.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def keep(self, attempt: ReplicaAttempt, token_ids: Sequence[int]) -> None:
        """Take in a whole answer: its conversation may be handed over."""
        request = attempt.request
        num_tokens = len(request.prompt_token_ids) + len(token_ids)
        is_alone = len(self._replicas) < 2
        if is_alone or num_tokens < LEAST_TOKENS or not may_move(request):
            return
        prompt = array("I", request.prompt_token_ids).tobytes()
        self._add(
            _Text(
                replica=attempt.replica.name,
                tier=request.tier,
                cache_salt=request.cache_salt,
                tenant=request.tenant,
                token_ids=prompt + array("I", token_ids).tobytes(),
                prompt=prompt,
                at_s=time.monotonic(),
            )
        )
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(), name="handovers")

    def _add(self, text: _Text) -> None:
        self._texts = [each for each in self._texts if not each.is_continued_by(text)]
        self._texts.append(text)
        num_bytes = sum(each.num_bytes for each in self._texts)
        while len(self._texts) > MOST_TEXTS or num_bytes > MOST_BYTES:
            num_bytes -= self._texts.pop(0).num_bytes

    async def _watch(self) -> None:
        """Hand over what replicas have that drain, until no conversation is left."""
        while self._texts:
            oldest_s = time.monotonic() - RECENT_S
            self._texts = [each for each in self._texts if each.at_s > oldest_s]
            for replica in [each for each in self._replicas.values() if is_leaving(each)]:
                await self.hand_over(replica)
            await asyncio.sleep(_LOOK_S)

    async def hand_over(self, replica: EngineReplica) -> None:
        """Have others take a replica's conversations, the last ones first; wait for all of it."""
        async with self._lock:
            while texts := [each for each in self._texts if each.replica == replica.name]:
                some = texts[-_AT_ONCE:]
                self._texts = [each for each in self._texts if each not in some]
                await asyncio.gather(*(self._move(each, replica) for each in reversed(some)))

    async def _move(self, text: _Text, replica: EngineReplica) -> None:
        """Have the replica pull a text's blocks that would get its next turn, where that pays."""
        request = text.request()
        target = await self._fleet.place(Wanted(request=request, refused=frozenset((replica,))))
        if target is None:
            return
        try:
            source = self._fleet.find_source(request, target, may_prefill=False)
            if source is not None and await _has_pulled(request, source, target):
                self.num_moved += 1
                logger.info("conversation is handed over from=%s to=%s", replica.name, target.name)
                if not is_leaving(target):
                    self._add(replace(text, replica=target.name))
        finally:
            self._fleet.note_departure(request.request_id)


def is_leaving(replica: EngineReplica) -> bool:
    """Return whether a replica takes nothing new, and its blocks are as good as ever."""
    if replica.is_distrusted:
        return False
    return replica.is_draining or replica.has_said_goodbye(replica.generation)


async def _has_pulled(request: EngineRequest, source: Source, target: EngineReplica) -> bool:
    """Have a replica pull blocks; return whether it has gone about it to the end."""
    pulling = replace(request, source=replace(source.blocks, is_only=True))
    stream = cast("AsyncGenerator[EngineEvent, None]", target.client.submit(pulling))
    last: EngineEvent | None = None
    try:
        async with aclosing(stream) as events:
            async for event in events:
                last = event
    except EngineError as error:
        logger.info("conversation is not handed over to=%s reason=%s", target.name, error)
    return isinstance(last, Finished)
