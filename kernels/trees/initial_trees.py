"""Begins trees on the host: what it knows of them goes to the device in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kernels.tree_bounds import MASK_WORDS, MAX_TREE_NODES
from outrider.kernels.trees.tree_state import (
    MAX_CAPACITY,
    MIN_CAPACITY,
    NUM_FIELDS,
    NUM_NUMBERS,
    TARGET_SLOT,
    URGENCY,
    TreeState,
    number,
)
from outrider.kernels.triton_support import next_power_of_2
from outrider.kernels.upload import upload


class TreeGuess(Protocol):
    """A candidate as the host knows it (`outrider.draft.trees.tree_candidate.TreeCandidate`)."""

    token_id: int
    parent: int
    depth: int
    sources: int
    evidence: int
    is_expanded: bool
    is_recalled: bool
    model_confidence: float
    text_confidence: float
    confidence: float
    edge_prob: float
    path_prob: float
    covered: float


@dataclass(slots=True, kw_only=True)
class _Root:
    """The root of a tree that no text stands behind."""

    token_id: int = 0
    parent: int = -1
    depth: int = 0
    sources: int = 0
    evidence: int = 0
    is_expanded: bool = False
    is_recalled: bool = False
    model_confidence: float = 0.0
    text_confidence: float = 0.0
    confidence: float = 0.0
    edge_prob: float = 0.0
    path_prob: float = 0.0
    covered: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialTree:
    """One sequence's tree before the small model is asked."""

    candidates: Sequence[TreeGuess]
    """The root first, parents before children, their probabilities worked out."""
    root_slot: int
    """In the view of the model that drafts."""
    max_nodes: int
    """Bounds the tree's guesses."""
    max_depth: int
    """Bounds what the small model adds."""
    table: int = 0
    """The calibration that holds for it (`EdgeTable`)."""
    urgency: float = 1.0
    """The weight of one of its tokens."""
    asks_model: bool = True
    """True if the small model computes its root; else the tree stays as it began."""
    target_slot: int | None = None
    """The root's in the large model's view; None for the same."""


def padding_tree() -> InitialTree:
    """Return a tree of which no level has a row, to fill up a fixed number of trees."""
    return InitialTree(
        candidates=[_Root()], root_slot=0, max_nodes=0, max_depth=0, asks_model=False
    )


def capacity_for(num_initial: int, *, num_levels: int, width: int, branching: int) -> int:
    """Candidates to make room for: the initial ones, the root's children, and each level's.

    A power of 2 from 64 to 1024: what does not fit is not guessed.
    """
    wanted = num_initial + branching * (1 + num_levels * width)
    return min(max(next_power_of_2(wanted), MIN_CAPACITY), MAX_CAPACITY)


def init_trees(
    trees: Sequence[InitialTree],
    *,
    capacity: int,
    width: int,
    recalled_bit: int,
    device: torch.device,
) -> TreeState:
    """Take trees to the device, in one copy; nothing waits.

    capacity: a power of 2 from 64 to 1024. width: frontier rows per sequence and level.
    recalled_bit: joins the sources of recalled guesses. Raises ValueError where a tree has more
    candidates than its capacity, or capacity or width are out of range.
    """
    if capacity != next_power_of_2(capacity) or not MIN_CAPACITY <= capacity <= MAX_CAPACITY:
        raise ValueError(
            f"capacity={capacity} must be a power of 2 in [{MIN_CAPACITY}, {MAX_CAPACITY}]"
        )
    if not 1 <= width < MAX_TREE_NODES:
        raise ValueError(f"width={width} must be in [1, {MAX_TREE_NODES - 1}]")
    initial, uploaded = _upload_trees(trees, capacity, width, recalled_bit, device)
    num_trees, num_fields, num_initial = initial.shape
    candidates = torch.empty(
        (num_trees, num_fields, capacity), dtype=torch.int32, device=device
    )  # [S, 13, C]
    candidates[:, :, :num_initial] = initial
    words = torch.empty((num_trees, capacity, MASK_WORDS), dtype=torch.int64, device=device)
    # The root sees its own slot.
    words[:, 0] = 0
    words[:, 0, 0] = 1
    return TreeState(candidates=candidates, ancestor_words=words, **uploaded)


def write_trees(state: TreeState, trees: Sequence[InitialTree], recalled_bit: int) -> None:
    """Begin other trees in the place of a state's, as many; nothing waits. As `init_trees`."""
    assert len(trees) == state.num_sequences
    device = state.candidates.device
    initial, uploaded = _upload_trees(trees, state.capacity, state.width, recalled_bit, device)
    state.candidates[:, :, : initial.shape[2]] = initial
    for name in ("numbers", "frontier", "root_slots"):  # the rest is the same for all trees
        getattr(state, name).copy_(uploaded[name])


