"""Trees of several sequences whose content only the device knows until they are judged.

The host knows how many rows there are and whose they are. It learns the rest together with the
verdicts, from one device-to-host copy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.cache.block_pool import OutOfBlocksError
from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.device_rows import DeviceRows
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.sequences.sequence import Sequence
from outrider.kernels.arrays import Ints64
from outrider.kernels.sampling.sampling_rows import SamplingTable
from outrider.verifier.token_tree import TokenTree
from outrider.verifier.verdict import ForestVerdicts, Verdict


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Forest:
    """One tree a sequence, laid out flat; each begins with its root, the sequence's last token.

    Tree b has the rows `row_starts[b]` to `row_starts[b] + num_rows[b]`, parents before children. A
    row's place in its tree is its logical slot behind the root's. Padding stands at the end.
    """

    sequences: list[Sequence]
    sampling: SamplingTable
    """The sampling of each sequence, by tree and depth."""
    max_depth: int
    """Bounds all depths."""
    max_nodes: int
    """Bounds the nodes of a tree, its root included."""
    token_ids: Tensor
    """int64 [num_rows], 0 in padding."""
    parent_index: Tensor
    """int64 [num_rows], a flat row; -1 for roots and padding."""
    depth: Tensor
    """int64 [num_rows], 0 in padding."""
    tree_index: Tensor
    """int64 [num_rows], -1 for padding."""
    sequence_index: Tensor
    """int64 [num_rows], `tree_index` with 0 for padding."""
    positions: Tensor
    """int64 [num_rows], 0 in padding."""
    logical_slots: Tensor
    """int64 [num_rows], -1 for padding."""
    ancestor_words: Tensor
    """int64 [num_rows, num_words]; bit j is node j of the row's tree, its own included."""
    row_starts: Tensor
    """int32 [num_trees]."""
    num_rows: Tensor
    """int32 [num_trees]."""
    tree_starts: Tensor
    """int32 [num_trees], the root's logical slot."""
    kv_lens: Tensor
    """int32 [num_trees], logical slots up to the tree's last node."""
    sources: Tensor
    """int64 [num_rows], the sources of a node (`SOURCE_BIT`, `RECALLED_BIT`)."""
    candidates: Tensor
    """int64 [num_rows], what the drafter calls the node."""
    draft_offsets: Tensor
    """int64 [num_rows], its slot in the draft view behind the root's. -1 where the small model has
    not computed it; 0 for roots."""
    drafter_payload: Tensor
    """int32 [any], what the drafter wants to see on the host along with the verdicts."""
    drafts: "ForestDrafts | None" = None
    """The draft views that follow the verdicts."""

    @property
    def num_trees(self) -> int:
        """Count how many sequences have a tree here."""
        return len(self.sequences)

    @property
    def total_rows(self) -> int:
        """Rows of all trees and the padding: a number that the host knows."""
        return self.token_ids.shape[0]

    def device_rows(self) -> DeviceRows:
        """The rows as the large model's pass takes them; their slots are reserved."""
        return DeviceRows(
            views=[sequence.view for sequence in self.sequences],
            token_ids=self.token_ids,
            positions=self.positions,
            logical_slots=self.logical_slots,
            sequence_index=self.sequence_index,
            ancestor_words=self.ancestor_words,
            row_starts=self.row_starts,
            num_rows=self.num_rows,
            tree_starts=self.tree_starts,
            kv_lens=self.kv_lens,
        )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class HostForest:
    """A forest and its verdicts as the host sees them, one of each a sequence."""

    trees: list[TokenTree]
    verdicts: list[Verdict]
    first_rows: list[int]
    """Each tree's first row of the pass."""
    candidates: list[list[int]]
    """Per tree, what the drafter calls its nodes."""
    draft_offsets: list[list[int]]
    """Per tree, those of its nodes."""
    drafter_payload: npt.NDArray[np.int32]
    """int32, the drafter's."""


class ForestDrafts(Protocol):
    """The draft views of a forest's sequences; each method is called once, `keep` first."""

    def keep(self, forest: Forest, verdicts: ForestVerdicts) -> None:
        """Move the accepted paths together in the small KV cache, on the device.

        Only launched; called when the verdicts have been, too.
        """

    def commit(self, known: HostForest) -> Callable[[], None]:
        """Note what the verdicts left in the draft views; return what is to be learnt.

        Called before the emitted tokens join the sequences. The lesson may be put off until the
        device is busy with the next step.
        """


