"""The scheduler without a model: a simulated engine that computes whatever a plan says.

Random arrivals, aborts, tier switches and draft views share tiny pools. Whatever happens: budgets
hold, no sequence is planned twice, older goes before younger, every request ends, no block leaks.
"""

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.config import EngineConfig
from outrider.engine.queue.policy import QueuePolicy
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.params import Tier
from tests.engine.queue.simulation import BLOCK_SIZE, CAPACITY, Simulation, Whimsical, simulate


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


def test_prefill_is_bounded_by_time_while_others_decode() -> None:
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
    simulation.submit("a", [1] * 300)  # as many rows as where nothing is known, and one decodes
    assert simulation.scheduler.plan("large", 0.0).prefills[0][1] == 255


@pytest.mark.parametrize("row_s", [1e-5, 1e-3, 16e-3])
def test_no_pass_of_a_long_prompt_takes_much_longer_than_its_budget(row_s: float) -> None:
    """Nothing is known at first, and rows get dearer with their context."""
    simulation = simulate(large=5000, max_tokens_per_step=2048)
    simulation.submit("a", [1] * 4095)
    scheduler, times = simulation.scheduler, []
    while not times or scheduler.running["large"][0].num_prefill_tokens > 1:
        plan = scheduler.plan("large", 0.0)
        ((sequence, num_rows),) = plan.prefills
        context = sequence.view.num_computed_tokens + num_rows / 2
        times.append(num_rows * row_s * (1 + context / 2000))
        scheduler.note_pass("large", num_rows=num_rows, elapsed_s=times[-1])
        scheduler.note_prefills(plan)
    assert max(times[1:]) < max(2.2, 64 * row_s * 3.1)  # at least the least
    assert times[0] < 256 * row_s * 1.3
    assert len(times) < 5 + 2 * sum(times)


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
    assert simulation.caches["small"].pool.num_used == 8  # the draft view
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


def test_a_sequence_preempted_and_restarted_in_one_plan_is_planned_once() -> None:
    simulation = Simulation(
        num_blocks={"large": 40, "small": 10},
        config=EngineConfig(max_tokens_per_step=28),
        policy=LatestFirst(),
    )
    old = simulation.submit("old", [1] * 24, max_tokens=9)
    middle = simulation.submit("middle", [2] * 16, max_tokens=9)
    latest = simulation.submit("latest", [3] * 4, max_tokens=9)
    simulation.step()  # the latest two start; the oldest has 16 tokens to go
    pool = simulation.caches["large"].pool
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
    held = simulation.caches["large"].pool.num_used
    assert (held == 0) == (status == "waiting")
    simulation.abort("a")
    simulation.assert_empty()


def test_a_shared_block_is_copied_when_the_prefix_hit_ends_inside_it() -> None:
    simulation = simulate(large=20)
    owner = simulation.submit("owner", [1] * 8, max_tokens=20)
    simulation.step()
    simulation.submit("other", [1] * 8, max_tokens=4)
    simulation.step()
    assert simulation.caches["large"].num_copied == 1
    other = simulation.live["other"]
    assert other.view.block_table[0] == owner.view.block_table[0]
    assert other.view.block_table[1] != owner.view.block_table[1]


def test_the_queue_runs_without_torch() -> None:
    """The simulation and one of its tests, in a process in which importing torch fails."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from tests.engine.queue import test_scheduler, test_slo_queue\n"
        "test_scheduler.test_later_small_passes_take_no_prefill()\n"
        "print('torch is', sys.modules['torch'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "torch is None\n", done.stderr
