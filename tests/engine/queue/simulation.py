"""A simulated engine without a model: it computes whatever the scheduler plans. Needs no torch."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from outrider.engine.cache.block_pool import BlockPool, OutOfBlocksError, root_hash
from outrider.engine.cache.kv_view import KVView
from outrider.engine.config import EngineConfig
from outrider.engine.queue.policy import ArrivalOrder, QueuePolicy
from outrider.engine.queue.scheduler import PassPlan, Scheduler
from outrider.engine.request import EngineRequest
from outrider.engine.sequences.sequence import Sequence, SequenceStatus
from outrider.verifier.params import SamplingParams, Tier

BLOCK_SIZE = 4
CAPACITY = 40  # tokens that a pool holds, at least


@dataclass
class FakeCache:
    """A pool without keys and values."""

    pool: BlockPool
    prefix_caching: bool = True
    num_copied: int = 0

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        self.num_copied += len(list(pairs))

    def new_view(self, salt: str = "") -> KVView:
        return KVView(self.pool, root=root_hash(salt), prefix_caching=self.prefix_caching)


@dataclass
class FakeDrafter:
    """Holds small blocks for large sequences until they are reclaimed."""

    cache: FakeCache
    views: dict[str, KVView] = field(default_factory=dict)
    features: None = None

    def draft(self, sequence: Sequence) -> None:
        view = self.views.setdefault(sequence.request_id, self.cache.new_view())
        try:
            view.reserve(len(sequence.token_ids))
        except OutOfBlocksError:
            return
        view.advance(len(sequence.token_ids), sequence.token_ids)

    def release(self, sequence: Sequence) -> None:
        view = self.views.pop(sequence.request_id, None)
        if view is not None:
            view.release()

    def reclaim(self, num_blocks: int) -> None:
        wanted = self.cache.pool.num_available + num_blocks
        for request_id in reversed(list(self.views)):
            if self.cache.pool.num_available >= wanted:
                return
            self.views.pop(request_id).release()


@dataclass
class Whimsical(QueuePolicy):
    """A queue policy without any order."""

    rng: random.Random

    def order(self, waiting: list[Sequence], now_s: float) -> list[Sequence]:
        return self.rng.sample(waiting, len(waiting))


def new_sequence(request: EngineRequest, cache: FakeCache, *, submitted_s: float = 0.0) -> Sequence:
    """A sequence that chooses no tokens, and so needs no noise, whose tensors torch makes."""
    return Sequence(
        request=request,
        tier=request.tier,
        view=cache.new_view(),
        noise=cast("Any", None),
        submitted_s=submitted_s,
        token_ids=list(request.prompt_token_ids),
    )


class Simulation:
    """Plays the engine's part: submits, computes plans, finishes."""

    def __init__(
        self,
        *,
        num_blocks: dict[Tier, int],
        config: EngineConfig | None = None,
        prefix_caching: bool = True,
        policy: QueuePolicy | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.caches = {
            tier: FakeCache(
                BlockPool(num_blocks=count, block_size=BLOCK_SIZE), prefix_caching=prefix_caching
            )
            for tier, count in num_blocks.items()
        }
        self.drafter = FakeDrafter(self.caches["small"])
        self.scheduler = Scheduler(
            caches=self.caches,
            config=self.config,
            policy=policy or ArrivalOrder(),
            drafts=self.drafter,
        )
        self.live: dict[str, Sequence] = {}
        self.finished: list[str] = []
        self.started: list[str] = []
        self.num_rows: list[int] = []

    def submit(
        self,
        request_id: str,
        prompt: Iterable[int],
        *,
        tier: Tier = "large",
        max_tokens: int = 6,
        group_id: str | None = None,
    ) -> Sequence:
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            tier=tier,
            sampling=SamplingParams(max_tokens=max_tokens),
            group_id=group_id,
        )
        sequence = new_sequence(request, self.caches[tier])
        self.live[request_id] = sequence
        self.scheduler.add(sequence)
        return sequence

    def abort(self, request_id: str) -> None:
        self.scheduler.remove(self.live.pop(request_id))

    def switch(self, request_id: str, tier: Tier) -> None:
        """As `Engine.switch_tier` does, without adopting the old view."""
        sequence = self.live[request_id]
        old_view = sequence.view
        sequence.view = self.caches[tier].new_view()
        self.scheduler.remove(sequence)
        del sequence.token_ids[sequence.num_prompt_tokens :]
        sequence.tier = tier
        old_view.release()
        self.scheduler.add(sequence)

    def step(self) -> None:
        for tier in ("large", "small"):
            plan = self.scheduler.plan(tier, 0.0)
            self.check(plan, tier)
            self.compute(plan)
        for sequence in self.scheduler.running["large"]:
            if sequence.is_decoding:
                self.drafter.draft(sequence)

    def check(self, plan: PassPlan, tier: Tier) -> None:
        planned = [*plan.decodes, *(sequence for sequence, _ in plan.prefills)]
        assert len({sequence.request_id for sequence in planned}) == len(planned), "planned twice"
        num_rows = len(plan.decodes) + sum(count for _, count in plan.prefills)
        if plan.prefills:
            assert num_rows <= self.config.max_tokens_per_step
        self.num_rows.append(num_rows)
        assert self.scheduler.num_running <= self.config.max_sequences
        for sequence, count in [(s, 1) for s in plan.decodes] + plan.prefills:
            assert sequence.tier == tier
            assert sequence.status is SequenceStatus.RUNNING
            assert sequence in self.scheduler.running[tier]
            assert 0 < count <= sequence.num_uncomputed_tokens
            end = sequence.view.num_computed_tokens + count
            assert len(sequence.view.block_table) * BLOCK_SIZE >= end, "slots are not reserved"
            written = range(sequence.view.num_computed_tokens // BLOCK_SIZE, -(-end // BLOCK_SIZE))
            for index in written:
                assert self.caches[tier].pool.ref_count(sequence.view.block_table[index]) == 1
        for sequence, _ in plan.prefills:
            if sequence.request_id not in self.started:
                self.started.append(sequence.request_id)

    def compute(self, plan: PassPlan) -> None:
        for sequence, count in [(s, 1) for s in plan.decodes] + plan.prefills:
            sequence.view.advance(sequence.view.num_computed_tokens + count, sequence.token_ids)
            if sequence.num_uncomputed_tokens == 0:
                sequence.token_ids.append(1)
                if sequence.num_remaining_tokens == 0:
                    self.scheduler.remove(sequence)
                    del self.live[sequence.request_id]
                    self.finished.append(sequence.request_id)

    def run(self, max_steps: int = 2000) -> None:
        steps = 0
        while self.live:
            self.step()
            steps += 1
            assert steps < max_steps, "a sequence never ends"

    def assert_empty(self) -> None:
        assert not self.scheduler.waiting
        assert self.scheduler.num_running == 0
        assert all(cache.pool.num_used == 0 for cache in self.caches.values())


def simulate(*, large: int = 10, small: int = 10, **config: Any) -> Simulation:
    return Simulation(
        num_blocks={"large": large, "small": small},
        config=EngineConfig(**{"min_prefill_tokens": 1, **config}),
    )
