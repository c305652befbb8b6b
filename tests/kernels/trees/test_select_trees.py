"""The trees that kernels select, against sorting all guesses of all trees."""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.kernels.trees.select_trees import SelectedTrees, select_trees
from outrider.kernels.trees.tree_state import TreeState
from tests.kernels.growing import (
    AHEAD,
    FEW,
    FLOORS,
    MANY,
    RICH,
    SHAPES,
    TRITON_SHAPES,
    Growth,
    mask_of,
    tree_kernels,
)


def expected_parts(growth: Growth, num_nodes: int, caps: list[int]) -> list[list[int]]:
    """Per tree the candidates that are selected, by sorting all of all trees."""
    weighted = []
    for sequence, (tree, cap) in enumerate(zip(growth.trees, caps, strict=True)):
        probs = growth.state.path_prob[sequence]
        urgency = torch.tensor(growth.urgencies[sequence])
        for place, (_, node) in enumerate(tree.ranked()[:cap]):
            weight = float(probs[node].cpu() * urgency)
            weighted.append((-weight, place, sequence, node))
    parts: list[list[int]] = [[] for _ in caps]
    for _, _, sequence, node in sorted(weighted)[:num_nodes]:
        parts[sequence].append(node)
    return parts


def assert_selected(growth: Growth, trees: SelectedTrees, parts: list[list[int]]) -> None:
    row = 0
    for sequence, (tree, nodes) in enumerate(zip(growth.trees, parts, strict=True)):
        chosen = tree.to_token_tree(nodes)
        rows = slice(row, row + chosen.num_nodes)
        slot = tree.root_slot + AHEAD
        expected = {
            "token_ids": chosen.token_ids,
            "parent_index": [row + p if p >= 0 else -1 for p in chosen.parent_index],
            "depth": chosen.depth,
            "sources": chosen.sources,
            "tree_index": [sequence] * chosen.num_nodes,
            "sequence_index": [sequence] * chosen.num_nodes,
            "positions": [slot + depth for depth in chosen.depth],
            "logical_slots": [slot + place for place in range(chosen.num_nodes)],
            "candidates": [0, *nodes],
            "draft_offsets": growth.state.draft_offset[sequence, [0, *nodes]].tolist(),
        }
        assert {name: getattr(trees, name)[rows].tolist() for name in expected} == expected
        masks = [mask_of(words) for words in trees.ancestor_words[rows]]
        assert masks == chosen.ancestor_mask
        assert int(trees.row_starts[sequence]) == row
        assert int(trees.num_rows[sequence]) == chosen.num_nodes
        assert int(trees.tree_starts[sequence]) == slot
        assert int(trees.kv_lens[sequence]) == slot + chosen.num_nodes
        row += chosen.num_nodes
    for name, fill in (
        ("token_ids", 0),
        ("parent_index", -1),
        ("depth", 0),
        ("sources", 0),
        ("tree_index", -1),
        ("sequence_index", 0),
        ("positions", 0),
        ("logical_slots", -1),
        ("candidates", -1),
        ("draft_offsets", -1),
        ("ancestor_words", 0),
    ):
        assert torch.all(getattr(trees, name)[row:] == fill), name


SELECTIONS = {
    **SHAPES,
    "has_text": st.booleans(),
    "min_path_prob": FLOORS,
    "num_nodes": st.integers(0, 90),
    "caps": st.lists(st.integers(0, 40), min_size=4, max_size=4),
}


def check_selection(
    device: torch.device, *, num_nodes: int, caps: list[int], num_levels: int, **shape: Any
) -> None:
    growth = Growth.begin(device=device, **shape)
    for _ in range(num_levels):
        growth.choose()
        growth.expand()
    caps = caps[: len(growth.trees)]
    trees = select_trees(growth.state, num_nodes=num_nodes, caps=caps)
    assert trees.token_ids.shape == (len(caps) + num_nodes,)
    assert_selected(growth, trees, expected_parts(growth, num_nodes, caps))


@pytest.mark.slow
@given(**SELECTIONS)
@MANY
def test_the_likeliest_of_all_trees_are_selected(device: torch.device, **given_: Any) -> None:
    with tree_kernels("reference"):
        check_selection(device, num_levels=3, **given_)


@pytest.mark.slow
@given(**{**SELECTIONS, **TRITON_SHAPES})
@example(**RICH, has_text=True, min_path_prob=0.0, num_nodes=30, caps=[20, 12, 30])
@FEW
def test_triton_selects_the_likeliest_too(device: torch.device, **given_: Any) -> None:
    with tree_kernels("triton"):
        check_selection(device, num_levels=1, **given_)


def uniform_state(
    device: torch.device, *, num_sequences: int, num_candidates: int, is_chain: bool, prob: float
) -> TreeState:
    """Trees whose guesses are all equally likely: a chain, or all below the root."""
    growth = Growth.begin(
        0, device, num_sequences=num_sequences, width=1, branching=1, has_text=False
    )
    state, nodes = growth.state, torch.arange(num_candidates, dtype=torch.int32, device=device)
    state.numbers[:, 0], state.numbers[:, 4] = num_candidates, 255
    state.numbers[:, 6] = torch.tensor(1.0).view(torch.int32).item()
    own = state.candidates[:, :, :num_candidates]
    own[:] = 0
    own[:, 0] = nodes + 100
    own[:, 1] = nodes - 1 if is_chain else (nodes > 0).int() - 1
    own[:, 2] = nodes if is_chain else (nodes > 0).int()
    state.path_prob[:, :num_candidates] = prob
    return state


@pytest.mark.slow_cases
@pytest.mark.parametrize("is_chain", [True, False])
def test_the_largest_trees(kernels: None, device: torch.device, is_chain: bool) -> None:
    state = uniform_state(device, num_sequences=2, num_candidates=256, is_chain=is_chain, prob=1.0)
    trees = select_trees(state, num_nodes=510, caps=[300] * 2)
    assert trees.num_rows.tolist() == [256] * 2
    for place in (0, 63, 64, 255):
        expected = (2 << place) - 1 if is_chain else 1 | 1 << place
        assert mask_of(trees.ancestor_words[256 + place]) == expected


@pytest.mark.slow_cases
def test_equals_are_taken_rank_by_rank_and_tree_by_tree(
    kernels: None, device: torch.device
) -> None:
    state = uniform_state(device, num_sequences=3, num_candidates=40, is_chain=False, prob=0.5)
    trees = select_trees(state, num_nodes=50, caps=[300] * 3)
    assert trees.num_rows.tolist() == [18, 18, 17]
    assert trees.token_ids[18 : 18 + 18].tolist() == list(range(100, 118))
    capped = select_trees(state, num_nodes=60, caps=[10, 0, 300])
    assert capped.num_rows.tolist() == [11, 1, 40]
    assert capped.tree_index.tolist() == [0] * 11 + [1] + [2] * 40 + [-1] * 11
