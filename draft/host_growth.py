"""Trees that grow on the host: between two draft passes the host reads logits and picks nodes."""

from collections.abc import Generator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from outrider.draft.budget.budget import NOTHING_READ, StepBudget
from outrider.draft.config import DraftConfig
from outrider.draft.draft_state import Draft
from outrider.draft.guesses.compiled_levels import CompiledLevels
from outrider.draft.guesses.model_guesses import ModelGuesses, Slices
from outrider.draft.heads.protocol import BlockLayout
from outrider.draft.node_selection import least_chance, select_nodes, weighted_probs
from outrider.draft.trees.tree_batch import choose_frontiers
from outrider.engine.protocols import DraftLogits, DraftPass, Proposal, Trees


class Growth(Protocol):
    """Grows the trees of a step by passes of a model that drafts."""

    def grow(
        self, growers: SequenceOf[Draft], drafts: SequenceOf[Draft], step: StepBudget | None
    ) -> Proposal:
        """Grow the trees of `growers`; return the likeliest nodes of all `drafts`."""


class HostGrowth:
    """The growth of trees whose every level the host chooses."""

    def __init__(self, *, model: ModelGuesses, config: DraftConfig) -> None:
        self._model = model
        self._config = config

    @property
    def block(self) -> BlockLayout | None:
        """The rows of the one pass that guesses all depths; None where a pass guesses one."""
        return self._model.block

    def num_missing(self, draft: Draft) -> int:
        """Count the rows that a sequence's first pass has."""
        return self._model.num_missing(draft)

    def grow(
        self, growers: SequenceOf[Draft], drafts: SequenceOf[Draft], step: StepBudget | None
    ) -> Proposal:
        """Run draft passes while one is worth its time; see `Growth`."""
        yield from self.run_passes(growers, drafts, step)
        return Trees(host=select_nodes(drafts, least_chance(drafts, step)))

    def run_passes(
        self, growers: SequenceOf[Draft], drafts: SequenceOf[Draft], step: StepBudget | None
    ) -> Generator[DraftPass, DraftLogits, None]:
        """Run draft passes while one is worth its time."""
        slices = self._model.catch_up_slices(growers, step)
        levels = self._model.first_levels(slices, drafts, step)
        num_read: Mapping[str, int] = rows_read(slices)
        while slices:
            growing = yield from _run(levels)
            if growing is None:
                if step is not None:
                    step.spend(sum(len(piece.token_ids) for _, piece in slices), num_read)
                    num_read = NOTHING_READ
                logits = yield self._model.draft_pass(slices)
                self._model.receive(slices, logits.of_slices, logits.hidden)
                growing = yield from _run(self._model.later_levels(growers, drafts, step))
            if growing is None:
                growing = self.next_level(growers, drafts, step)
            slices, levels = self._model.next_slices(growing), None

    def next_level(
        self, growers: SequenceOf[Draft], drafts: SequenceOf[Draft], step: StepBudget | None
    ) -> list[Draft]:
        """The drafts whose next level is worth a pass; their frontiers are chosen."""
        config = self._config
        able = [draft for draft in growers if self._model.can_grow(draft) and draft.may_ask_model]
        chosen = choose_frontiers(
            [draft.tree for draft in able],
            max_frontier=config.max_frontier,
            min_path_prob=config.min_path_prob,
        )
        growing: list[Draft] = []
        gained, num_rows = 0.0, 0
        for draft, (own_rows, gain) in zip(able, chosen, strict=True):
            if gain is not None:
                # A cascade says something behind every node that is computed.
                chance = 1.0 if draft.needs_root else draft.acceptance.value
                gained += gain * chance * draft.urgency
                num_rows += own_rows
                growing.append(draft)
        if step is None or not growing:
            return growing
        is_worth_it = step.is_worth_a_pass(
            weighted_probs(drafts),
            tokens_gained=gained,
            num_rows=num_rows,
            num_trees=len(growing),
        )
        return growing if is_worth_it else []


def rows_read(slices: Slices) -> dict[str, int]:
    """Count the rows of each request's text in a first pass, less its root."""
    return {
        draft.sequence.request_id: len(piece.token_ids) - piece.num_logit_rows
        for draft, piece in slices
    }


def _run(levels: CompiledLevels | None) -> Generator[DraftPass, DraftLogits, list[Draft] | None]:
    """Have levels run; return the drafts that go on by the host, None where nobody ran them."""
    if levels is None:
        return None
    yield DraftPass(slices=[], owners=levels.owners, levels=levels)
    return levels.left if levels.was_run else None
