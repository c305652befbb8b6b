"""The kernels' choice of the next pass, against `GrowingTree`'s and the rule itself."""

from typing import Any

import pytest
import torch
from hypothesis import example, given

from outrider.draft.budget.budget import MOST_BELIEVED
from outrider.kernels.trees.choose_frontier import FrontierRows, choose_frontier
from outrider.kernels.trees.expand_tree import expand_tree
from outrider.kernels.trees.initial_trees import InitialTree, init_trees
from outrider.kernels.trees.parent_rows import keep_rows, parent_rows
from outrider.verifier.token_tree import RECALLED_BIT
from tests.kernels.growing import (
    FEW,
    FLOORS,
    MANY,
    RICH,
    SHAPES,
    TRITON_SHAPES,
    Growth,
    mask_of,
    poison,
    tree_kernels,
)


def path_to(tree: Any, node: int) -> list[int]:
    """Candidates from the root down to a node."""
    path = [node]
    while path[-1]:
        path.append(tree.candidates[path[-1]].parent)
    return path[::-1]


def check_frontier_is_the_hosts(growth: Growth, num_levels: int) -> None:
    for level in range(num_levels):
        for tree in growth.trees:
            tree.num_passes = level + 1
            tree.choose_frontier(max_frontier=growth.width, min_path_prob=growth.min_path_prob)
        expected = [tree.frontier for tree in growth.trees]
        for tree, nodes in zip(growth.trees, expected, strict=True):
            for node in nodes:  # computed, as far as its children are concerned
                tree.candidates[node].offset = 1
        growth.choose()
        assert growth.nodes == expected
        growth.expand()


@pytest.mark.slow
@given(**SHAPES, min_path_prob=FLOORS)
@MANY
def test_without_text_the_frontier_is_the_hosts(device: torch.device, **shape: Any) -> None:
    with tree_kernels("reference"):
        growth = Growth.begin(device=device, has_text=False, **shape)
        check_frontier_is_the_hosts(growth, num_levels=7)


@pytest.mark.slow
@given(**TRITON_SHAPES, min_path_prob=FLOORS)
@example(**RICH, min_path_prob=0.001)
@FEW
def test_without_text_tritons_frontier_is_the_hosts(device: torch.device, **shape: Any) -> None:
    with tree_kernels("triton"):
        growth = Growth.begin(device=device, has_text=False, **shape)
        check_frontier_is_the_hosts(growth, num_levels=2)


def expected_frontier(growth: Growth, sequence: int, level: int) -> list[int]:
    """By the rule itself: the greatest gain among what can be computed, one after the other."""
    tree, offsets = growth.trees[sequence], growth.state.draft_offset[sequence].tolist()
    if level + 1 >= tree.max_depth:
        return []
    worthy = {}
    for prob, node in tree.ranked()[: tree.max_nodes - 1]:
        candidate = tree.candidates[node]
        gain = prob * (1.0 - min(candidate.covered, MOST_BELIEVED))
        is_open = not candidate.is_expanded and candidate.depth < tree.max_depth
        if is_open and min(prob, gain) >= growth.min_path_prob and offsets[node] < 0:
            worthy[node] = gain
    chosen: list[int] = []
    while len(chosen) < growth.width:
        can = [
            node
            for node in worthy
            if offsets[parent := tree.candidates[node].parent] >= 0
            or (parent in chosen and not growth.is_stepwise)
        ]
        if not can:
            break
        chosen.append(max(can, key=lambda node: (worthy[node], -node)))
        del worthy[chosen[-1]]
    return chosen


def check_frontier_and_rows(growth: Growth, num_levels: int) -> None:
    state, width = growth.state, growth.width
    for level in range(num_levels):
        expected = [
            expected_frontier(growth, sequence, level) for sequence in range(len(growth.trees))
        ]
        known = state.draft_offset.clone()
        rows = growth.choose()
        assert growth.nodes == expected
        for sequence, tree in enumerate(growth.trees):
            assert_rows(growth, rows, sequence, first_offset=1 + level * width)
            # Nothing else has changed.
            others = [
                node for node in range(len(tree.candidates)) if node not in expected[sequence]
            ]
            assert state.draft_offset[sequence, others].tolist() == known[sequence, others].tolist()
        growth.expand()


@pytest.mark.slow
@given(**SHAPES, min_path_prob=FLOORS)
@MANY
def test_the_frontier_and_its_rows(device: torch.device, **shape: Any) -> None:
    with tree_kernels("reference"):
        check_frontier_and_rows(Growth.begin(device=device, has_text=True, **shape), 6)


@pytest.mark.slow
@given(**TRITON_SHAPES, min_path_prob=FLOORS)
@example(**RICH, min_path_prob=0.001)
@FEW
def test_tritons_frontier_and_its_rows(device: torch.device, **shape: Any) -> None:
    with tree_kernels("triton"):
        check_frontier_and_rows(Growth.begin(device=device, has_text=True, **shape), 3)


def check_parents_come_before(growth: Growth) -> None:
    """What a head computes carries its parent's row: of earlier passes, zeros in padding."""
    growth.is_stepwise = True
    width, size, device = growth.width, 5, growth.state.candidates.device
    levels = 3
    rows = torch.randn(len(growth.trees), 1 + levels * width, size, device=device)
    check_frontier_and_rows(growth, levels - 1)
    growth.choose()
    found = parent_rows(growth.state, rows)
    assert found.shape == (len(growth.trees) * width, size)
    offsets = growth.state.draft_offset.tolist()
    for sequence, tree in enumerate(growth.trees):
        for place in range(width):
            expected = torch.zeros(size, device=device)
            if place < len(growth.nodes[sequence]):
                parent = tree.candidates[growth.nodes[sequence][place]].parent
                assert 0 <= offsets[sequence][parent] < 1 + (levels - 1) * width
                expected = rows[sequence, offsets[sequence][parent]]
            assert torch.equal(found[sequence * width + place], expected)
    before = rows.clone()
    new = torch.randn(len(growth.trees) * width, size, device=device)
    keep_rows(growth.state, new, rows)
    first = 1 + (levels - 1) * width
    assert torch.equal(rows[:, :first], before[:, :first])
    assert torch.equal(rows[:, first : first + width].flatten(0, 1), new)
    short = before[:, : first + width - 1].contiguous()  # the last row has no room
    keep_rows(growth.state, new, short)
    assert torch.equal(short, rows[:, : first + width - 1])


