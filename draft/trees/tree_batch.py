"""Asks all trees of a step at once: one call where they are compiled ones.

All trees of a drafter are of one kind.
"""

from collections.abc import Sequence as SequenceOf
from typing import TypeGuard

import numpy as np

from outrider.draft.budget.budget import Floats
from outrider.draft.budget.calibration import RequestCalibration
from outrider.draft.trees import compiled_tree
from outrider.draft.trees.compiled_tree import CompiledTree
from outrider.draft.trees.growing_tree import GrowingTree
from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.runner import ForwardSlice
from outrider.kernels.cpu.tree_library import tree_library
from outrider.kernels.sampling.likeliest import Likeliest
from outrider.verifier.token_tree import TokenTree

DraftTree = GrowingTree | CompiledTree


def new_tree(
    *,
    root_token_id: int,
    root_slot: int,
    max_nodes: int,
    max_depth: int,
    calibration: RequestCalibration,
    keeps_logits: bool,
) -> DraftTree:
    """Begin a sequence's tree, in the compiled library where it was built; see `GuessTree`."""
    library = tree_library()
    if library is None:
        return GrowingTree(
            root_token_id=root_token_id,
            root_slot=root_slot,
            max_nodes=max_nodes,
            max_depth=max_depth,
            calibrate=calibration.chance,
            keeps_logits=keeps_logits,
        )
    return CompiledTree.begin(
        library,
        root_token_id=root_token_id,
        root_slot=root_slot,
        max_nodes=max_nodes,
        max_depth=max_depth,
        calibration=calibration,
        keeps_logits=keeps_logits,
    )


def _are_compiled(trees: SequenceOf[DraftTree]) -> TypeGuard[SequenceOf[CompiledTree]]:
    return bool(trees) and isinstance(trees[0], CompiledTree)


def grow_rows(
    trees: SequenceOf[DraftTree], best: Likeliest, *, are_asked: SequenceOf[bool], floor: float
) -> None:
    """Add the likeliest tokens of rows, one for each node of the frontiers, as their children.

    None that is less likely than `floor`, and none to trees that are not asked.
    """
    if _are_compiled(trees):
        compiled_tree.grow_rows(trees, best, are_asked=are_asked, floor=floor)
        return
    tokens, probs = iter(best.token_ids.tolist()), iter(best.probs.tolist())
    for tree, is_asked in zip(trees, are_asked, strict=True):
        assert isinstance(tree, GrowingTree)
        tree.grow(
            [
                [
                    (token, prob)
                    for token, prob in zip(next(tokens), next(probs), strict=True)
                    if is_asked and prob >= floor
                ]
                for _ in tree.frontier
            ]
        )


def choose_frontiers(
    trees: SequenceOf[DraftTree], *, max_frontier: int, min_path_prob: float
) -> list[tuple[int, float | None]]:
    """Choose each tree's next frontier: the rows of its pass, and its gain; 0 and None for none."""
    if _are_compiled(trees):
        return compiled_tree.choose_frontiers(
            trees, max_frontier=max_frontier, min_path_prob=min_path_prob
        )
    chosen: list[tuple[int, float | None]] = []
    for tree in trees:
        gain = tree.choose_frontier(max_frontier=max_frontier, min_path_prob=min_path_prob)
        chosen.append((0 if gain is None else tree.num_frontier_rows, gain))
    return chosen


def frontier_slices(trees: SequenceOf[DraftTree], views: SequenceOf[KVView]) -> list[ForwardSlice]:
    """Make the rows that compute the frontiers, each tree's in its view."""
    if _are_compiled(trees):
        return compiled_tree.frontier_slices(trees, views)
    return [tree.frontier_slice(view) for tree, view in zip(trees, views, strict=True)]


def weigh(trees: SequenceOf[DraftTree], weights: SequenceOf[float]) -> tuple[Floats, list[float]]:
    """Return the weighted path probabilities of what may be accepted, descending, of all trees.

    And their sum for each tree, not weighted.
    """
    if _are_compiled(trees):
        return compiled_tree.weigh(trees, weights)
    probs: list[float] = []
    sums: list[float] = []
    for tree, weight in zip(trees, weights, strict=True):
        total = 0.0
        for prob, _ in tree.verifiable():
            total += prob
            probs.append(weight * prob)
        sums.append(total)
    if len(trees) > 1:  # a tree's own are ranked already
        probs.sort(reverse=True)
    return np.array(probs), sums


def select(
    trees: SequenceOf[DraftTree], weights: SequenceOf[float], *, floor: float
) -> list[TokenTree]:
    """Return the trees of what may be accepted and has a weighted chance of at least `floor`.

    Each is the head of its tree's ranking, in which parents stand before children.
    """
    if _are_compiled(trees):
        return compiled_tree.select(trees, weights, floor=floor)
    return [
        tree.to_token_tree([node for prob, node in tree.verifiable() if prob * weight >= floor])
        for tree, weight in zip(trees, weights, strict=True)
    ]


def teach(
    trees: SequenceOf[DraftTree],
    calibrations: SequenceOf[RequestCalibration],
    texts: SequenceOf[list[int]],
) -> None:
    """Let each tree's calibration learn from every guess whose parent its text reaches."""
    if _are_compiled(trees):
        compiled_tree.teach(trees, calibrations, texts)
        return
    for tree, calibration, text in zip(trees, calibrations, texts, strict=True):
        tree.teach(calibration, text)


def judged(
    trees: SequenceOf[DraftTree], texts: SequenceOf[list[int]]
) -> list[tuple[int | None, list[int]]]:
    """Return of each tree its model's likeliest token behind the root, and its text's offsets.

    None where it named none. The offsets say how far each token of the text lies behind the root's
    slot; -1 for what was not computed and for what no guess says.
    """
    if _are_compiled(trees):
        return compiled_tree.judged(trees, texts)
    return [
        (tree.first_guess(), tree.offsets(text)) for tree, text in zip(trees, texts, strict=True)
    ]
