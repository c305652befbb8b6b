"""Trees of guesses while they grow on the device: their layout, and how the host begins them.

A sequence's candidates are rows of one int32 tensor, a field each; probabilities are float32 bits
in it. So one copy takes everything to the device or back, and one pointer gives a kernel all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.triton_support import jit, next_power_of_2, tl
from kernels.upload import upload

# Bits of a row's ancestor mask, which bound a tree and the draft slots behind a root.
MAX_TREE_SLOTS = 256
NUM_WORDS = MAX_TREE_SLOTS // 64
# A kernel holds all candidates of a sequence in registers.
MIN_CAPACITY, MAX_CAPACITY = 64, 1024

# A candidate's fields, in the order in which they lie; kernels read these names too.
TOKEN_ID: Any = tl.constexpr(0)
PARENT: Any = tl.constexpr(1)
DEPTH: Any = tl.constexpr(2)
SOURCES: Any = tl.constexpr(3)
EVIDENCE: Any = tl.constexpr(4)
IS_EXPANDED: Any = tl.constexpr(5)
DRAFT_OFFSET: Any = tl.constexpr(6)
MODEL_CONFIDENCE: Any = tl.constexpr(7)
TEXT_CONFIDENCE: Any = tl.constexpr(8)
CONFIDENCE: Any = tl.constexpr(9)
EDGE_PROB: Any = tl.constexpr(10)
PATH_PROB: Any = tl.constexpr(11)
COVERED: Any = tl.constexpr(12)
NUM_FIELDS: Any = tl.constexpr(13)

# A sequence's numbers.
NUM_CANDIDATES: Any = tl.constexpr(0)
NUM_PASSES: Any = tl.constexpr(1)
ROOT_SLOT: Any = tl.constexpr(2)
MAX_DEPTH: Any = tl.constexpr(3)
MAX_NODES: Any = tl.constexpr(4)
TABLE: Any = tl.constexpr(5)
URGENCY: Any = tl.constexpr(6)
TARGET_SLOT: Any = tl.constexpr(7)
NUM_NUMBERS: Any = tl.constexpr(8)


def number(constant: Any) -> int:
    """One of the names above as the host reads it."""
    return int(getattr(constant, "value", constant))


@jit
def load_bits(pointers, mask):  # type: ignore[no-untyped-def]
    """Float32 that lie as int32; 0 where the mask is not set."""
    return tl.load(pointers, mask=mask, other=0).to(tl.float32, bitcast=True)


@jit
def store_bits(pointers, values, mask):  # type: ignore[no-untyped-def]
    """Float32 into int32."""
    tl.store(pointers, values.to(tl.int32, bitcast=True), mask=mask)


def num_warps_for(capacity: int) -> int:
    """Warps of a program that holds so many candidates: two of them a thread, at most four."""
    return min(max(capacity // 64, 1), 8)


class TreeGuess(Protocol):
    """A candidate as the host knows it (`draft.growing_tree.Candidate`)."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialTree:
    """One sequence's tree before the small model is asked.

    candidates: the root first, parents before children, their probabilities worked out. max_nodes
    and max_depth bound the tree's guesses and what the small model adds. table: which calibration
    holds for it (`EdgeTable`). urgency: how much a token of it counts. asks_model: whether the
    small model computes its root; else the tree stays as it began. root_slot: in the view of the
    model that drafts; target_slot: in the large model's, None for the same.
    """

    candidates: Sequence[TreeGuess]
    root_slot: int
    max_nodes: int
    max_depth: int
    table: int = 0
    urgency: float = 1.0
    asks_model: bool = True
    target_slot: int | None = None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class TreeState:
    """Growing trees of S sequences with up to C candidates each; kernels change it in place.

    candidates: int32 [S, 13, C], see the fields' properties; only the first `num_candidates` of a
    sequence mean anything. numbers: int32 [S, 8]. ancestor_words: int64 [S, C, 4], of candidates
    with a draft offset: bit j is draft offset j, its own bit included. frontier: int32 [S, F], the
    candidates that the next pass computes, -1 for none; at first the root. sequence_index: int64
    [S * F], row_starts and root_slots: int32 [S], of frontier rows.
    """

    candidates: Tensor
    numbers: Tensor
    ancestor_words: Tensor
    frontier: Tensor
    sequence_index: Tensor
    row_starts: Tensor
    root_slots: Tensor

    @property
    def num_sequences(self) -> int:
        """Count how many trees there are."""
        return self.candidates.shape[0]

    @property
    def capacity(self) -> int:
        """Count how many candidates a tree may have, its root included."""
        return self.candidates.shape[2]

    @property
    def width(self) -> int:
        """Rows that a sequence has in a draft pass."""
        return self.frontier.shape[1]

    @property
    def token_ids(self) -> Tensor:
        """Int32 [S, C]."""
        return self.candidates[:, number(TOKEN_ID)]

    @property
    def parent(self) -> Tensor:
        """Int32 [S, C], a candidate; -1 for the root."""
        return self.candidates[:, number(PARENT)]

    @property
    def depth(self) -> Tensor:
        """Int32 [S, C], 0 for the root."""
        return self.candidates[:, number(DEPTH)]

    @property
    def sources(self) -> Tensor:
        """Int32 [S, C], the guess's sources; the recalled bit too."""
        return self.candidates[:, number(SOURCES)]

    @property
    def evidence(self) -> Tensor:
        """Int32 [S, C], the kind of guess that is calibrated."""
        return self.candidates[:, number(EVIDENCE)]

    @property
    def is_expanded(self) -> Tensor:
        """Int32 [S, C], 1 where the small model has named the children."""
        return self.candidates[:, number(IS_EXPANDED)]

    @property
    def draft_offset(self) -> Tensor:
        """Int32 [S, C], the slot behind the root's in the draft view; -1 where not computed."""
        return self.candidates[:, number(DRAFT_OFFSET)]

    @property
    def model_confidence(self) -> Tensor:
        """Float32 [S, C], the small model's; 0 where it did not name the token."""
        return self.candidates[:, number(MODEL_CONFIDENCE)].view(torch.float32)

    @property
    def text_confidence(self) -> Tensor:
        """Float32 [S, C], the highest of the others'."""
        return self.candidates[:, number(TEXT_CONFIDENCE)].view(torch.float32)

    @property
    def confidence(self) -> Tensor:
        """Float32 [S, C], what the two come to together."""
        return self.candidates[:, number(CONFIDENCE)].view(torch.float32)

    @property
    def edge_prob(self) -> Tensor:
        """Float32 [S, C], the chance that it is right where its parent was."""
        return self.candidates[:, number(EDGE_PROB)].view(torch.float32)

    @property
    def path_prob(self) -> Tensor:
        """Float32 [S, C], the chance that its whole path is accepted."""
        return self.candidates[:, number(PATH_PROB)].view(torch.float32)

    @property
    def covered(self) -> Tensor:
        """Float32 [S, C], the sum of the children's edge probabilities."""
        return self.candidates[:, number(COVERED)].view(torch.float32)

    @property
    def num_candidates(self) -> Tensor:
        """Int32 [S], roots included."""
        return self.numbers[:, number(NUM_CANDIDATES)]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class CandidateFields:
    """The host's part of grown trees: n candidates each, only the first ones real.

    fields: int32 [S, 13, n], the beginning of `TreeState.candidates`. num_candidates: int32 [S].
    """

    fields: npt.NDArray[np.int32]
    num_candidates: npt.NDArray[np.int32]

    @classmethod
    def of_drafter_payload(
        cls, drafter_payload: npt.NDArray[np.int32], num_trees: int
    ) -> "CandidateFields":
        """From `TreeState.numbers` and the beginning of its candidates, one after the other."""
        num_numbers = num_trees * number(NUM_NUMBERS)
        numbers = drafter_payload[:num_numbers].reshape(num_trees, number(NUM_NUMBERS))
        fields = drafter_payload[num_numbers:].reshape(num_trees, number(NUM_FIELDS), -1)
        return cls(fields=fields, num_candidates=numbers[:, number(NUM_CANDIDATES)])

    def of_tree(self, tree: int) -> "GrownTree":
        """One tree's candidates."""
        own = self.fields[tree, :, : self.num_candidates[tree]]
        first_real = number(MODEL_CONFIDENCE)
        columns: list[Any] = own[:first_real].tolist()
        columns += np.ascontiguousarray(own[first_real:]).view(np.float32).tolist()
        return GrownTree(**dict(zip(GrownTree.__dataclass_fields__, columns, strict=True)))