def _upload_trees(
    trees: Sequence[InitialTree],
    capacity: int,
    width: int,
    recalled_bit: int,
    device: torch.device,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the candidates, int32 [S, 13, some], and the other tensors of a `TreeState` but words.

    Raises ValueError where a tree has more candidates than its capacity.
    """
    longest = max((len(tree.candidates) for tree in trees), default=1)
    if longest > capacity:
        raise ValueError(f"a tree of {longest} candidates is beyond the capacity {capacity}")
    num_trees, num_fields = len(trees), number(NUM_FIELDS)
    # Every part begins at 16 bytes: kernels are compiled for how their pointers are aligned.
    num_initial = -(-longest // 4) * 4
    sizes = [
        num_trees * num_fields * num_initial,
        num_trees * number(NUM_NUMBERS),
        num_trees * width,
        num_trees * width * 2,  # int64
        num_trees,
        num_trees,
    ]
    starts = list(accumulate((-(-size // 4) * 4 for size in sizes), initial=0))
    flat = np.zeros(max(starts[-1], 1), dtype=np.int32)
    _fill(flat, trees, starts, num_initial, width, recalled_bit)
    uploaded = upload(flat, device)
    parts = [uploaded[start : start + size] for start, size in zip(starts[:-1], sizes, strict=True)]
    return parts[0].view(num_trees, num_fields, num_initial), {
        "numbers": parts[1].view(num_trees, number(NUM_NUMBERS)),
        "frontier": parts[2].view(num_trees, width),
        "sequence_index": parts[3].view(torch.int64),
        "row_starts": parts[4],
        "root_slots": parts[5],
    }


def _fill(
    flat: npt.NDArray[np.int32],
    trees: Sequence[InitialTree],
    starts: list[int],
    num_initial: int,
    width: int,
    recalled_bit: int,
) -> None:
    """Write what `init_trees` sends; `flat` is zero."""
    num_trees = len(trees)
    initial, numbers, frontier, sequence_index, row_starts, root_slots = (
        flat[start:end] for start, end in pairwise(starts)
    )
    shape = (num_trees, number(NUM_FIELDS), num_initial)
    fields = initial[: prod(shape)].reshape(shape)
    numbers = numbers[: num_trees * number(NUM_NUMBERS)].reshape(num_trees, number(NUM_NUMBERS))
    frontier = frontier[: num_trees * width].reshape(num_trees, width)
    frontier[:] = -1
    for row, tree in enumerate(trees):
        whole, real = _columns(tree, recalled_bit)
        own = fields[row, :, : len(tree.candidates)]
        own[: len(whole)] = whole
        own[len(whole) :] = np.array(real, dtype=np.float32).view(np.int32)
        numbers[row, : number(URGENCY)] = (
            len(tree.candidates),
            1,  # the pass that computes the root
            tree.root_slot,
            tree.max_depth,
            tree.max_nodes,
            tree.table,
        )
        numbers[row, number(URGENCY)] = np.float32(tree.urgency).view(np.int32)
        target_slot = tree.root_slot if tree.target_slot is None else tree.target_slot
        numbers[row, number(TARGET_SLOT)] = target_slot
        frontier[row, 0] = 0 if tree.asks_model else -1
    index = np.repeat(np.arange(num_trees, dtype=np.int64), width)
    sequence_index[: 2 * num_trees * width] = index.view(np.int32)
    row_starts[:num_trees] = np.arange(num_trees) * width
    root_slots[:num_trees] = [tree.root_slot for tree in trees]


def _columns(tree: InitialTree, recalled_bit: int) -> tuple[list[list[int]], list[list[float]]]:
    """A tree's fields in their order: whole numbers, then real ones, each [num_candidates]."""
    guesses = tree.candidates
    root_offset = 0 if tree.asks_model else -1
    return [
        [guess.token_id for guess in guesses],
        [guess.parent for guess in guesses],
        [guess.depth for guess in guesses],
        [guess.sources | (recalled_bit if guess.is_recalled else 0) for guess in guesses],
        [guess.evidence for guess in guesses],
        [int(guess.is_expanded) for guess in guesses],
        [root_offset, *([-1] * (len(guesses) - 1))],
    ], [
        [guess.model_confidence for guess in guesses],
        [guess.text_confidence for guess in guesses],
        [guess.confidence for guess in guesses],
        [guess.edge_prob for guess in guesses],
        [guess.path_prob for guess in guesses],
        [guess.covered for guess in guesses],
    ]