class ForestReadback:
    """The copy of a forest and its verdicts to the host, on its way.

    Making it starts the copy and does not wait. `wait` is the only wait of a step of forests alone;
    trees of the host, log-probabilities and answers of the small tier are read back besides.
    """

    def __init__(self, forest: Forest, verdicts: ForestVerdicts) -> None:
        self._forest = forest
        self._max_depth = verdicts.accepted_path.shape[1]
        wide = (
            forest.token_ids,
            forest.parent_index,
            forest.sources,
            forest.candidates,
            forest.draft_offsets,
            verdicts.accepted_path.reshape(-1),
            verdicts.emitted_tokens.reshape(-1),
        )
        packed = torch.cat(
            [
                forest.row_starts,
                forest.num_rows,
                torch.cat(wide).to(torch.int32),
                forest.drafter_payload,
            ]
        )
        self._arrived: torch.cuda.Event | None = None
        if packed.device.type == "cuda":
            # Pinned, or the copy would hold up the host; its memory is taken from torch's cache.
            host = torch.empty(packed.shape, dtype=torch.int32, pin_memory=True)
            self._packed = host.copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        else:
            self._packed = packed

    def wait(self) -> HostForest:
        """The trees and their verdicts, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        flat = self._packed.numpy()
        num_trees, num_rows = self._forest.num_trees, self._forest.total_rows
        depth = self._max_depth
        sizes = [num_trees] * 2 + [num_rows] * 5 + [num_trees * depth, num_trees * (depth + 1)]
        ends = np.cumsum(sizes)
        (
            starts,
            counts,
            tokens,
            parents,
            sources,
            candidates,
            offsets,
            path,
            emitted,
            drafter_payload,
        ) = np.split(flat, ends)
        trees = []
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            rows = slice(start, start + count)
            own_parents = parents[rows]
            trees.append(
                TokenTree(
                    token_ids=tokens[rows].tolist(),
                    parent_index=np.where(own_parents < 0, -1, own_parents - start).tolist(),
                    sources=sources[rows].tolist(),
                )
            )
        return HostForest(
            trees=trees,
            verdicts=_verdicts(
                starts, path.reshape(num_trees, depth), emitted.reshape(num_trees, depth + 1)
            ),
            first_rows=starts.tolist(),
            candidates=_by_tree(candidates, starts, counts),
            draft_offsets=_by_tree(offsets, starts, counts),
            drafter_payload=drafter_payload,
        )


def _verdicts(
    starts: npt.NDArray[np.int32], path: npt.NDArray[np.int32], emitted: npt.NDArray[np.int32]
) -> list[Verdict]:
    """Verdicts from the accepted rows [num_trees, max_depth] and the tokens [., max_depth + 1]."""
    num_accepted = (path >= 0).sum(1).tolist()
    nodes = (path - starts[:, None]).tolist()
    tokens = emitted.tolist()
    return [
        Verdict.of(nodes[tree][:number], tokens[tree][: number + 1])
        for tree, number in enumerate(num_accepted)
    ]


def _by_tree(
    values: npt.NDArray[np.int32], starts: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
) -> list[list[int]]:
    return [
        values[start : start + count].tolist()
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
    ]


# ---- keys and values ------------------------------------------------------------------------


def reserve_trees(runner: ModelRunner, sequences: list[Sequence], caps: list[int]) -> list[int]:
    """Reserve slots for the roots and at most `caps` nodes a tree; return the nodes that fit.

    Trees never pre-empt a sequence; where free blocks are scarce the trees share them. Slots up
    to the sequence's last token are reserved already.
    """
    fitting = []
    for number, (sequence, cap) in enumerate(zip(sequences, caps, strict=True)):
        root_slot = len(sequence.token_ids) - 1
        room = num_free_slots(sequence.view, root_slot + 1, num_sharing=len(sequences) - number)
        cap = min(cap, room)
        try:
            copies = sequence.view.reserve(root_slot + 1 + cap)
        except OutOfBlocksError:  # a copy of a shared block took the last one
            copies, cap = [], 0
        runner.copy_blocks(copies)
        fitting.append(cap)
    return fitting


def num_free_slots(view: KVView, first_slot: int, *, num_sharing: int) -> int:
    """Slots from a logical one on for which the view has blocks, or could take its share of them.

    `num_sharing`: how many views, this one included, want some of the pool's free blocks.
    """
    share = -(-view.pool.num_available // num_sharing)
    num_free = (len(view.block_table) + share) * view.pool.block_size - first_slot
    return max(min(num_free, view.num_tree_slots - 1), 0)


def slot_table(views: list[KVView | None], root_slots: list[int], width: int) -> Ints64:
    """Cache slots of the logical ones from each root's on, int64 [num_trees, width].

    -1 where nothing is reserved, and all over where there is no view.
    """
    table = np.full((len(views), width), -1, dtype=np.int64)
    for row, view, root_slot in zip(table, views, root_slots, strict=True):
        if view is None:
            continue
        block_size = view.pool.block_size
        first = root_slot // block_size
        blocks = np.array(view.block_table[first:], dtype=np.int64)
        slots = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)
        slots = slots[root_slot - first * block_size :][:width]
        row[: len(slots)] = slots
    return table


def path_moves(offsets: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Cache slots (sources, destinations) that put accepted paths right behind their roots.

    `offsets`: int64 [num_trees, max_depth], where the node at depth d + 1 lies behind its root's
    slot; -1 where there is none, and nothing deeper on the path is moved then. `slots`: int64
    [num_trees, width] (`slot_table`). Returns int64 [num_trees * max_depth] each, -1 for no move.
    """
    max_depth = min(offsets.shape[1], slots.shape[1] - 1)
    offsets = offsets[:, :max_depth]
    is_there = (offsets >= 0).to(torch.int32).cumprod(1) > 0  # [num_trees, max_depth]
    sources = slots.gather(1, offsets.clamp(min=0))
    destinations = slots[:, 1 : max_depth + 1]
    is_move = is_there & (sources >= 0) & (destinations >= 0) & (sources != destinations)
    return (
        sources.where(is_move, -1).reshape(-1),
        destinations.where(is_move, -1).reshape(-1),
    )
