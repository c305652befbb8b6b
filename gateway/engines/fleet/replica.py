"""One engine of a pool: its client, its requests, and what is known of its load."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final, Protocol

from outrider.engine.config import EngineRole
from outrider.engine.errors import EngineError
from outrider.engine.events import EngineInfo, EngineStats, TierInfo
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.engines.fleet.replica_placement import LoadBoard, ReplicaLoad
from outrider.verifier.params import Tier

_FORGETTING: Final = 1.02  # of the fastest pace, at each snapshot
_FIRST_BYTES_PER_S: Final = 500e6  # until blocks have come from another engine, or a disk


class OtherModelsError(EngineError):
    """A replica has other models than the pool that it was to join."""

    code = "other_models"


class ReplicaProcess(Protocol):
    """The process at the other end of an engine client."""

    @property
    def generation(self) -> str:
        """Another one for each process; that of the last one while none is connected."""

    @property
    def is_draining(self) -> bool:
        """Whether it has said that it will end."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """The work that an engine had done at some time."""

    num_tokens: int
    num_steps: int
    busy_s: float

    @classmethod
    def of(cls, stats: EngineStats) -> "_Sample":
        return cls(
            sum(tier.num_computed_tokens + tier.num_output_tokens for tier in stats.tiers.values()),
            stats.num_steps,
            stats.step_host_s + stats.step_forward_s,
        )


class EngineReplica:
    """An engine client with a name. Belongs to one pool and one event loop.

    is_leaving: the pool is about to close it. is_held: its group drains (`EnginePool.drain`).
    `refusal`: why the pool does not use it. `info`: its models, None before the pool has taken it
    in.
    """

    def __init__(
        self,
        name: str,
        client: EngineClient,
        *,
        index_lane: int = 0,
        process: ReplicaProcess | None = None,
        endpoint: str = "",
    ) -> None:
        """`index_lane`: its number in the `BlockIndex`.

        `process`: None where an engine that is lost has died. `endpoint`: where other engines reach
        it; empty where none can.
        """
        self.name = name
        self.client = client
        self.endpoint = endpoint
        self.is_leaving = False
        self.is_held = False
        self._distrusted: tuple[str | None] | None = None  # the process that is
        self._process = process
        self.refusal: EngineError | None = None
        self.info: EngineInfo | None = None
        self.starting: asyncio.Task[None] | None = None
        self.num_requests = 0
        self._uncomputed: dict[str, int] = {}  # prompt tokens, by request; 0 once computed
        self._num_uncomputed = 0
        self._num_computed_requests = 0
        self._num_of_others = 0  # requests of other gateways
        self._load = ReplicaLoad(replica_id=name, index_lane=index_lane)
        self._board: LoadBoard | None = None
        self.column = 0
        self._sample: _Sample | None = None
        self._prompt_token_s: float | None = None
        self._bytes_per_s = _FIRST_BYTES_PER_S
        self._stored_bytes_per_s = _FIRST_BYTES_PER_S

    def take_info(self, info: EngineInfo) -> None:
        """Take in what it is; so its load says from the first request on what moved blocks cost."""
        self.info, self.refusal = info, None
        self._note_load()

    @property
    def is_up(self) -> bool:
        """True if it serves requests."""
        return self.info is not None and self.refusal is None and self.client.is_ready

    @property
    def is_draining(self) -> bool:
        """True if it takes no new requests, though it may be up."""
        return self.is_leaving or self.is_held or self.is_distrusted

    @property
    def is_distrusted(self) -> bool:
        """True if its answers are wrong, as far as its process was not started anew since."""
        return self._distrusted == (self.generation,)

    def distrust(self) -> None:
        """Have its process take no new requests."""
        self._distrusted = (self.generation,)

    def trust(self) -> None:
        """Take `distrust` back."""
        self._distrusted = None

    @property
    def role(self) -> EngineRole:
        """Its part among the others; `both` before the pool has taken it in."""
        return "both" if self.info is None else self.info.role

    @property
    def group(self) -> str:
        """A name for its models and their arithmetic: answers go on only within a group.

        Empty before the pool has taken it in.
        """
        if self.info is None:
            return ""
        tiers = sorted(self.info.tiers.items())
        said = "\n".join(f"{tier} {_numerics(info)}" for tier, info in tiers)
        return blake2b(said.encode(), digest_size=6).hexdigest()

    @property
    def num_blocks(self) -> int:
        """Blocks of its caches; 0 where that is not known."""
        return 0 if self.info is None else sum(own.num_blocks for own in self.info.tiers.values())

    @property
    def generation(self) -> str | None:
        """The process that it is; None where that cannot be told."""
        return None if self._process is None else self._process.generation

    def has_said_goodbye(self, generation: str | None) -> bool:
        """Return whether the process of this generation had said that it will end."""
        process = self._process
        return process is not None and process.is_draining and process.generation == generation

    @property
    def num_in_flight(self) -> int:
        """Count how many of the pool's requests it has."""
        return len(self._uncomputed)

    def serves(self, request: EngineRequest, numerics: Mapping[Tier, str]) -> bool:
        """Return whether it has the tiers that a request needs, with the numerics wanted."""
        if self.info is None:
            return False
        tiers = self.info.tiers
        return all(tier in tiers for tier in needed_tiers(request)) and all(
            _numerics(tiers[tier]) == wanted for tier, wanted in numerics.items()
        )

    def has_context_for(self, request: EngineRequest) -> bool:
        """Return whether a request that it serves fits into its context."""
        assert self.info is not None
        return num_tokens(request) <= self.info.tiers[request.tier].max_context

    def moved_token_s(self, tier: Tier) -> float:
        """Return what a token's keys and values take to come from another engine; inf: never do."""
        info = None if self.info is None else self.info.tiers.get(tier)
        if info is None or not (self.endpoint and info.kv_fingerprint and info.kv_token_bytes):
            return math.inf
        return info.kv_token_bytes / self._bytes_per_s

    # ---- load -----------------------------------------------------------------------------

    def join(self, board: LoadBoard) -> None:
        """Have its load kept on a board, in the column that is `column` from now on."""
        self._board, self.column = board, board.add(self._load)

    def leave(self) -> None:
        """Take its load off the board."""
        if self._board is not None:
            self._board.remove(self.column)
            self._board = None

    @property
    def load(self) -> ReplicaLoad:
        """Return its load: of this gateway's requests now, and of others' at its last snapshot."""
        return self._load

    def begin(self, request_id: str, num_uncached_tokens: int) -> None:
        """Note a request that is sent here."""
        self._uncomputed[request_id] = num_uncached_tokens
        self._num_uncomputed += num_uncached_tokens
        self._num_computed_requests += num_uncached_tokens == 0
        self.num_requests += 1
        self._note_load()

    def note_computed(self, request_id: str) -> None:
        """Note that a request's prompt is computed; a second time does nothing."""
        if num_tokens := self._uncomputed.get(request_id):
            self._uncomputed[request_id] = 0
            self._num_uncomputed -= num_tokens
            self._num_computed_requests += 1
            self._note_load()

    def end(self, request_id: str) -> None:
        """Note that a request has ended, or has left."""
        self.note_computed(request_id)
        if self._uncomputed.pop(request_id, None) is not None:
            self._num_computed_requests -= 1
            self._note_load()

    def _note_load(self) -> None:
        self._load = replace(
            self._load,
            num_queued_prompt_tokens=self._num_uncomputed,
            num_running=self._num_computed_requests + self._num_of_others,
            seconds_per_moved_token=self._slowest_moved_token_s(),
            seconds_per_stored_token=self._slowest_stored_token_s(),
        )
        if self._board is not None:
            self._board.put(self.column, self._load)

    def _slowest_moved_token_s(self) -> float:
        tiers = () if self.info is None else self.info.tiers
        return max(map(self.moved_token_s, tiers), default=math.inf)

    def _slowest_stored_token_s(self) -> float:
        tiers = () if self.info is None else self.info.tiers.values()
        most_bytes = max((own.kv_token_bytes for own in tiers), default=0.0)
        return most_bytes / self._stored_bytes_per_s if most_bytes else math.inf

    def note_stats(self, stats: EngineStats) -> None:
        """Take in a snapshot: how fast it is, and how much it does for other gateways."""
        num_there = sum(tier.num_running + tier.num_waiting for tier in stats.tiers.values())
        self._num_of_others = max(num_there - self.num_in_flight, 0)
        self._bytes_per_s = stats.peers.bytes_per_s or self._bytes_per_s
        self._stored_bytes_per_s = stats.store.bytes_per_s or self._stored_bytes_per_s
        before, self._sample = self._sample, _Sample.of(stats)
        if before is not None and self._sample.num_steps > before.num_steps:
            self._note_pace(before, self._sample)
        self._note_load()

    def _note_pace(self, before: _Sample, now: _Sample) -> None:
        busy_s = max(now.busy_s - before.busy_s, 0.0)
        if not busy_s:
            return
        token_s = busy_s / max(now.num_tokens - before.num_tokens, 1)
        # A token's mean time, over prompts and answers, is no less than that of a prompt's token:
        # the least of late is nearest to it.
        best_s = token_s if self._prompt_token_s is None else self._prompt_token_s * _FORGETTING
        self._prompt_token_s = min(token_s, best_s)
        self._load = replace(
            self._load,
            seconds_per_output_token=busy_s / (now.num_steps - before.num_steps),
            seconds_per_prompt_token=self._prompt_token_s,
        )


def num_tokens(request: EngineRequest) -> int:
    """Return the length that a request may come to."""
    return len(request.prompt_token_ids) + request.sampling.max_tokens


def needed_tiers(request: EngineRequest) -> tuple[Tier, ...]:
    """Return the tiers that must be in one engine for a request.

    A cascade judges every token by both models, and so does who verifies it. Any other answer needs
    its own tier only; where it is escalated to one that its engine lacks, another engine goes on.
    """
    return ("small", "large") if request.needs_both_models else (request.tier,)


def numerics_of(info: EngineInfo, request: EngineRequest) -> dict[Tier, str]:
    """Return the fingerprints of the arithmetic that a request's answer depends on, by tier."""
    return {tier: _numerics(info.tiers[tier]) for tier in needed_tiers(request)}


def _numerics(info: TierInfo) -> str:
    return f"{info.numerics} {info.kv_dtype}"
