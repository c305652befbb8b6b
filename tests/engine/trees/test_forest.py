"""Forests on their way to the host, and what is done with their paths on the device."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.cache.block_pool import BlockPool
from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.sequences.sequence import Sequence
from outrider.engine.trees.forest import (
    Forest,
    ForestReadback,
    num_free_slots,
    path_moves,
    reserve_trees,
    slot_table,
)
from outrider.verifier.noise import SequenceNoise
from outrider.verifier.sampling import forest_sampling_rows
from outrider.verifier.verdict import ForestVerdicts
from tests.engines import make_request, random_prompt, tiny_pair


def make_view(num_slots: int, *, num_blocks: int = 64, block_size: int = 4) -> KVView:
    view = KVView(BlockPool(num_blocks=num_blocks, block_size=block_size), root=b"")
    view.pool.allocate()  # so that blocks are not their own numbers
    view.reserve(num_slots)
    return view


def test_slots_behind_a_root() -> None:
    views = [make_view(22), make_view(9), make_view(5)]
    table = slot_table([views[0], None, views[2]], [17, 8, 4], 6)
    # 22 slots take 6 blocks of 4, so slots up to 23 are there; 5 take 2, up to 7.
    assert table.tolist() == [
        [views[0].slot(17 + place) for place in range(6)],
        [-1] * 6,
        [*(views[2].slot(4 + place) for place in range(4)), -1, -1],
    ]
    assert table.dtype == np.int64


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_paths_are_moved_behind_their_roots(data: st.DataObject) -> None:
    num_trees, max_depth = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    width = data.draw(st.integers(1, 9))
    slots = np.arange(num_trees * width).reshape(num_trees, width) * 3 + 5
    offsets = np.full((num_trees, max_depth), -1)
    expected = []
    for tree in range(num_trees):
        missing = data.draw(st.integers(0, width))
        slots[tree, width - missing :] = -1
        rising = data.draw(st.sets(st.integers(1, max(width - 1, 1)), max_size=max_depth))
        path = sorted(offset for offset in rising if offset < width)
        if path and data.draw(st.booleans()):
            path[data.draw(st.integers(0, len(path) - 1))] = -1  # was not computed
        offsets[tree, : len(path)] = path
        for place, offset in enumerate(path, start=1):
            if offset < 0:
                break
            source, destination = slots[tree, offset], slots[tree, place]
            if offset != place and source >= 0 and destination >= 0:
                expected.append((source, destination))
    sources, destinations = path_moves(torch.from_numpy(offsets), torch.from_numpy(slots))
    pairs = list(zip(sources.tolist(), destinations.tolist(), strict=True))
    assert [pair for pair in pairs if pair != (-1, -1)] == expected
    assert all((source < 0) == (destination < 0) for source, destination in pairs)


def make_sequence(runner: ModelRunner, num_tokens: int, *, seed: int = 0) -> Sequence:
    request = make_request(str(seed), random_prompt(num_tokens, seed=seed))
    sequence = Sequence(
        request=request,
        tier="large",
        view=runner.new_view(""),
        noise=SequenceNoise(request.sampling, "large", vocab_size=131),
        submitted_s=0.0,
        token_ids=list(request.prompt_token_ids),
    )
    sequence.view.reserve(num_tokens)
    return sequence


def test_trees_share_the_available_blocks() -> None:
    runner = ModelRunner(model=tiny_pair().large, num_blocks=20, block_size=4)
    sequences = [make_sequence(runner, length, seed=length) for length in (8, 9, 11)]
    # 2 + 3 + 3 blocks are held and 12 free: 4 each, behind 0, 3 and 1 slots of the last block.
    assert num_free_slots(sequences[1].view, 9, num_sharing=3) == 3 + 16
    assert reserve_trees(runner, sequences, [3, 100, 100]) == [3, 3 + 24, 1 + 20]
    assert runner.pool.num_available == 0
    assert reserve_trees(runner, sequences, [9, 0, 99]) == [4, 0, 21]


def test_where_nothing_is_free_trees_are_roots() -> None:
    runner = ModelRunner(model=tiny_pair().large, num_blocks=4, block_size=4)
    sequences = [make_sequence(runner, length, seed=length) for length in (8, 6)]
    assert reserve_trees(runner, sequences, [5, 5]) == [0, 2]


@pytest.mark.parametrize("padding", [0, 3])
def test_a_forest_reads_back_what_was_written(padding: int) -> None:
    runner = ModelRunner(model=tiny_pair().large, num_blocks=20, block_size=4)
    sequences = [make_sequence(runner, length, seed=length) for length in (8, 9)]

    def rows(*values: int, fill: int = 0) -> torch.Tensor:
        return torch.tensor([*values, *[fill] * padding])

    forest = Forest(
        sequences=sequences,
        sampling=forest_sampling_rows(sequences, 3, torch.device("cpu")),
        max_depth=3,
        max_nodes=5,
        token_ids=rows(11, 12, 13, 14, 21, 22),
        parent_index=rows(-1, 0, 0, 2, -1, 4, fill=-1),
        depth=rows(0, 1, 1, 2, 0, 1),
        tree_index=rows(0, 0, 0, 0, 1, 1, fill=-1),
        sequence_index=rows(0, 0, 0, 0, 1, 1),
        positions=rows(7, 8, 8, 9, 8, 9),
        logical_slots=rows(7, 8, 9, 10, 8, 9, fill=-1),
        ancestor_words=torch.zeros(6 + padding, 4, dtype=torch.int64),
        row_starts=torch.tensor([0, 4], dtype=torch.int32),
        num_rows=torch.tensor([4, 2], dtype=torch.int32),
        tree_starts=torch.tensor([7, 8], dtype=torch.int32),
        kv_lens=torch.tensor([11, 10], dtype=torch.int32),
        sources=rows(0, 1, 3, 1, 0, 17),
        candidates=rows(0, 2, 1, 5, 0, 3, fill=-1),
        draft_offsets=rows(0, 1, 3, -1, 0, 2, fill=-1),
        drafter_payload=torch.tensor([7, 8, 9], dtype=torch.int32),
    )
    verdicts = ForestVerdicts(
        accepted_path=torch.tensor([[2, 3, -1], [-1, -1, -1]]),
        emitted_tokens=torch.tensor([[13, 14, 15, -1], [23, -1, -1, -1]]),
    )
    known = ForestReadback(forest, verdicts).wait()
    first, second = known.trees
    assert (first.token_ids, first.parent_index) == ([11, 12, 13, 14], [-1, 0, 0, 2])
    assert (second.token_ids, second.parent_index) == ([21, 22], [-1, 0])
    assert (first.sources, second.sources) == ([0, 1, 3, 1], [0, 17])
    assert first.depth == [0, 1, 1, 2]
    assert [verdict.accepted_nodes for verdict in known.verdicts] == [[2, 3], []]
    assert [verdict.token_ids for verdict in known.verdicts] == [[13, 14, 15], [23]]
    assert known.first_rows == [0, 4]
    assert known.candidates == [[0, 2, 1, 5], [0, 3]]
    assert known.draft_offsets == [[0, 1, 3, -1], [0, 2]]
    assert known.drafter_payload.tolist() == [7, 8, 9]
    device_rows = forest.device_rows()
    assert device_rows.total_rows == forest.total_rows == 6 + padding
    assert device_rows.views == [sequence.view for sequence in sequences]


def test_nothing_is_moved_behind_uncomputed_rows() -> None:
    slots = torch.arange(100, 110)[None]
    sources, destinations = path_moves(torch.tensor([[1, 3, -1, 7, -1]]), slots)
    assert sources.tolist() == [-1, 103, -1, -1, -1]
    assert destinations.tolist() == [-1, 102, -1, -1, -1]
