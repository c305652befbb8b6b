"""One step's trees on the device: begun by the host, grown without it, read as a forest."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from outrider.draft.budget.budget import MOST_BELIEVED
from outrider.draft.budget.calibration import (
    BIN_EDGES,
    DEPTH_CLASS,
    LEAST_LIKELY,
    MOST_LIKELY,
    EdgeCalibration,
)
from outrider.draft.config import DraftConfig
from outrider.draft.draft_state import Draft
from outrider.draft.forecast import Grower
from outrider.draft.guesses.model_guesses import ModelGuesses
from outrider.draft.trees.grown_trees import pack_state
from outrider.draft.trees.tree_candidate import TreeCandidate
from outrider.engine.cache.block_pool import OutOfBlocksError
from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.device_rows import DeviceRows
from outrider.engine.passes.level_graphs import LevelGraphs, RecordedTrees
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.protocols import DraftModel
from outrider.engine.trees.forest import Forest, ForestDrafts, num_free_slots
from outrider.kernels.sampling.sample import SamplingTable, top_tokens
from outrider.kernels.trees.choose_frontier import FrontierRows, choose_frontier
from outrider.kernels.trees.expand_tree import EdgeTable, expand_tree
from outrider.kernels.trees.initial_trees import InitialTree, capacity_for, init_trees
from outrider.kernels.trees.parent_rows import keep_rows, parent_rows
from outrider.kernels.trees.select_trees import select_trees
from outrider.kernels.trees.tree_state import MAX_CAPACITY, TreeState
from outrider.kernels.upload import upload
from outrider.verifier.sampling import forest_sampling_rows
from outrider.verifier.token_tree import RECALLED_BIT, SOURCE_BIT

# The source that each model is.
MODEL_BIT: Final[dict[DraftModel, int]] = {
    "small": SOURCE_BIT["model"],
    "head": SOURCE_BIT["head"],
}
# The kernels name so many children of a node at most.
MAX_BRANCHING: Final = 8


class DeviceCalibration:
    """`EdgeCalibration` as the device reads it: taken there again whenever it has learnt."""

    def __init__(self, calibration: EdgeCalibration, device: torch.device) -> None:
        self._calibration = calibration
        self._device = device
        self._version = -1
        self._bin_edges = upload(np.array(BIN_EDGES, dtype=np.float32), device)
        classes = np.array(DEPTH_CLASS)
        edges = np.flatnonzero(np.diff(classes)) + 1  # where the next class begins
        self._depth_edges = upload(edges.astype(np.int32), device)
        self._table: EdgeTable | None = None

    def table(self, model: DraftModel = "small") -> EdgeTable:
        """The present one for what a model names; number 1 is for greedy requests, 0 for others."""
        if self._table is None or self._version != self._calibration.version:
            self._version = self._calibration.version
            self._table = EdgeTable(
                shifts=upload(self._calibration.shifts(), self._device),
                bin_edges=self._bin_edges,
                depth_edges=self._depth_edges,
                least=LEAST_LIKELY,
                most=MOST_LIKELY,
                model_bit=MODEL_BIT["small"],
            )
        return self._table if model == "small" else replace(self._table, model_bit=MODEL_BIT[model])


@dataclass(eq=False, slots=True, kw_only=True)
class DeviceTrees:
    """Trees of a step whose roots the model that drafts has computed."""

    drafts: list[Draft]
    growers: list[Grower]
    model: ModelGuesses
    views: list[KVView]
    """Each draft's, with slots reserved for its root and `width` nodes a level. A tree without
    slots for levels has only its root expanded."""
    config: DraftConfig
    num_levels: int
    """Passes behind the roots'."""
    num_initial: int
    max_depth: int
    """Bound of all candidates' depths."""
    state: TreeState
    table: EdgeTable
    sampling: SamplingTable
    vocab_size: int
    token_ids: Tensor | None = None
    """The target's, of each logit of a head; None for the same vocabulary."""
    hidden: Tensor | None = None
    """What a head's rows gave, by draft offset, [num_trees, number of offsets, feature_size]. None
    for a model that reads no features."""
    recorded: RecordedTrees | None = None
    """The same trees where their levels are recorded graphs; None where they are launched in
    pieces."""
    level: int = 0
    """Passes made so far, of `num_levels`."""
    _rows: FrontierRows | None = None

    # ---- the levels ------------------------------------------------------------------------

    def expand_roots(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        """Name the children of all roots; `logits`: float32 [num_trees, vocab_size].

        `hidden`: what the roots' rows gave, [num_trees, feature_size], where features are read.
        """
        width = self.config.max_frontier
        if self.hidden is not None:
            assert hidden is not None, "a head's pass gives hidden states"
            self.hidden[:, 0] = hidden
        index = self.state.sequence_index[::width]
        self._expand(logits, index, torch.zeros_like(index))

    def expand_block(self, logits: Tensor) -> None:
        """Name what one pass says of all depths: float32 [num_trees * num_depths, vocab_size].

        All nodes of a tree at a depth have the same children, so no level waits for a pass.
        """
        width, num_trees = self.config.max_frontier, len(self.drafts)
        num_depths = len(logits) // num_trees
        roots = self.state.sequence_index[::width]
        every_depth = torch.arange(num_depths, device=logits.device)
        token_ids, probs = self._likeliest(
            logits, roots.repeat_interleave(num_depths), every_depth.repeat(num_trees)
        )
        floor = self.config.min_path_prob
        rows = roots * num_depths
        expand_tree(self.state, token_ids[rows], probs[rows], self.table, min_path_prob=floor)
        while self.level < self.num_levels:
            self.level += 1
            chosen = self._choose_frontier()
            rows = chosen.sequence_index * num_depths + chosen.depth.clamp(max=num_depths - 1)
            expand_tree(self.state, token_ids[rows], probs[rows], self.table, min_path_prob=floor)

    def next_level(self) -> bool:
        """Begin the next level, if there is one: `rows` or a replay of `recorded` comes next.

        Trees grow no further once a view has been reclaimed, for its blocks are others' now.
        """
        are_there = all(
            self.model.view_of(draft) is view
            for draft, view in zip(self.drafts, self.views, strict=True)
        )
        if self.level >= self.num_levels or not are_there:
            return False
        self.level += 1
        self._rows = None
        return True

    def rows(self) -> DeviceRows:
        """Choose what the level's draft pass computes; `receive` takes in what it gives."""
        rows = self._rows = self._choose_frontier()
        return DeviceRows(
            views=list(self.views),
            token_ids=rows.token_ids,
            positions=rows.positions,
            logical_slots=rows.logical_slots,
            sequence_index=rows.sequence_index,
            ancestor_words=rows.ancestor_words,
            row_starts=rows.row_starts,
            num_rows=rows.num_rows,
            tree_starts=rows.tree_starts,
            kv_lens=rows.kv_lens,
        )

    def _choose_frontier(self) -> FrontierRows:
        return choose_frontier(
            self.state,
            min_path_prob=self.config.min_path_prob,
            most_believed=MOST_BELIEVED,
            is_stepwise=self.hidden is not None,
        )

    def features(self) -> Tensor | None:
        """Return what the level's rows carry: what their parents' gave, zeros in padding."""
        return None if self.hidden is None else parent_rows(self.state, self.hidden)

    @torch.inference_mode()
    def receive(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        """Name the children of the nodes of `rows`; float32 [num_rows, vocab_size].

        `hidden`: what their rows gave, [num_rows, feature_size], where features are read.
        """
        assert self._rows is not None
        if self.hidden is not None:
            assert hidden is not None, "a head's pass gives hidden states"
            keep_rows(self.state, hidden, self.hidden)
        self._expand(logits, self._rows.sequence_index, self._rows.depth)

    def _expand(self, logits: Tensor, sequence_index: Tensor, depth: Tensor) -> None:
        """Add the best children, ranked as the target will rank."""
        token_ids, probs = self._likeliest(logits, sequence_index, depth)
        floor = self.config.min_path_prob
        expand_tree(self.state, token_ids, probs, self.table, min_path_prob=floor)

    def _likeliest(
        self, logits: Tensor, sequence_index: Tensor, depth: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Each row's best tokens and their chances, [num_rows, branching]."""
        if self.token_ids is None:
            logits = logits[:, : self.vocab_size]
        branching = min(self.config.max_branching, MAX_BRANCHING, logits.shape[1])
        rows = self.sampling.rows(sequence_index.contiguous(), depth)
        best = top_tokens(logits, rows, branching, with_probs=True, ids=self.token_ids)
        assert best.probs is not None
        # Given the shared noise, the chance that the target agrees follows from a token's lead.
        return best.token_ids, best.probs

    # ---- the forest ------------------------------------------------------------------------

    def forest(self, caps: list[int], num_nodes: int, drafts: ForestDrafts) -> Forest:
        """The likeliest guesses of all trees, at most `num_nodes`, and at most caps[i] of tree i.

        Their slots must be reserved in the sequences' views.
        """
        chosen = select_trees(self.state, num_nodes=num_nodes, caps=caps)
        branching = min(self.config.max_branching, MAX_BRANCHING)
        most = self.num_initial + branching * (1 + self.level * self.config.max_frontier)
        return Forest(
            sequences=[draft.sequence for draft in self.drafts],
            drafts=drafts,
            sampling=self.sampling,
            max_depth=self.max_depth,
            max_nodes=1 + max(caps),
            token_ids=chosen.token_ids,
            parent_index=chosen.parent_index,
            depth=chosen.depth,
            tree_index=chosen.tree_index,
            sequence_index=chosen.sequence_index,
            positions=chosen.positions,
            logical_slots=chosen.logical_slots,
            ancestor_words=chosen.ancestor_words,
            row_starts=chosen.row_starts,
            num_rows=chosen.num_rows,
            tree_starts=chosen.tree_starts,
            kv_lens=chosen.kv_lens,
            sources=chosen.sources,
            candidates=chosen.candidates,
            draft_offsets=chosen.draft_offsets,
            drafter_payload=pack_state(self.state, min(most, self.state.capacity)),
        )


def init_trees_on_device(  # noqa: PLR0913 - all that trees are begun with
    drafts: list[Draft],
    growers: list[Grower],
    *,
    model: ModelGuesses,
    runner: ModelRunner,
    vocab_size: int,
    config: DraftConfig,
    table: EdgeTable,
    num_levels: int,
    levels: LevelGraphs | None = None,
) -> DeviceTrees:
    """Take the drafts' trees as they are to the device; nothing waits for it.

    `model`: whose passes have computed the drafts' roots in its views, and runner: its runner.
    `vocab_size`: of ids that both models know.
    `num_levels`: passes that are wanted behind the roots'; as many are made as there are slots for.
    `levels`: recorded ones, where there are any.
    """
    width, branching = config.max_frontier, min(config.max_branching, MAX_BRANCHING)
    views = [model.view_of(draft) for draft in drafts]
    known = [view for view in views if view is not None]
    assert len(known) == len(drafts), "the roots are computed"
    if model.block is None:
        reserved = _reserve_levels(runner, drafts, known, num_levels, width)
    else:  # no node is computed
        reserved = [num_levels] * len(drafts)
    num_levels = max(reserved)
    room = max(MAX_CAPACITY - branching * (1 + num_levels * width), 1)
    initial = [
        InitialTree(
            candidates=_known_to_both(draft.tree.candidates, vocab_size)[:room],
            root_slot=draft.tree.root_slot,
            target_slot=len(draft.sequence.token_ids) - 1,
            max_nodes=draft.tree.max_nodes,
            max_depth=min(draft.tree.max_depth, 1 + own_levels),  # and so many passes
            table=int(draft.sequence.request.sampling.is_greedy),
            urgency=draft.urgency,
        )
        for draft, own_levels in zip(drafts, reserved, strict=True)
    ]
    num_initial = max(len(tree.candidates) for tree in initial)
    deepest = max(candidate.depth for tree in initial for candidate in tree.candidates)
    max_depth = max(deepest, min(max(tree.max_depth for tree in initial), deepest + 1 + num_levels))
    capacity = capacity_for(num_initial, num_levels=num_levels, width=width, branching=branching)
    sampling = forest_sampling_rows([draft.sequence for draft in drafts], max_depth, runner.device)
    recorded: RecordedTrees | None = None
    if levels is not None:
        recorded = levels.begin(
            initial,
            known,
            sampling=sampling,
            table=table,
            num_levels=num_levels,
            capacity=capacity,
        )
    if recorded is not None:
        state, hidden = recorded.state, recorded.hidden
    else:
        state = init_trees(
            initial, capacity=capacity, width=width, recalled_bit=RECALLED_BIT, device=runner.device
        )
        hidden = None
        if model.block is None and (feature_size := runner.model.feature_size):
            shape = (len(drafts), 1 + num_levels * width, feature_size)
            hidden = torch.empty(shape, dtype=runner.model.dtype, device=runner.device)
    return DeviceTrees(
        drafts=drafts,
        growers=growers,
        model=model,
        views=known,
        config=config,
        num_levels=num_levels,
        num_initial=num_initial,
        max_depth=max_depth,
        state=state,
        table=table,
        sampling=sampling,
        vocab_size=vocab_size,
        token_ids=model.token_ids,
        hidden=hidden,
        recorded=recorded,
    )


def _reserve_levels(
    runner: ModelRunner,
    drafts: list[Draft],
    views: list[KVView],
    num_levels: int,
    width: int,
) -> list[int]:
    """Reserve draft slots behind the roots; return the number of levels reserved for each draft.

    Drafts never pre-empt a sequence; where free blocks are scarce the drafts share them.
    """
    levels = []
    for number, (draft, view) in enumerate(zip(drafts, views, strict=True)):
        first_slot = draft.tree.root_slot + 1
        room = num_free_slots(view, first_slot, num_sharing=len(drafts) - number)
        own_levels = min(num_levels, room // width)
        try:
            copies = view.reserve(first_slot + own_levels * width)
        except OutOfBlocksError:  # a copy of a shared block took the last one
            copies, own_levels = [], 0
        runner.copy_blocks(copies)
        levels.append(own_levels)
    return levels


def _known_to_both(candidates: list[TreeCandidate], vocab_size: int) -> list[TreeCandidate]:
    """The candidates on paths of tokens that both models know."""
    if all(candidate.token_id < vocab_size for candidate in candidates[1:]):
        return candidates
    index_of = {0: 0}
    kept = [candidates[0]]
    for index, candidate in enumerate(candidates[1:], start=1):
        if candidate.token_id < vocab_size and candidate.parent in index_of:
            index_of[index] = len(kept)
            kept.append(replace(candidate, parent=index_of[candidate.parent]))
    return kept
