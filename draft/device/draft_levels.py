"""Records the levels of trees that a drafter grows on the device."""

from torch import Tensor

from outrider.draft.budget.budget import MOST_BELIEVED
from outrider.draft.budget.calibration import EdgeCalibration
from outrider.draft.config import DraftConfig
from outrider.draft.device.device_trees import MAX_BRANCHING, DeviceCalibration
from outrider.draft.guesses.head_texts import Head
from outrider.engine.passes.level_graphs import LevelConfig
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.protocols import DraftModel
from outrider.kernels.tree_bounds import MAX_TREE_NODES
from outrider.kernels.trees.initial_trees import capacity_for
from outrider.verifier.token_tree import RECALLED_BIT


def capture_levels(
    config: DraftConfig, runner: ModelRunner, target: ModelRunner, head: Head | None = None
) -> int:
    """Record the levels of trees of the small model's runner, or of a head's.

    Returns how many were recorded: none where the runner's passes are not. `target`: the large
    model's runner.
    """
    if config.max_draft_depth < 2 or (head is not None and head.model.block is not None):
        return 0  # the roots' children are all that a tree gets, or one pass names all of it
    return runner.capture_levels(
        level_config(
            config,
            runner,
            target_vocab_size=target.vocab_size,
            token_ids=None if head is None else head.model.target_token_ids,
            source="small" if head is None else "head",
        )
    )


def level_config(
    config: DraftConfig,
    runner: ModelRunner,
    *,
    target_vocab_size: int,
    token_ids: Tensor | None,
    source: DraftModel,
) -> LevelConfig:
    """Return what all levels of a drafter have in common; `token_ids`: of a head's logits."""
    width, vocab_size = config.max_frontier, runner.vocab_size
    if token_ids is None:  # the same ids, as far as both models know them
        vocab_size = min(vocab_size, target_vocab_size)
    branching = min(config.max_branching, MAX_BRANCHING, vocab_size)
    num_levels = min(max(config.max_draft_depth - 1, 0), (MAX_TREE_NODES - 1) // width)
    return LevelConfig(
        width=width,
        branching=branching,
        max_levels=num_levels,
        capacity=capacity_for(
            1 + config.max_draft_nodes, num_levels=num_levels, width=width, branching=branching
        ),
        min_path_prob=config.min_path_prob,
        most_believed=MOST_BELIEVED,
        vocab_size=vocab_size,
        token_ids=token_ids,
        recalled_bit=RECALLED_BIT,
        table=DeviceCalibration(EdgeCalibration(), runner.device).table(source),
    )
