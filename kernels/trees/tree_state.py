"""Trees of guesses while they grow on the device: their layout.

A sequence's candidates are rows of one int32 tensor, a field each; probabilities are float32 bits
in it. So one copy takes everything to the device or back, and one pointer gives a kernel all of it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kernels.triton_support import jit, tl

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
    """Return one of the names above as the host reads it."""
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
    """Warps of a program that holds so many candidates: two a thread, four at `MAX_CAPACITY`."""
    return min(max(capacity // 64, 1), 8)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class TreeState:
    """Growing trees of S sequences with up to C candidates each; kernels change it in place."""

    candidates: Tensor
    """int32 [S, 13, C], see the properties below. Only the first `num_candidates` of a sequence
    mean anything."""
    numbers: Tensor
    """int32 [S, 8]."""
    ancestor_words: Tensor
    """int64 [S, C, 4], of candidates with a draft offset. Bit j is draft offset j, its own
    included."""
    frontier: Tensor
    """int32 [S, F], the candidates that the next pass computes; -1 for none. At first the root."""
    sequence_index: Tensor
    """int64 [S * F], of frontier rows."""
    row_starts: Tensor
    """int32 [S], of frontier rows."""
    root_slots: Tensor
    """int32 [S], of frontier rows."""

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

    def first(self, num_trees: int) -> "TreeState":
        """Return the first so many trees; the same memory."""
        num_rows = num_trees * self.width
        return TreeState(
            candidates=self.candidates[:num_trees],
            numbers=self.numbers[:num_trees],
            ancestor_words=self.ancestor_words[:num_trees],
            frontier=self.frontier[:num_trees],
            sequence_index=self.sequence_index[:num_rows],
            row_starts=self.row_starts[:num_trees],
            root_slots=self.root_slots[:num_trees],
        )

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
    """The host's part of grown trees: n candidates each, only the first ones real."""

    fields: npt.NDArray[np.int32]
    """int32 [S, 13, n], the beginning of `TreeState.candidates`."""
    num_candidates: npt.NDArray[np.int32]
    """int32 [S]."""

    def of_tree(self, tree: int) -> "GrownTree":
        """Return one tree's candidates."""
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
        """Return the children in the order in which they came."""
        return [child for child, parent in enumerate(self.parent) if parent == node]
