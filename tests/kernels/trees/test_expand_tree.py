"""Guesses that join trees in the kernels, against `GrowingTree`."""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.kernels.trees.expand_tree import expand_tree
from outrider.verifier.token_tree import RECALLED_BIT, SOURCE_BIT
from tests.kernels.growing import (
    FEW,
    FLOORS,
    MANY,
    RICH,
    SHAPES,
    TRITON_SHAPES,
    Growth,
    fields_of,
    tree_kernels,
)


def assert_same_candidates(growth: Growth) -> None:
    state = growth.state
    for sequence, tree in enumerate(growth.trees):
        number = len(tree.candidates)
        assert int(state.num_candidates[sequence]) == number
        for name, expected in fields_of(tree.candidates).items():
            found = getattr(state, name)[sequence, :number].tolist()
            assert found == pytest.approx(expected, abs=1e-5), name


def check_guesses_join_as_they_do_on_the_host(growth: Growth) -> None:
    assert_same_candidates(growth)
    for _ in range(3):
        growth.choose()
        growth.expand()
        assert_same_candidates(growth)


@pytest.mark.slow
@given(**SHAPES, has_text=st.booleans(), min_path_prob=FLOORS)
@MANY
def test_guesses_join_as_they_do_on_the_host(device: torch.device, **shape: Any) -> None:
    with tree_kernels("reference"):
        check_guesses_join_as_they_do_on_the_host(Growth.begin(device=device, **shape))


@pytest.mark.slow
@given(**TRITON_SHAPES, has_text=st.booleans(), min_path_prob=FLOORS)
@example(**RICH, has_text=True, min_path_prob=0.001)
@FEW
def test_guesses_join_in_triton_too(device: torch.device, **shape: Any) -> None:
    with tree_kernels("triton"):
        check_guesses_join_as_they_do_on_the_host(Growth.begin(device=device, **shape))


@pytest.mark.slow
def test_guesses_beyond_the_capacity_are_left_out(kernels: None, device: torch.device) -> None:
    growth = Growth.begin(
        5, device, num_sequences=2, width=4, branching=14, has_text=False, capacity=64
    )
    state = growth.state
    state.numbers[:, 3:5] = 255  # depth and nodes: everything is worth looking at
    for _ in range(2):
        growth.choose()
        growth.nodes = [[]] * 2  # the host's trees stay behind
        before, counts = state.candidates.clone(), state.num_candidates.tolist()
        growth.expand()
        for sequence, count in enumerate(counts):  # tokens, parents and depths stay
            old = before[sequence, :3, :count]
            assert torch.equal(state.candidates[sequence, :3, :count], old)
    assert state.num_candidates.tolist() == [64, 64]
    for sequence in range(2):
        parents = state.parent[sequence].tolist()
        tokens = state.token_ids[sequence].tolist()
        assert len(set(zip(parents, tokens, strict=True))) == 64
        assert parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(parents) if node)


def test_chances_that_are_no_numbers_name_nothing(kernels: None, device: torch.device) -> None:
    growth = Growth.begin(4, device, num_sequences=1, width=2, branching=3, has_text=False)
    growth.choose()
    before = growth.state.candidates[:, :3].clone()
    expand_tree(
        growth.state,
        torch.ones((2, 3), dtype=torch.int64, device=device),
        torch.full((2, 3), float("nan"), device=device),
        growth.table,
        min_path_prob=0.0,
    )
    assert torch.equal(growth.state.candidates[:, :3], before)


def test_the_recalled_bit_is_no_evidence(kernels: None, device: torch.device) -> None:
    growth = Growth.begin(1, device, num_sequences=1, width=2, branching=1, has_text=False)
    state = growth.state
    state.frontier[:] = 0
    token = int(state.token_ids[0, 1])
    state.sources[0, 1] = SOURCE_BIT["suffix"] | RECALLED_BIT
    state.text_confidence[0, 1] = 0.5
    tokens = torch.tensor([[token]], device=device)
    expand_tree(
        state, tokens, torch.full((1, 1), 0.5, device=device), growth.table, min_path_prob=0.0
    )
    assert int(state.evidence[0, 1]) == SOURCE_BIT["suffix"] | SOURCE_BIT["model"]
    bits = SOURCE_BIT["suffix"] | SOURCE_BIT["model"] | RECALLED_BIT
    assert int(state.sources[0, 1]) == bits
