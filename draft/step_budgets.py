"""The budgets of a step's guesses, from what decodes in it and what each request may wait."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from outrider.draft.budget.budget import StepBudget, TreeBudget
from outrider.draft.budget.own_pace import OwnPace
from outrider.draft.draft_state import Draft
from outrider.draft.host_growth import Growth, HostGrowth
from outrider.engine.protocols import NO_LARGE_WORK, DraftModel, LargeWork
from outrider.engine.sequences.sequence import Sequence


class StepBudgets:
    """Makes a step's budgets.

    `growths`, `last`: by model, what grows trees and what chooses nodes.
    """

    def __init__(
        self,
        budget: TreeBudget | None,
        growths: Mapping[DraftModel, HostGrowth],
        last: Mapping[DraftModel, Growth],
    ) -> None:
        self._budget = budget
        self._growths = growths
        self._last = last
        self._pace = OwnPace()
        self._large_work = NO_LARGE_WORK

    def begin_step(
        self, sequences: SequenceOf[Sequence], large_work: LargeWork, stretch: float | None
    ) -> None:
        """Begin a step of these sequences; `stretch`: of the last one, see `OwnPace`."""
        self._large_work = large_work
        self._pace.begin_step([*sequences, *large_work.streams], stretch)

    def of_step(
        self, drafts: SequenceOf[Draft], model: DraftModel, asked: SequenceOf[Draft]
    ) -> StepBudget | None:
        """Return the step's budget for trees as they were weighed last (`weighted_probs`).

        `asked`: for which a model makes guesses.
        """
        if self._budget is None:
            return None
        lengths = [len(draft.sequence.token_ids) for draft in drafts]
        growth, large_work = self._growths.get(model), self._large_work
        block = None if growth is None else growth.block
        return self._budget.of_step(
            model,
            num_sequences=len(drafts) + len(large_work.streams),
            num_prompt_rows=large_work.num_prompt_rows,
            most_stretch=self._most_stretch(drafts, asked),
            context=sum(lengths) / max(len(lengths), 1),
            # One whose prompt is computed waits for a token as well.
            base_tokens=sum(draft.urgency for draft in drafts)
            + len(large_work.streams)
            + large_work.num_prompts,
            level_host_s=0.0 if growth is None else growth.host_times(len(drafts)),
            beside_s=self._last[model].beside_s(len(drafts)) if model in self._last else 0.0,
            num_block_rows=0 if block is None else block.num_rows,
        )

    def _most_stretch(self, drafts: SequenceOf[Draft], asked: SequenceOf[Draft]) -> float:
        """Return how many plain steps this one may last for the sake of each request's own pace."""
        is_asked = {id(draft) for draft in asked}
        expected = [(sequence, 0.0) for sequence in self._large_work.streams]
        for draft in drafts:
            gain = draft.expected_tokens
            if id(draft) in is_asked:
                gain = max(gain, draft.acceptance.value)
            expected.append((draft.sequence, gain))
        return self._pace.most_stretch(expected)
