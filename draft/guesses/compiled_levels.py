"""Grows the trees of a step by one call of the compiled library, as long as a level is worth it.

The call does what `outrider.draft.host_growth` does level by level: it runs the small model's pass,
ranks its logits, adds the children, chooses frontiers, and decides by the step's budget. It comes
back for what only the host can do: more blocks, and children that are not simply a row's greatest
logits (they are drawn, or a rule, a grammar or a cascade has a say).
"""

import ctypes
from array import array
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.draft.budget.budget import Floats, StepBudget
from outrider.draft.config import DraftConfig
from outrider.draft.draft_state import Draft
from outrider.draft.trees.compiled_tree import CompiledTree, tree_addresses
from outrider.engine.passes.pass_clock import PassTime
from outrider.engine.passes.runner import ForwardSlice
from outrider.engine.sequences.sequence import Sequence
from outrider.kernels.cpu.level_library import (
    MOST_LEVELS,
    LevelBudgetStruct,
    LevelPassStruct,
    LevelsCall,
    LevelsEnd,
    LevelTreeStruct,
    grow_levels,
)
from outrider.kernels.cpu.row_attention import TILE_ROWS
from outrider.kernels.layers.compiled_pass import FEW_SPARE_ROWS, MAX_ROWS, WholePass
from outrider.kernels.sampling.likeliest import MOST_COMPILED
from outrider.verifier.sampling import takes_greatest

if TYPE_CHECKING:
    from outrider.draft.guesses.model_guesses import ModelGuesses

_ROWS_PER_TARGET = 4  # kRowsPerTarget in tree.cpp


class CompiledLevels:
    """The levels of one step; see `outrider.engine.protocols.DraftLevels`.

    `growers`: the drafts that may grow, whose trees are all compiled ones. `drafts`: of the step.
    `first`: the rows of the growers' texts up to their roots; none where these are computed.
    """

    def __init__(
        self,
        model: "ModelGuesses",
        whole: WholePass,
        *,
        config: DraftConfig,
        growers: SequenceOf[Draft],
        drafts: SequenceOf[Draft],
        step: StepBudget | None,
        first: SequenceOf[ForwardSlice],
    ) -> None:
        self._model = model
        self._whole = whole
        self._config = config
        self._growers = growers
        self._drafts = drafts
        self._step = step
        self._first = array("q", [token for piece in first for token in piece.token_ids])
        self._growing = (LevelTreeStruct * len(growers))()
        for own, piece in zip(self._growing, first, strict=False):
            own.num_first, own.is_growing = len(piece.token_ids), True
        self.was_run = False
        self.left: list[Draft] = []
        """Drafts whose next rows are chosen, but too many for the library."""

    @property
    def owners(self) -> list[Sequence]:
        """The sequences of the drafts that may grow."""
        return [draft.sequence for draft in self._growers]

    @property
    def num_rows_each(self) -> list[int]:
        """Rows computed for each of the drafts that may grow."""
        return [own.num_rows for own in self._growing]

    def run(self) -> None:
        """Run them; see `DraftLevels`."""
        self.was_run = True
        call, logits, held = self._begin()
        end = LevelsEnd.NO_ROOM
        while end is not LevelsEnd.OVER:
            blocks = self._note_room()
            call.blocks = blocks.buffer_info()[0]
            end = grow_levels(call, torch.get_num_threads())
            if call.first_token_ids:
                call.first_token_ids = None
                for draft in self._growers:
                    self._model.has_root(draft)
            growing = [
                draft
                for draft, own in zip(self._growers, self._growing, strict=True)
                if own.is_growing
            ]
            call.is_chosen = end is LevelsEnd.NO_ROOM
            if end is LevelsEnd.NO_ROOM:
                self._make_room(growing)
            elif end is LevelsEnd.UNRANKED:
                number = held.passes[call.num_passes - 1].num_logit_rows
                self._model.add_children(growing, logits[:number])
            elif end is LevelsEnd.TOO_MANY:
                self.left = growing
                break
        held.note(self._model, call.num_passes)
        if self._step is not None:
            self._step.passes_s = held.budget.passes_s
            self._step.num_levels = held.budget.num_levels

    def _begin(self) -> tuple[LevelsCall, Tensor, "_Held"]:
        """Return the call, where its logits will stand, and what it has the addresses of."""
        config, whole, runner = self._config, self._whole, self._model.runner
        most_rows = len(self._growers) * config.max_frontier * _ROWS_PER_TARGET
        most_rows = max(most_rows, len(self._first))
        for own, draft in zip(self._growing, self._growers, strict=True):
            draft.state.was_asked = True
            own.tree = _compiled(draft).address
            # A cascade says something behind every node that is computed.
            own.chance = 1.0 if draft.needs_root else draft.acceptance.value
            own.urgency = draft.urgency
        logits = torch.empty((min(most_rows, MAX_ROWS), whole.num_logits), dtype=torch.float32)
        held = _Held(self._drafts, self._step, most_rows)
        window = runner.model.config.sliding_window
        call = LevelsCall(
            num_growing=len(self._growers),
            num_trees=len(self._drafts),
            growing=ctypes.addressof(self._growing),
            trees=held.trees.buffer_info()[0],
            weights=held.weights.buffer_info()[0],
            budget=None if self._step is None else ctypes.addressof(held.budget),
            first_token_ids=self._first.buffer_info()[0] if self._first else None,
            model=whole.model,
            caches=whole.caches,
            num_layers=whole.num_layers,
            block_size=runner.block_size,
            window=window or 0,
            has_full=runner.model.config.has_mixed_windows,
            tile_rows=TILE_ROWS,
            max_rows=MAX_ROWS,
            max_frontier=config.max_frontier,
            num_children=min(config.max_branching, whole.num_logits),
            min_path_prob=config.min_path_prob,
            is_ranked=self._is_ranked(),
            logits=logits.data_ptr(),
            passes=ctypes.addressof(held.passes),
        )
        return call, logits, held

    def _is_ranked(self) -> bool:
        """True if all children are a row's greatest logits, and nothing comes of them."""
        return self._config.max_branching <= MOST_COMPILED and all(
            takes_greatest(draft.sequence)
            and draft.sequence.grammar is None
            and not draft.tree.keeps_logits
            for draft in self._growers
        )

    def _note_room(self) -> "array[int]":
        """Say how many slots each view has; return the block tables, one behind the other."""
        blocks = array("q")
        block_size = self._model.runner.block_size
        for own, draft in zip(self._growing, self._growers, strict=True):
            table = _block_table(draft)
            own.first_block, own.num_slots = len(blocks), len(table) * block_size
            blocks.extend(table)
        return blocks

    def _make_room(self, growing: SequenceOf[Draft]) -> None:
        """Reserve slots for the chosen rows, and stop what finds none."""
        able = {id(draft) for draft in growing if self._model.reserve_frontier(draft)}
        for own, draft in zip(self._growing, self._growers, strict=True):
            own.is_growing = id(draft) in able


