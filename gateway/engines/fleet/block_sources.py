"""Where the blocks of a request's prompt come from, if not from the replica that answers.

Another replica may have them, or a prefill replica computes them: where that is over sooner, and
the readers of all answers together wait less.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from outrider.engine.cache.block_pool import PRIVATE_SALT
from outrider.engine.request import BlockSource, EngineRequest, SpeculationParams
from outrider.gateway.engines.fleet.cache_aware import MOVE_S
from outrider.gateway.engines.fleet.replica import EngineReplica
from outrider.gateway.engines.fleet.replica_placement import LoadBoard, Placement, ReplicaLoad
from outrider.verifier.params import SamplingParams

LEAST_TOKENS: Final = 64
"""Fewer are computed in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where blocks come from. `prompt`: what a prefill replica is to compute for that."""

    blocks: BlockSource
    replica: EngineReplica
    prompt: EngineRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A replica and what a prompt would be to it."""

    load: ReplicaLoad
    num_tokens: int
    """Of the prompt, that its cache has not."""

    @property
    def own_s(self) -> float:
        """Seconds that these tokens alone take."""
        return self.num_tokens * self.load.seconds_per_prompt_token

    @property
    def until_s(self) -> float:
        """Seconds until they are computed: behind what is queued, beside what is written."""
        load = self.load
        queued_s = load.num_queued_prompt_tokens * load.seconds_per_prompt_token
        return queued_s + self.own_s + load.num_running * load.seconds_per_output_token


def pays_apart(here: Work, there: Work, moved_s: float) -> bool:
    """Return whether a prompt computed `there` costs readers less than one computed `here`.

    The answers that are written here wait while a prompt is computed, or its blocks are copied in.
    What is moved is moved while the rest is computed, so the slower of both counts.
    """
    num_readers = here.load.num_running
    apart_s = max(there.until_s, moved_s) + MOVE_S + num_readers * moved_s
    return apart_s < here.until_s + num_readers * here.own_s


class BlockSources:
    """Finds the source of requests' blocks among a pool's replicas."""

    def __init__(
        self, replicas: Mapping[str, EngineReplica], board: LoadBoard, placement: Placement
    ) -> None:
        """`replicas` are the pool's, which may change; `board` has their loads."""
        self._replicas = replicas
        self._board = board
        self._placement = placement

    def find(
        self, request: EngineRequest, target: EngineReplica, *, may_prefill: bool
    ) -> Source | None:
        """Return the source for a request that was placed at a replica; None to compute there.

        `may_prefill`: another replica may compute the prompt.
        """
        if not may_move(request) or not _fingerprint(target, request):
            return None
        found = self._cached(request, target)
        if found is None and may_prefill and target.role == "decode":
            found = self._apart(request, target)
        return found

    def _cached(self, request: EngineRequest, target: EngineReplica) -> Source | None:
        """Return the replica that the placement counts on, which has the blocks."""
        source = self._placement.source(request.request_id)
        if source is None:
            return None
        replica = next(
            (each for each in self._replicas.values() if each.load.index_lane == source.lane), None
        )
        if replica is None or replica is target or replica.is_distrusted:
            return None
        if not _can_send(replica, target, request):
            return None
        return self._source(request, target, replica, source.num_tokens)

    def _apart(self, request: EngineRequest, target: EngineReplica) -> Source | None:
        """Return the prefill replica that is to compute the prompt, where that pays."""
        able = [
            each
            for each in self._replicas.values()
            if each.role == "prefill"
            and each.is_up
            and not each.is_draining
            and each is not target
            and _can_send(each, target, request)
            and each.has_context_for(request)
        ]
        num_tokens = _num_tokens(request)
        here = Work(load=target.load, num_tokens=num_tokens - self._hit(request))
        if not able or here.num_tokens < LEAST_TOKENS:
            return None
        prompt = prompt_of(request)
        columns = np.array([each.column for each in able], dtype=np.int64)
        chosen = able[self._placement.choose(prompt, self._board.take(columns))]
        there = Work(load=chosen.load, num_tokens=max(num_tokens - self._hit(prompt), 1))
        if not pays_apart(here, there, here.num_tokens * target.moved_token_s(request.tier)):
            self._placement.note_end(prompt.request_id)
            return None
        found = self._source(request, target, chosen, num_tokens)
        return replace(found, prompt=prompt)

    def _hit(self, request: EngineRequest) -> int:
        return self._placement.expected_hit(request.request_id)

    def _source(
        self,
        request: EngineRequest,
        target: EngineReplica,
        replica: EngineReplica,
        num_tokens: int,
    ) -> Source:
        wait_s = num_tokens * target.load.seconds_per_prompt_token
        blocks = BlockSource(endpoint=replica.endpoint, num_tokens=num_tokens, wait_s=wait_s)
        return Source(blocks=blocks, replica=replica)


def may_move(request: EngineRequest) -> bool:
    """Return whether a request's blocks may come from another engine: no private one's.

    What an adapter has computed is not looked for, and a prompt whose own tokens are judged is
    computed whole.
    """
    is_judged = request.sampling.num_prompt_logprobs is not None or request.verification is not None
    is_private = request.cache_salt.startswith(PRIVATE_SALT)
    return not (is_private or is_judged) and request.adapter(request.tier) is None


def prompt_of(request: EngineRequest) -> EngineRequest:
    """Return the request that has an engine compute a request's text, and say nothing."""
    return replace(
        request,
        request_id=f"{request.request_id}/prompt",
        prompt_token_ids=request.prompt_token_ids + (request.resumed_token_ids or ()),
        resumed_token_ids=None,
        retracted_token_ids=(),
        prediction_token_ids=(),
        sampling=SamplingParams(max_tokens=0),
        speculation=SpeculationParams(enabled=False),
        group_id=None,
        grammar=None,
        cascade=None,
        may_escalate=False,
        return_hidden_state=False,
        traces=False,
        source=None,
    )


def _num_tokens(request: EngineRequest) -> int:
    return len(request.prompt_token_ids) + len(request.resumed_token_ids or ())


def _fingerprint(replica: EngineReplica, request: EngineRequest) -> str:
    info = None if replica.info is None else replica.info.tiers.get(request.tier)
    return "" if info is None or not replica.endpoint else info.kv_fingerprint


def _can_send(source: EngineReplica, target: EngineReplica, request: EngineRequest) -> bool:
    return _fingerprint(source, request) == _fingerprint(target, request)
