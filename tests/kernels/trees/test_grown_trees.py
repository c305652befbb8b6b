"""Initial trees, what the host reads of them, and a whole step without the host."""

from typing import Any

import pytest
import torch

from outrider.kernels.trees.choose_frontier import choose_frontier
from outrider.kernels.trees.expand_tree import expand_tree
from outrider.kernels.trees.initial_trees import InitialTree, capacity_for, init_trees
from outrider.kernels.trees.select_trees import SelectedTrees, select_trees
from outrider.kernels.trees.tree_state import CandidateFields, TreeState
from outrider.verifier.token_tree import RECALLED_BIT
from tests.kernels.growing import (
    Growth,
)


def test_an_empty_batch_builds_no_tree(kernels: None, device: torch.device) -> None:
    growth = Growth.begin(0, device, num_sequences=0, width=2, branching=2, has_text=False)
    rows = growth.choose()
    assert rows.token_ids.shape == (0,)
    trees = select_trees(growth.state, num_nodes=3, caps=[])
    assert trees.tree_index.tolist() == [-1] * 3


@pytest.mark.slow_cases
def test_the_first_columns_hold_the_candidates(kernels: None, device: torch.device) -> None:
    growth = Growth.begin(11, device, num_sequences=3, width=2, branching=3, has_text=True)
    growth.choose()
    growth.expand()
    state = growth.state
    known = CandidateFields(
        fields=state.candidates[:, :, :100].cpu().numpy(),
        num_candidates=state.num_candidates.cpu().numpy(),
    )
    for sequence, tree in enumerate(growth.trees):
        own = known.of_tree(sequence)
        assert own.token_id == [candidate.token_id for candidate in tree.candidates]
        confidences = [candidate.confidence for candidate in tree.candidates]
        assert own.confidence == pytest.approx(confidences, abs=1e-5)
        assert own.children(0) == list(tree.candidates[0].children.values())


def test_values_out_of_range_are_refused(device: torch.device) -> None:
    growth = Growth.begin(0, device, num_sequences=2, width=2, branching=2, has_text=True)
    trees = [
        InitialTree(candidates=tree.candidates, root_slot=0, max_nodes=3, max_depth=3)
        for tree in growth.trees
    ]
    limits: dict[str, Any] = {"recalled_bit": RECALLED_BIT, "device": device}
    for capacity, width in ((100, 2), (32, 2), (2048, 2), (64, 0), (64, 256)):
        with pytest.raises(ValueError, match="must be"):
            init_trees(trees, capacity=capacity, width=width, **limits)
    long = InitialTree(
        candidates=trees[0].candidates[:1] * 65, root_slot=0, max_nodes=3, max_depth=3
    )
    with pytest.raises(ValueError, match="65 candidates"):
        init_trees([long], capacity=64, width=1, **limits)
    with pytest.raises(ValueError, match="num_nodes=-1"):
        select_trees(growth.state, num_nodes=-1, caps=[1, 1])
    for shape, other in (((2, 3), (2, 2)), ((3, 2), (3, 2)), ((6, 2), (6, 2))):
        tokens, probs = torch.zeros(shape, dtype=torch.int64), torch.zeros(other)
        with pytest.raises(ValueError, match=r"sequences|beyond"):
            expand_tree(growth.state, tokens, probs, growth.table, min_path_prob=0.0)


def test_capacity_has_room_for_every_level() -> None:
    assert capacity_for(1, num_levels=0, width=4, branching=3) == 64
    assert capacity_for(20, num_levels=8, width=4, branching=3) == 128
    assert capacity_for(30, num_levels=8, width=4, branching=3) == 256
    assert capacity_for(100, num_levels=60, width=64, branching=8) == 1024


@pytest.mark.gpu
def test_a_step_waits_for_nothing_and_can_be_captured() -> None:
    device = torch.device("cuda")
    growth = Growth.begin(2, device, num_sequences=4, width=4, branching=3, has_text=True)
    begun = growth.state
    tokens = torch.arange(48, device=device).view(16, 3)
    probs = torch.full((16, 3), 0.25, device=device)

    def grow(state: TreeState) -> SelectedTrees:
        for _ in range(3):
            choose_frontier(state, min_path_prob=0.01, most_believed=0.7)
            expand_tree(state, tokens, probs, growth.table, min_path_prob=0.01)
        return select_trees(state, num_nodes=40, caps=[20] * 4)

    def copy() -> TreeState:
        parts = {name: getattr(begun, name).clone() for name in begun.__dataclass_fields__}
        return TreeState(**parts)

    grow(copy())  # compiles
    state = copy()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = grow(state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    captured = copy()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose_frontier(captured, min_path_prob=0.01, most_believed=0.7)
        expand_tree(captured, tokens, probs, growth.table, min_path_prob=0.01)
    for _ in range(3):
        graph.replay()
    replayed = select_trees(captured, num_nodes=40, caps=[20] * 4)
    for name in SelectedTrees.__dataclass_fields__:
        assert torch.equal(getattr(replayed, name), getattr(expected, name)), name