class _Held:
    """What a call reads and writes by address."""

    def __init__(self, drafts: SequenceOf[Draft], step: StepBudget | None, most_rows: int) -> None:
        trees = [_compiled(draft) for draft in drafts]
        self.trees = tree_addresses(trees)
        self.weights = array("d", [draft.urgency for draft in drafts])
        self.passes = (LevelPassStruct * MOST_LEVELS)()
        self.budget = LevelBudgetStruct()
        if step is None:
            return
        self._tables = (
            step.target_s(sum([tree.max_nodes for tree in trees]) + len(trees)),
            step.draft_pass_s.each(most_rows, step.context),
        )
        self.budget.target_s, self.budget.draft_s = map(_address, self._tables)
        self.budget.num_levels = step.num_levels
        self.budget.base_tokens, self.budget.longest_s = step.base_tokens, step.room_s
        self.budget.step_host_s, self.budget.part_host_s = step.step_host_s, step.part_host_s
        self.budget.passes_s = step.passes_s

    def note(self, model: "ModelGuesses", num_passes: int) -> None:
        """Tell the model's runner of its passes."""
        for done in self.passes[:num_passes]:
            taken = PassTime(
                num_rows=done.num_rows,
                num_logit_rows=done.num_logit_rows,
                seconds=done.work_s,
                mean_context=done.mean_context,
            )
            model.runner.note_pass(taken, done.whole_s)


def compiled_levels(
    model: "ModelGuesses",
    *,
    config: DraftConfig,
    growers: SequenceOf[Draft],
    drafts: SequenceOf[Draft],
    step: StepBudget | None,
    first: SequenceOf[ForwardSlice] = (),
) -> CompiledLevels | None:
    """Return the levels of trees; None where the library cannot run them.

    Then the trees or the model's passes are not compiled, the small model has an adapter, or the
    first rows are many or are not all that is missing.
    """
    if not growers or not isinstance(growers[0].tree, CompiledTree):
        return None
    views = [draft.state.view for draft in growers]
    if any(view is None or view.adapter is not None for view in views):
        return None
    num_first = sum(len(piece.token_ids) for piece in first)
    is_complete = all(piece.num_logit_rows for piece in first)
    # The host's way through a pass takes longer the more sequences it has.
    num_spare = FEW_SPARE_ROWS + len(first)
    if num_first > min(MAX_ROWS, len(first) + num_spare) or not is_complete:
        return None
    whole = model.runner.whole_pass()
    if whole is None:
        return None
    return CompiledLevels(
        model, whole, config=config, growers=growers, drafts=drafts, step=step, first=first
    )


def _compiled(draft: Draft) -> CompiledTree:
    assert isinstance(draft.tree, CompiledTree), "all trees of a drafter are of one kind"
    return draft.tree


def _block_table(draft: Draft) -> list[int]:
    assert draft.state.view is not None, "what grows has a view"
    return draft.state.view.block_table


def _address(numbers: Floats) -> int:
    found: int = numbers.__array_interface__["data"][0]
    return found
