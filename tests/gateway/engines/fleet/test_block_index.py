"""The block index against a dictionary, and its numbers, bounds and repairs."""

import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.gateway.engines.backends.wire import BlocksChanged, BlocksReset
from outrider.gateway.engines.fleet.block_index import BlockIndex, block_keys, grid
from outrider.gateway.engines.fleet.block_table import BlockTable

NUM_LANES = 9


def name(number: int) -> bytes:
    """The hash of a block, as random as real ones are."""
    return random.Random(number).randbytes(16)


def joined(numbers: list[int]) -> bytes:
    return b"".join(name(number)[:8] for number in numbers)


def chain(numbers: list[int]) -> np.ndarray:
    return block_keys([name(number) for number in numbers])


def depths_by_dictionary(held: dict[int, set[int]], numbers: list[int]) -> list[int]:
    return [
        max((at for at, each in enumerate(numbers, start=1) if each in held[lane]), default=0)
        for lane in range(NUM_LANES)
    ]


class Index(RuleBasedStateMachine):
    """Replicas keep and drop blocks, messages get lost, replicas come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(max_blocks=512, max_lanes=NUM_LANES)
        self.held: dict[int, set[int]] = defaultdict(set)  # as the index should know it
        self.real: dict[int, set[int]] = defaultdict(set)
        self.generations: dict[int, int] = defaultdict(int)
        for _ in range(NUM_LANES):
            lane = self.index.add_lane()
            self.index.note(lane, BlocksReset(0, b""))
        self.is_waiting: set[int] = set()

    @rule(
        lane=st.integers(0, NUM_LANES - 1),
        kept=st.lists(st.integers(0, 60), max_size=30, unique=True),
        dropped=st.lists(st.integers(0, 60), max_size=30, unique=True),
        is_lost=st.integers(0, 9).map(lambda number: number == 0),
    )
    def change(self, lane: int, kept: list[int], dropped: list[int], is_lost: bool) -> None:
        dropped = [each for each in dropped if each not in kept]
        self.real[lane] = (self.real[lane] - set(dropped)) | set(kept)
        self.generations[lane] += 1
        if is_lost:
            self.is_waiting.add(lane)
            return
        message = BlocksChanged(self.generations[lane], joined(kept), joined(dropped))
        is_known = self.index.note(lane, message)
        if lane not in self.is_waiting:
            assert is_known
            self.held[lane] = set(self.real[lane])

    @precondition(lambda self: self.is_waiting)
    @rule()
    def reset(self) -> None:
        for lane in sorted(self.is_waiting):
            message = BlocksReset(self.generations[lane], joined(sorted(self.real[lane])))
            assert self.index.note(lane, message)
            self.held[lane] = set(self.real[lane])
        self.is_waiting.clear()

    @rule(lane=st.integers(0, NUM_LANES - 1))
    def restart(self, lane: int) -> None:
        self.index.clear_lane(lane)
        self.real[lane], self.held[lane], self.generations[lane] = set(), set(), 0
        self.is_waiting.add(lane)

    @rule(lane=st.integers(0, NUM_LANES - 1))
    def replace(self, lane: int) -> None:
        self.index.remove_lane(lane)
        assert self.index.add_lane() == lane
        self.real[lane], self.held[lane], self.generations[lane] = set(), set(), 0
        self.index.note(lane, BlocksReset(0, b""))
        self.is_waiting.discard(lane)

    @rule(numbers=st.lists(st.integers(0, 70), min_size=1, max_size=16, unique=True))
    def ask(self, numbers: list[int]) -> None:
        found = self.index.depths(chain(numbers)).tolist()
        assert found == depths_by_dictionary(self.held, numbers)

    @invariant()
    def adds_up(self) -> None:
        self.index.flush()
        assert self.index.num_pairs == sum(len(each) for each in self.held.values())
        assert self.index.num_lost == 0


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_a_long_prompt_is_measured_to_a_sixteenth() -> None:
    index, rng = BlockIndex(max_blocks=40_000, max_lanes=40), random.Random(1)
    numbers = list(range(3000))
    held = {}
    for _ in range(40):
        lane = index.add_lane()
        held[lane] = rng.choice([0, 1, 17, 700, 2047, 2999, 3000])
        index.note(lane, BlocksReset(0, joined(numbers[: held[lane]])))

    found = index.depths(chain(numbers))

    for lane, number in held.items():
        assert number * 15 // 16 <= found[lane] <= number


@pytest.mark.slow_cases
@pytest.mark.parametrize("depth", [1, 17, 500, 2047, 2998])
def test_the_only_one_that_has_a_text_is_measured_more_closely(depth: int) -> None:
    index, numbers = BlockIndex(max_blocks=10_000, max_lanes=9), list(range(3000))
    lanes = [index.add_lane() for _ in range(9)]
    for lane in lanes[1:]:
        index.note(lane, BlocksReset(0, joined(numbers[: depth // 3])))
    index.note(lanes[0], BlocksReset(0, joined(numbers[:depth])))
    assert depth - depth // 250 <= index.depths(chain(numbers))[lanes[0]] <= depth


def test_a_lone_checkpoint_is_found_where_every_block_is_looked_at() -> None:
    index = BlockIndex(max_blocks=100, max_lanes=2)
    lane = index.add_lane()
    index.note(lane, BlocksReset(0, joined([777])))
    assert index.depths(chain(list(range(1000))), is_dense=True)[lane] == 778


def test_the_grid_of_a_beginning_is_the_grid_of_the_whole() -> None:
    for short, long in [(5, 9), (20, 700), (333, 6250)]:
        assert set(grid(short)[:-1]) <= set(grid(long))
    assert len(grid(6250)) < 160


def test_a_message_that_is_missing_is_noticed_and_repaired_by_a_reset() -> None:
    index = BlockIndex(max_blocks=100, max_lanes=2)
    lane = index.add_lane()
    assert index.note(lane, BlocksReset(7, joined([1])))
    assert index.note(lane, BlocksChanged(8, joined([2]), b""))
    assert not index.note(lane, BlocksChanged(10, joined([4]), b"")), "9 is missing"
    assert index.note(lane, BlocksChanged(11, joined([5]), b"")), "it was asked for already"
    assert index.note(lane, BlocksReset(11, joined([1, 2, 3, 4, 5])))
    assert index.note(lane, BlocksChanged(11, b"", joined([5]))), "from before the reset"
    assert index.depths(chain([1, 2, 3, 4, 5]))[lane] == 5
    assert index.num_gaps == 1


def test_a_replica_cannot_claim_more_than_it_can_have() -> None:
    index = BlockIndex(max_blocks=1000, max_lanes=2)
    lane = index.add_lane(most_blocks=50)
    index.note(lane, BlocksReset(0, joined(list(range(500)))))
    for number in range(10):
        kept = list(range(1000 + 10 * number, 1010 + 10 * number))
        index.note(lane, BlocksChanged(number + 1, joined(kept), b""))
    index.flush()
    assert index.num_pairs == 50
    assert index.num_refused == 550


def test_a_full_index_leaves_out_and_stays_right() -> None:
    index = BlockIndex(max_blocks=100, max_lanes=2)
    lane, other = index.add_lane(), index.add_lane()
    index.note(lane, BlocksReset(0, joined(list(range(1000)))))
    index.note(other, BlocksReset(0, b""))
    index.flush()
    assert 100 <= index.num_pairs < 1000
    assert index.num_lost == 1000 - index.num_pairs
    assert index.depths(chain([5000]))[lane] == 0
    index.note(lane, BlocksChanged(1, b"", joined(list(range(1000)))))
    index.note(other, BlocksChanged(1, joined([4]), b""))
    assert index.depths(chain([4])).tolist() == [0, 1]


def test_lanes_are_bounded() -> None:
    index = BlockIndex(max_blocks=10, max_lanes=1)
    lane = index.add_lane()
    with pytest.raises(ValueError, match="room for 1 replicas"):
        index.add_lane()
    index.remove_lane(lane)
    assert index.note(lane, BlocksReset(0, joined([1]))), "it was on its way"
    assert index.num_pairs == 0
    assert index.add_lane() == lane


def test_rows_that_run_out_lose_pairs_and_nothing_else() -> None:
    table = BlockTable(8, num_codes=20)  # one row
    keys = chain([1, 2])
    for code in range(1, 11):
        table.add(keys, np.full(2, code, dtype=np.uint16))
    assert table.num_lost == 6, "one of the keys has ten codes, the other one four"
    assert sum(table.num_pairs_of(code) for code in range(21)) == 14
    for code in range(1, 11):
        table.remove(keys, np.full(2, code, dtype=np.uint16))
    assert sum(table.num_pairs_of(code) for code in range(21)) == 0
