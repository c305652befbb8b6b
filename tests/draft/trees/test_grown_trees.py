"""Calibration from trees that grew on the device, and its way back to the device."""

import numpy as np
import pytest
import torch

from outrider.draft.budget.calibration import BIN_EDGES, DEPTH_CLASS, EdgeCalibration
from outrider.draft.device.device_trees import DeviceCalibration
from outrider.draft.trees.grown_trees import GrownTrees
from outrider.kernels.trees import tree_state
from outrider.kernels.trees.tree_state import number
from outrider.verifier.token_tree import SOURCE_BIT


def test_the_device_reads_the_calibration_that_the_host_uses() -> None:
    calibration = EdgeCalibration()
    on_device = DeviceCalibration(calibration, torch.device("cpu"))
    first = on_device.table()
    assert on_device.table() is first  # nothing new: nothing is sent
    rng = np.random.default_rng(3)
    for _ in range(2000):
        confidence, depth = float(rng.random()), int(rng.integers(1, 40))
        kind, is_greedy = int(rng.integers(1, 6)), bool(rng.integers(2))
        calibration.observe(
            confidence, bool(rng.random() < confidence**2),
            sources=kind, depth=depth, is_greedy=is_greedy,
        )  # fmt: skip
    table = on_device.table()
    assert table is not first
    assert float(table.shifts.abs().max()) > 0.05
    for is_greedy in (False, True):
        probability = calibration.of_requests(is_greedy=is_greedy)
        for _ in range(500):
            confidence, depth, kind = float(rng.random()), int(rng.integers(1, 80)), 1
            kind = int(rng.integers(0, 32))
            depth_class = int((depth >= table.depth_edges).sum())
            place = int((confidence >= table.bin_edges).sum())
            shift = float(table.shifts[int(is_greedy), kind, depth_class, place])
            on_host = probability(confidence, kind, depth)
            clamped = min(max(confidence + shift, table.least), table.most)
            assert clamped == pytest.approx(on_host, abs=1e-6)
    assert len(BIN_EDGES) == len(table.bin_edges)
    assert DEPTH_CLASS[-1] == len(table.depth_edges)


def test_judged_nodes_are_those_behind_the_accepted_path() -> None:
    """Root 0; 1, 2 and 5 behind it, 3 behind 1, 4 behind 3; 3 was named by text only."""
    model, suffix = SOURCE_BIT["model"], SOURCE_BIT["suffix"]
    values: dict[int, list[float]] = {
        number(tree_state.TOKEN_ID): [7, 11, 12, 13, 14, 15],
        number(tree_state.PARENT): [-1, 0, 0, 1, 3, 0],
        number(tree_state.DEPTH): [0, 1, 1, 2, 3, 1],
        number(tree_state.SOURCES): [0, model, model | suffix, suffix, model, suffix],
        number(tree_state.EVIDENCE): [0, 1, 3, 18, 1, 2],
        number(tree_state.MODEL_CONFIDENCE): [0, 0.25, 0.5, 0, 0.75, 0],
        number(tree_state.CONFIDENCE): [1, 0.25, 0.625, 0.125, 0.75, 0.5],
        number(tree_state.PATH_PROB): [1, 0.25, 0.5, 0.125, 0.0625, 0.375],
    }
    candidates = np.zeros((2, number(tree_state.NUM_FIELDS), 8), dtype=np.int32)
    for field, column in values.items():
        is_real = field >= number(tree_state.MODEL_CONFIDENCE)
        row = np.array(column, dtype=np.float32 if is_real else np.int32)
        candidates[1, field, :6] = row.view(np.int32)
    numbers = np.zeros((2, number(tree_state.NUM_NUMBERS)), dtype=np.int32)
    numbers[:, number(tree_state.NUM_CANDIDATES)] = 1, 6
    packed = np.concatenate([numbers.reshape(-1), candidates.reshape(-1)])
    grown = GrownTrees(packed, 2)
    assert grown.first_guess(0) is None
    assert grown.first_guess(1) == 12  # 14 is surer, but of another place
    found = [
        (guess.confidence, guess.evidence, guess.depth, guess.was_right)
        for guess in grown.judged(1, [0, 5], [15, 99])
    ]
    assert found == [(0.25, 1, 1, False), (0.625, 3, 1, False), (0.5, 2, 1, True)]
    found = [(guess.evidence, guess.was_right) for guess in grown.judged(1, [0, 1], [11, 13])]
    assert found == [(1, True), (3, False), (18, True), (2, False)]
    probs, depths = grown.guesses(1)
    assert probs.tolist() == [0.25, 0.5, 0.125, 0.0625, 0.375]
    assert depths.tolist() == [1, 1, 2, 3, 1]
