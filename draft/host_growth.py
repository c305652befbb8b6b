"""Trees that grow on the host: between two draft passes the host reads logits and picks nodes."""

from collections.abc import Callable, Generator
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from outrider.draft.budget.budget import StepBudget
from outrider.draft.budget.level_host_times import LevelHostTimes
from outrider.draft.config import DraftConfig
from outrider.draft.draft_state import Draft
from outrider.draft.guesses.model_guesses import ModelGuesses
from outrider.draft.heads.protocol import BlockLayout
from outrider.draft.node_selection import least_chance, select_nodes, weighted_probs
from outrider.draft.trees.tree_batch import choose_frontiers
from outrider.engine.protocols import DraftLogits, DraftPass, Proposal, Trees


class Growth(Protocol):
    """Grows the trees of a step by passes of a model that drafts."""

    def grow(
        self,
        growers: SequenceOf[Draft],
        drafts: SequenceOf[Draft],
        step: StepBudget | None,
        spent_s: float = 0.0,
    ) -> Proposal:
        """Grow the trees of `growers`; return the likeliest nodes of all `drafts`.

        `spent_s`: of this step's draft passes by another model.
        """

    def beside_s(self, num_sequences: int) -> float:
        """Return the seconds of a step that neither its levels nor its large pass take."""

    def note_plain_step(self) -> None:
        """A step of the sequences that were grown for has no guesses."""


class HostGrowth:
    """The growth of trees whose every level the host chooses."""

    def __init__(
        self, *, model: ModelGuesses, config: DraftConfig, clock: Callable[[], float]
    ) -> None:
        """`clock`: seconds, to measure the host's work beside passes (`host_times`)."""
        self._model = model
        self._config = config
        self._clock = clock
        self.host_times = LevelHostTimes()

    @property
    def block(self) -> BlockLayout | None:
        """The rows of the one pass that guesses all depths; None where a pass guesses one."""
        return self._model.block

    def beside_s(self, num_sequences: int) -> float:
        """Return 0: on the CPU the times of passes include the host's part."""
        return 0.0

    def note_plain_step(self) -> None:
        """Learn nothing: whole steps are not timed here."""

    def grow(
        self,
        growers: SequenceOf[Draft],
        drafts: SequenceOf[Draft],
        step: StepBudget | None,
        spent_s: float = 0.0,
    ) -> Proposal:
        """Run draft passes while one is worth its time; see `Growth`."""
        spent_s = yield from self.run_passes(growers, drafts, step, spent_s)
        return Trees(host=select_nodes(drafts, least_chance(drafts, step, spent_s=spent_s)))

    def run_passes(
        self,
        growers: SequenceOf[Draft],
        drafts: SequenceOf[Draft],
        step: StepBudget | None,
        spent_s: float = 0.0,
    ) -> Generator[DraftPass, DraftLogits, float]:
        """Run draft passes while one is worth its time; returns the expected seconds of all."""
        slices = self._model.catch_up_slices(growers)
        while slices:
            num_rows = sum(len(piece.token_ids) for _, piece in slices)
            num_trees, begun_s, pass_s = len(slices), self._clock(), 0.0
            if step is not None:
                pass_s = step.draft_pass_s(num_rows, step.context)
                spent_s += pass_s + step.level_host_s
            logits = yield self._model.draft_pass(slices)
            self._model.receive(slices, logits.of_slices, logits.hidden)
            slices = self._model.next_slices(self.next_level(growers, drafts, step, spent_s))
            if step is not None:
                beside_s = self._clock() - begun_s - pass_s
                self.host_times.observe(num_trees, beside_s, expected_s=pass_s)
        return spent_s

    def next_level(
        self,
        growers: SequenceOf[Draft],
        drafts: SequenceOf[Draft],
        step: StepBudget | None,
        spent_s: float,
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
        _, expected, step_s = step.num_nodes(weighted_probs(drafts), spent_s=spent_s)
        is_worth_it = step.is_worth_a_pass(
            tokens_gained=gained, num_rows=num_rows, expected_tokens=expected, step_s=step_s
        )
        return growing if is_worth_it else []
