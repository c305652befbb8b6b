"""Engines whose passes and levels of trees are recorded, by a stand-in for CUDA graphs."""

from unittest.mock import patch

import numpy as np
import torch

from outrider.draft.device.draft_levels import capture_levels
from outrider.engine.core import Engine
from outrider.engine.passes.cuda_capture import CaptureFn
from outrider.engine.passes.level_graphs import TREE_COUNTS, LevelGraphs
from outrider.engine.passes.runner import ModelRunner
from outrider.kernels.triton_support import KernelChoice, use_kernels
from tests.engine.passes.twins import record_eagerly
from tests.engines import drafter_of


def record_levels(
    engine: Engine,
    *,
    capture: CaptureFn | None = record_eagerly,
    kernels: KernelChoice = "reference",
    tree_counts: tuple[int, ...] = TREE_COUNTS,
) -> ModelRunner:
    """Record what drafts, as at start-up; return the runner whose levels were recorded."""
    drafter = drafter_of(engine)
    head = drafter._head
    runner = engine._runners["small"] if head is None else head.runner
    counts = patch("outrider.engine.passes.level_graphs.TREE_COUNTS", tree_counts)
    # A recording runs on whatever its memory held before; what comes of that is read by nobody.
    junk = np.errstate(over="ignore", invalid="ignore")
    with use_kernels(kernels), counts, junk:
        assert runner.capture_graphs(capture=capture, max_rows=1) > 0
        assert capture_levels(drafter._config, runner, engine._runners["large"], head) > 0
    return runner


def watch_levels(runner: ModelRunner) -> list[int]:
    """A list that gets the number of rows of every level that is replayed from now on."""
    replayed: list[int] = []
    grow = runner.grow_level

    def noting(trees):  # type: ignore[no-untyped-def]
        replayed.append(trees.num_rows)
        return grow(trees)

    runner.grow_level = noting  # type: ignore[method-assign]
    return replayed


@torch.inference_mode()
def poison_levels(runner: ModelRunner) -> None:
    """What a step does not bring to the static tensors anew is nonsense from now on."""
    levels = runner._levels
    assert isinstance(levels, LevelGraphs)
    levels._words.fill_(0x7ABCDEF07ABCDEF0)
    state = levels._state
    for tensor in (state.candidates, state.numbers, state.frontier, state.root_slots):
        tensor.fill_(0x7ABCDEF)
    for captured in levels._captured.values():
        captured.sampling.parameters.fill_(0x7ABCDEF)
        captured.sampling.noise_keys.fill_(0x7ABCDEF)
    if levels._hidden is not None:
        levels._hidden.fill_(torch.nan)