@dataclass(slots=True, kw_only=True)
class GrownTree:
    """One sequence's candidates as lists, in the order of their fields in `TreeState`."""

    token_id: list[int]
    parent: list[int]
    depth: list[int]
    sources: list[int]
    evidence: list[int]
    is_expanded: list[int]
    draft_offset: list[int]
    model_confidence: list[float]
    text_confidence: list[float]
    confidence: list[float]
    edge_prob: list[float]
    path_prob: list[float]
    covered: list[float]

    def children(self, node: int) -> list[int]:
        """In the order in which they came."""
        return [child for child, parent in enumerate(self.parent) if parent == node]


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
    if not 1 <= width < MAX_TREE_SLOTS:
        raise ValueError(f"width={width} must be in [1, {MAX_TREE_SLOTS - 1}]")
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
    starts = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes)]).tolist()
    flat = np.zeros(max(starts[-1], 1), dtype=np.int32)
    _fill(flat, trees, starts, num_initial, width, recalled_bit)
    uploaded = upload(flat, device)
    parts = [uploaded[start : start + size] for start, size in zip(starts[:-1], sizes, strict=True)]
    candidates = torch.empty(
        (num_trees, num_fields, capacity), dtype=torch.int32, device=device
    )  # [S, 13, C]
    candidates[:, :, :num_initial] = parts[0].view(num_trees, num_fields, num_initial)
    words = torch.empty((num_trees, capacity, NUM_WORDS), dtype=torch.int64, device=device)
    # The root sees its own slot.
    words[:, 0] = 0
    words[:, 0, 0] = 1
    return TreeState(
        candidates=candidates,
        numbers=parts[1].view(num_trees, number(NUM_NUMBERS)),
        ancestor_words=words,
        frontier=parts[2].view(num_trees, width),
        sequence_index=parts[3].view(torch.int64),
        row_starts=parts[4],
        root_slots=parts[5],
    )


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