@pytest.mark.slow
@given(**SHAPES, min_path_prob=FLOORS)
@MANY
def test_a_stepwise_model_computes_what_hangs_on_computed_nodes(
    device: torch.device, **shape: Any
) -> None:
    with tree_kernels("reference"):
        check_parents_come_before(Growth.begin(device=device, has_text=True, **shape))


@pytest.mark.slow
def test_tritons_frontier_of_a_stepwise_model(device: torch.device) -> None:
    shape: dict[str, Any] = {**RICH, "min_path_prob": 0.001}
    with tree_kernels("triton"):
        check_parents_come_before(Growth.begin(device=device, has_text=True, **shape))


def assert_rows(growth: Growth, rows: FrontierRows, sequence: int, *, first_offset: int) -> None:
    tree, state, width = growth.trees[sequence], growth.state, growth.width
    nodes = growth.nodes[sequence]
    offsets = state.draft_offset[sequence].tolist()
    assert int(rows.row_starts[sequence]) == sequence * width
    assert int(rows.num_rows[sequence]) == len(nodes)
    assert int(rows.tree_starts[sequence]) == tree.root_slot
    assert int(rows.kv_lens[sequence]) == tree.root_slot + first_offset + len(nodes)
    for place in range(width):
        row = sequence * width + place
        own = {
            name: int(getattr(rows, name)[row])
            for name in ("token_ids", "positions", "logical_slots", "depth", "sequence_index")
        }
        own["mask"] = mask_of(rows.ancestor_words[row])
        expected = {
            "token_ids": 0,
            "positions": tree.root_slot,
            "logical_slots": -1,
            "depth": 0,
            "sequence_index": sequence,
            "mask": 0,
        }
        if place < len(nodes):
            node = nodes[place]
            candidate = tree.candidates[node]
            assert offsets[node] == first_offset + place
            expected = {
                "token_ids": candidate.token_id,
                "positions": tree.root_slot + candidate.depth,
                "logical_slots": tree.root_slot + first_offset + place,
                "depth": candidate.depth,
                "sequence_index": sequence,
                "mask": sum(1 << offsets[above] for above in path_to(tree, node)),
            }
            assert mask_of(state.ancestor_words[sequence, node]) == expected["mask"]
        assert own == expected


def test_behind_the_last_node_that_fits_nothing_would_fit(
    kernels: None, device: torch.device
) -> None:
    growth = Growth.begin(3, device, num_sequences=1, width=4, branching=4, has_text=False)
    growth.state.numbers[:, 3], growth.state.numbers[:, 4] = 10, 3  # depths, nodes
    growth.choose()
    likeliest = growth.state.path_prob[0, 1:5].argsort(descending=True) + 1
    assert growth.nodes[0] == likeliest[:2].tolist()


@pytest.mark.slow
def test_draft_slots_end_with_the_mask(kernels: None, device: torch.device) -> None:
    growth = Growth.begin(3, device, num_sequences=2, width=5, branching=8, has_text=False)
    # Depth and nodes do not matter, and the passes so far have taken the slots up to 250.
    growth.state.numbers[:, 3:5] = 1000
    growth.state.numbers[:, 1] = 1 + 250 // 5
    for num_slots in (5, 0):
        rows = growth.choose()
        assert rows.num_rows.tolist() == [num_slots] * 2
        for sequence in range(2):
            first_offset = 251 if num_slots else 256
            assert_rows(growth, rows, sequence, first_offset=first_offset)
        growth.expand()
    assert int(growth.state.draft_offset[:, :9].max()) == 255
    growth = Growth.begin(3, device, num_sequences=1, width=4, branching=8, has_text=False)
    growth.state.numbers[:, 3:5] = 1000
    growth.state.numbers[:, 1] = 1 + 252 // 4
    assert_rows(growth, growth.choose(), 0, first_offset=253)
    assert len(growth.nodes[0]) == 3


@pytest.mark.slow_cases
def test_where_the_root_is_unknown_nothing_grows(kernels: None, device: torch.device) -> None:
    growth = Growth.begin(3, device, num_sequences=2, width=3, branching=2, has_text=True)
    tree = growth.trees[1]
    initial = InitialTree(
        candidates=tree.candidates, root_slot=5, max_nodes=30, max_depth=6, asks_model=False
    )
    state = init_trees([initial], capacity=64, width=3, recalled_bit=RECALLED_BIT, device=device)
    poison(state)
    before = state.candidates.clone()
    assert state.frontier.tolist() == [[-1, -1, -1]]
    tokens = torch.ones((1, 2), dtype=torch.int64, device=device)
    probs = torch.full((1, 2), float("nan"), device=device)
    expand_tree(state, tokens, probs, growth.table, min_path_prob=0.0)
    rows = choose_frontier(state, min_path_prob=0.0, most_believed=0.7)
    assert torch.equal(state.candidates, before)
    assert rows.num_rows.tolist() == [0]
    assert state.frontier.tolist() == [[-1, -1, -1]]
