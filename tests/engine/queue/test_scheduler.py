"""The scheduler without a model: a simulated engine that computes whatever a plan says.

Random arrivals, aborts, tier switches and draft views share tiny pools. Whatever happens: budgets
hold, nobody is planned twice, older goes before younger, every request ends, no block leaks.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.block_pool import BlockPool, OutOfBlocksError, root_hash
from engine.cache.kv_view import KVView
from engine.config import EngineConfig
from engine.protocols import ArrivalOrder, QueuePolicy
from engine.queue.scheduler import PassPlan, Scheduler
from engine.request import EngineRequest, SamplingParams, Tier
from engine.sequences.noise import SequenceNoise
from engine.sequences.sequence import Sequence, SequenceStatus

BLOCK_SIZE = 4
CAPACITY = 40  # tokens that a pool holds, at least


@dataclass
class FakeRunner:
    """A pool and nothing behind it."""

    pool: BlockPool
    prefix_caching: bool = True
    num_copied: int = 0

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        self.num_copied += len(list(pairs))

    def new_view(self, salt: str = "") -> KVView:
        return KVView(self.pool, root=root_hash(salt), prefix_caching=self.prefix_caching)


@dataclass
class FakeDrafter:
    """Holds small blocks for large sequences until somebody wants them."""

    runner: FakeRunner
    views: dict[str, KVView] = field(default_factory=dict)

    def draft(self, sequence: Sequence) -> None:
        view = self.views.setdefault(sequence.request_id, self.runner.new_view())
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
        wanted = self.runner.pool.num_available + num_blocks
        for request_id in reversed(list(self.views)):
            if self.runner.pool.num_available >= wanted:
                return
            self.views.pop(request_id).release()


@dataclass
class Whimsical(QueuePolicy):
    """A queue policy without any order."""

    rng: random.Random

    def order(self, waiting: list[Sequence], now_s: float) -> list[Sequence]:
        return self.rng.sample(waiting, len(waiting))


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
        self.runners = {
            tier: FakeRunner(
                BlockPool(num_blocks=count, block_size=BLOCK_SIZE), prefix_caching=prefix_caching
            )
            for tier, count in num_blocks.items()
        }
        self.drafter = FakeDrafter(self.runners["small"])
        self.scheduler = Scheduler(
            runners=self.runners,  # type: ignore[arg-type]
            config=self.config,
            policy=policy or ArrivalOrder(),
            drafter=self.drafter,  # type: ignore[arg-type]
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
        sampling = SamplingParams(max_tokens=max_tokens)
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            tier=tier,
            sampling=sampling,
            group_id=group_id,
        )
        sequence = Sequence(
            request=request,
            tier=tier,
            view=self.runners[tier].new_view(),
            noise=SequenceNoise(sampling, tier, vocab_size=10),
            submitted_s=0.0,
            token_ids=list(request.prompt_token_ids),
        )
        self.live[request_id] = sequence
        self.scheduler.add(sequence)
        return sequence

    def abort(self, request_id: str) -> None:
        self.scheduler.remove(self.live.pop(request_id))

    def switch(self, request_id: str, tier: Tier) -> None:
        """As `Engine.switch_tier` does, without adopting the old view."""
        sequence = self.live[request_id]
        old_view = sequence.view
        sequence.view = self.runners[tier].new_view()
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
                assert self.runners[tier].pool.ref_count(sequence.view.block_table[index]) == 1
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
            assert steps < max_steps, "somebody never ends"

    def assert_empty(self) -> None:
        assert not self.scheduler.waiting
        assert self.scheduler.num_running == 0
        assert all(runner.pool.num_used == 0 for runner in self.runners.values())


def simulate(*, large: int = 10, small: int = 10, **config: object) -> Simulation:
    return Simulation(
        num_blocks={"large": large, "small": small},
        config=EngineConfig(**{"min_prefill_tokens": 1, **config}),  # type: ignore[arg-type]
    )


@given(
    seed=st.integers(0, 2**32),
    large=st.integers(CAPACITY // BLOCK_SIZE, 16),
    small=st.integers(CAPACITY // BLOCK_SIZE, 16),
    max_tokens_per_step=st.sampled_from([1, 3, 8, 64]),
    max_sequences=st.sampled_from([1, 3, 64]),
    prefix_caching=st.booleans(),
)
@settings(max_examples=150)
def test_whatever_happens_every_request_ends_and_no_block_leaks(
    seed: int,
    large: int,
    small: int,
    max_tokens_per_step: int,
    max_sequences: int,
    prefix_caching: bool,
) -> None:
    rng = random.Random(seed)
    config = EngineConfig(
        max_tokens_per_step=max_tokens_per_step,
        max_sequences=max_sequences,
        min_prefill_tokens=1,
        prefill_chunk_s=rng.choice([1e-9, 1.0]),
    )
    simulation = Simulation(
        num_blocks={"large": large, "small": small},
        config=config,
        prefix_caching=prefix_caching,
        policy=Whimsical(rng) if rng.random() < 0.5 else None,
    )
    expected: set[str] = set()
    for number in range(rng.randrange(1, 16)):
        for _ in range(rng.choice([0, 0, 1, 3])):
            simulation.step()
        prompt_length = rng.randrange(1, CAPACITY - 2)
        simulation.submit(
            str(number),
            [rng.choice([1, 1, 2]) for _ in range(prompt_length)],
            tier=rng.choice(["large", "small"]),
            max_tokens=rng.randrange(1, CAPACITY - prompt_length + 1),
            group_id=rng.choice([None, None, "group"]),
        )
        expected.add(str(number))
        if rng.random() < 0.2:
            simulation.scheduler.note_pass("large", num_rows=64, elapsed_s=rng.random())
        if simulation.live and rng.random() < 0.25:
            victim = rng.choice(sorted(simulation.live))
            simulation.abort(victim)
            expected.discard(victim)
        if simulation.live and rng.random() < 0.4:
            moved = rng.choice(sorted(simulation.live))
            other: Tier = "small" if simulation.live[moved].tier == "large" else "large"
            simulation.switch(moved, other)
    simulation.run()
    assert sorted(expected) == sorted(set(simulation.finished) & expected)
    simulation.assert_empty()


@given(seed=st.integers(0, 2**32), blocks=st.integers(CAPACITY // BLOCK_SIZE, 14))
@settings(max_examples=60)
def test_equals_start_and_end_in_the_order_of_arrival(seed: int, blocks: int) -> None:
    rng = random.Random(seed)
    simulation = simulate(large=blocks, max_tokens_per_step=rng.choice([4, 16, 64]))
    length, max_tokens = rng.randrange(1, 20), rng.randrange(1, 20)
    for number in range(8):
        # Different prompts of one length: neither luck with the cache nor size decides.
        simulation.submit(f"{number}", [number] * length, max_tokens=max_tokens)
        if rng.random() < 0.5:
            simulation.step()
    simulation.run()
    assert simulation.started == sorted(simulation.started)
    assert simulation.finished == sorted(simulation.finished)


def test_decode_goes_first_and_prefill_takes_what_is_left() -> None:
    simulation = simulate(large=40, max_tokens_per_step=8)
    for number in range(3):
        simulation.submit(f"d{number}", [number], max_tokens=30)
        simulation.step()
    simulation.submit("long", [9] * 30, max_tokens=2)
    plan = simulation.scheduler.plan("large", 0.0)
    assert [s.request_id for s in plan.decodes] == ["d0", "d1", "d2"]
    assert [(s.request_id, count) for s, count in plan.prefills] == [("long", 5)]


def test_a_second_prompt_takes_the_rest_of_the_budget() -> None:
    simulation = simulate(large=40, max_tokens_per_step=10)
    simulation.submit("a", [1] * 6)
    simulation.submit("b", [2] * 6)
    simulation.submit("c", [3] * 6)
    plan = simulation.scheduler.plan("large", 0.0)
    assert [(s.request_id, count) for s, count in plan.prefills] == [("a", 6), ("b", 4)]


def test_prefill_is_bounded_by_time_while_somebody_decodes() -> None:
    simulation = simulate(
        large=200, max_tokens_per_step=500, prefill_chunk_s=0.1, min_prefill_tokens=16
    )
    simulation.scheduler.note_pass("large", num_rows=100, elapsed_s=0.2)  # 2 ms a row
    simulation.submit("a", [1] * 300)
    assert simulation.scheduler.plan("large", 0.0).prefills[0][1] == 300  # nobody waits
    simulation = simulate(
        large=200, max_tokens_per_step=500, prefill_chunk_s=0.1, min_prefill_tokens=16
    )
    simulation.submit("d", [7], max_tokens=9)
    simulation.step()
    simulation.submit("a", [1] * 300)
    simulation.scheduler.note_pass("large", num_rows=100, elapsed_s=0.2)
    assert simulation.scheduler.plan("large", 0.0).prefills[0][1] == 49  # and one row decodes
    for _ in range(50):
        simulation.scheduler.note_pass("large", num_rows=100, elapsed_s=20.0)
    assert simulation.scheduler.plan("large", 0.0).prefills[0][1] == 15  # at least the least


def test_a_small_pass_says_nothing_about_the_cost_of_a_row() -> None:
    simulation = simulate(large=200, max_tokens_per_step=500, prefill_chunk_s=0.1)
    simulation.submit("d", [7], max_tokens=9)
    simulation.step()
    simulation.scheduler.note_pass("large", num_rows=2, elapsed_s=2.0)
    simulation.submit("a", [1] * 300)
    assert simulation.scheduler.plan("large", 0.0).prefills[0][1] == 300


def test_later_small_passes_take_no_prefill() -> None:
    simulation = simulate()
    simulation.submit("a", [1, 2], tier="small")
    simulation.step()
    simulation.submit("b", [3, 4], tier="small")
    plan = simulation.scheduler.plan("small", 0.0, with_prefill=False)
    assert [s.request_id for s in plan.decodes] == ["a"]
    assert plan.prefills == []


def test_drafts_go_before_answers() -> None:
    simulation = simulate(large=10, small=10)
    simulation.submit("large", [1] * 28, max_tokens=8)
    simulation.step()
    simulation.step()
    assert simulation.runners["small"].pool.num_used == 8  # the draft view
    simulation.submit("small", [2] * 20, tier="small", max_tokens=12)
    simulation.step()
    assert "large" not in simulation.drafter.views or (
        simulation.drafter.views["large"].num_computed_tokens < 28
    )
    assert simulation.scheduler.running["small"]
    simulation.run()
    assert simulation.scheduler.counters["small"].num_preemptions == 0
    simulation.assert_empty()


def test_a_running_answer_takes_blocks_from_drafts_too() -> None:
    simulation = simulate(large=10, small=10)
    small = simulation.submit("small", [2] * 4, tier="small", max_tokens=32)
    simulation.step()
    simulation.submit("large", [1] * 26, max_tokens=10)
    simulation.run()
    assert small.num_preemptions == 0
    assert set(simulation.finished) == {"small", "large"}
    simulation.assert_empty()


def test_choices_of_one_request_wait_for_its_prompt() -> None:
    simulation = simulate(large=30, max_tokens_per_step=8)
    for number in range(3):
        simulation.submit(f"{number}", [5] * 18, group_id="g")
    simulation.submit("other", [6] * 3)
    simulation.step()
    simulation.step()
    assert simulation.started == ["0"]  # the others wait, and the budget is used up
    simulation.step()
    assert simulation.started == ["0", "1", "2", "other"]  # together, not one after the other
    simulation.run()
    counters = simulation.scheduler.counters["large"]
    # 18 tokens once, 2 tokens beyond the full blocks twice, 3 of the other
    assert counters.num_prompt_tokens == 18 + 2 * 2 + 3
    assert counters.prefix_cache_hits == 2 * 16
    assert counters.prefix_cache_queries == 3 * 18 + 3


def test_choices_wait_even_where_there_is_room_for_all() -> None:
    simulation = simulate(large=30)
    for number in range(3):
        simulation.submit(f"{number}", [5] * 18, group_id="g")
    simulation.submit("other", [6] * 3)
    simulation.step()
    assert simulation.started == ["0", "other"]
    simulation.step()
    assert simulation.started == ["0", "other", "1", "2"]
    simulation.run()


def test_a_choice_whose_leader_leaves_starts_by_itself() -> None:
    simulation = simulate(large=30, max_tokens_per_step=4)
    for number in range(2):
        simulation.submit(f"{number}", [5] * 18, group_id="g")
    simulation.step()
    simulation.abort("0")
    simulation.run()
    assert simulation.finished == ["1"]


def test_max_sequences_counts_both_tiers() -> None:
    simulation = simulate(large=30, small=30, max_sequences=3)
    for number in range(4):
        simulation.submit(f"l{number}", [number])
        simulation.submit(f"s{number}", [number], tier="small")
    simulation.step()
    assert simulation.scheduler.num_running == 3
    simulation.run()


class LatestFirst(QueuePolicy):
    def order(self, waiting: list[Sequence], now_s: float) -> list[Sequence]:
        return sorted(waiting, key=lambda sequence: -sequence.arrival_number)


def test_who_gives_way_and_starts_again_in_one_plan_is_planned_once() -> None:
    simulation = Simulation(
        num_blocks={"large": 40, "small": 10},
        config=EngineConfig(max_tokens_per_step=28),
        policy=LatestFirst(),
    )
    old = simulation.submit("old", [1] * 24, max_tokens=9)
    middle = simulation.submit("middle", [2] * 16, max_tokens=9)
    latest = simulation.submit("latest", [3] * 4, max_tokens=9)
    simulation.step()  # the latest two start; the oldest has 16 tokens to go
    pool = simulation.runners["large"].pool
    elsewhere = [pool.allocate() for _ in range(pool.num_available - 2)]
    # Both decode into the last two blocks, then the prompt takes theirs; the short one fits again.
    plan = simulation.scheduler.plan("large", 0.0)
    assert (middle.num_preemptions, latest.num_preemptions) == (1, 1)
    assert plan.decodes == []
    assert [sequence for sequence, _ in plan.prefills] == [old, latest]
    pool.release(elsewhere)
    simulation.check(plan, "large")
    simulation.compute(plan)
    simulation.run()
    simulation.assert_empty()


def test_pressure_leaves_the_oldest_alone() -> None:
    simulation = simulate(large=10)
    sequences = [simulation.submit(f"{n}", [n] * 6, max_tokens=30) for n in range(4)]
    simulation.run()
    preemptions = [sequence.num_preemptions for sequence in sequences]
    assert preemptions[0] == 0
    assert sum(preemptions) > 0
    assert simulation.scheduler.counters["large"].num_preemptions == sum(preemptions)
    simulation.assert_empty()


@pytest.mark.parametrize("status", ["waiting", "prefilling", "decoding"])
def test_removing_frees_blocks_at_once(status: str) -> None:
    simulation = simulate(large=10, max_tokens_per_step=4)
    simulation.submit("a", [1] * 8, max_tokens=9)
    if status != "waiting":
        simulation.step()
    if status == "decoding":
        simulation.step()
        simulation.step()
    held = simulation.runners["large"].pool.num_used
    assert (held == 0) == (status == "waiting")
    simulation.abort("a")
    simulation.assert_empty()


def test_a_shared_block_is_copied_when_the_prefix_hit_ends_inside_it() -> None:
    simulation = simulate(large=20)
    owner = simulation.submit("owner", [1] * 8, max_tokens=20)
    simulation.step()
    simulation.submit("other", [1] * 8, max_tokens=4)
    simulation.step()
    assert simulation.runners["large"].num_copied == 1
    other = simulation.live["other"]
    assert other.view.block_table[0] == owner.view.block_table[0]
    assert other.view.block_table[1] != owner.view.block_table[1]
