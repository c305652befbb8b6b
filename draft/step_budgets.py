"""The budgets of a step's guesses, from what decodes in it and what each request may wait."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Final

from outrider.draft.budget.budget import MOST_STEPS, DraftGain, StepBudget, TreeBudget
from outrider.draft.budget.host_times import HostTimes, StepShape
from outrider.draft.budget.own_pace import OwnPace
from outrider.draft.budget.step_choice import StepChoice
from outrider.draft.draft_state import Draft
from outrider.draft.host_growth import HostGrowth
from outrider.engine.protocols import NO_LARGE_WORK, DraftModel, LargeWork, Trees
from outrider.engine.sequences.sequence import Sequence

# In a request's place, for prompts that are read beside the large model.
_PROMPTS: Final = ""
# A text is short if it takes less of a plain step to read it.
_SHORT: Final = 0.2


class StepBudgets:
    """Makes a step's budgets, and learns from whole steps what the host's work takes.

    `growths`: by model, what grows trees. `choice`: measures steps.
    """

    def __init__(
        self,
        budget: TreeBudget | None,
        growths: Mapping[DraftModel, HostGrowth],
        choice: StepChoice,
    ) -> None:
        self._budget = budget
        self._growths = growths
        self._choice = choice
        self._pace = OwnPace()
        self.host_times = HostTimes()
        self._large_work = NO_LARGE_WORK
        self._step: StepBudget | None = None  # as it was made last, and for what
        self._step_of: tuple[DraftModel, frozenset[int]] = ("small", frozenset())
        self._shape: StepShape | None = None  # of the last step
        self._plain_pass_s, self._plain_s = 0.0, 1.0  # of a plain step of the same sequences
        # Of the last step, as expected: whatever the machine did, nobody waited for guesses.
        self._stretch = 1.0
        # Since it began, in plain steps: what was read of texts, by request, and what prompts took.
        self._read: dict[str, float] = {}
        self._beside = 0.0
        self._is_bound = False  # by what a request may still wait

    def plain_step_s(self, sequences: SequenceOf[Sequence], large_work: LargeWork) -> float:
        """Return what a plain step of these sequences should take; 1 where nothing is known.

        Notes what prompts take beside it, for which they may be a little slower.
        """
        if self._budget is None:
            return 1.0
        number = max(len(sequences) + len(large_work.streams), 1)
        context = _mean_length(sequences or large_work.streams)
        self._plain_pass_s = self._budget.target_pass_s(number, context)
        self._plain_s = self._plain_pass_s + self.host_times.plain(number)
        if num_rows := large_work.num_prompt_rows:
            whole_s = self._budget.target_pass_s(number + num_rows, context)
            self._beside += max(whole_s - self._plain_pass_s, 0.0) / self._plain_s
        return self._plain_s

    def begin_step(self, sequences: SequenceOf[Sequence], large_work: LargeWork) -> None:
        """Learn from the last step, and begin one of these sequences."""
        stretch = None if self._shape is None else self._stretch
        if self._shape is not None and (seconds := self._choice.seconds) is not None:
            self.host_times.observe(self._shape, seconds)
        self._step = self._shape = None
        self._large_work = large_work
        self._pace.begin_step([*sequences, *large_work.streams], stretch, self._read, self._beside)
        self._read, self._beside = {}, 0.0

    @property
    def patience(self) -> float:
        """Return the plain steps that every request can wait; below 0 the step is to be plain."""
        return self._pace.patience

    def reading_s(self, readers: SequenceOf[Sequence]) -> float:
        """Return the seconds that a model may read texts of these; all others wait for it."""
        return self._pace.patience_beside(readers) * self._plain_s

    def expected_gain(
        self, sequences: SequenceOf[Sequence], number: int, acceptance: float, max_depth: int
    ) -> float:
        """Return the plain steps that a step should gain by guesses for each of so many sequences.

        `sequences`: some of them. `acceptance`: how often a best guess is right.
        """
        if self._budget is None:
            return 0.0
        step = self._budget.of_step(
            num_sequences=number,
            context=_mean_length(sequences),
            base_tokens=number,
            step_host_s=self.host_times.plain(number),
            part_host_s=self.host_times.part(number),
        )
        return step.best_rate([DraftGain(acceptance=acceptance)] * number, max_depth) - 1.0

    def may_read(self, num_rows: int, number: int, gain: float) -> bool:
        """Return whether it pays to read a prompt of so many tokens, beside the large model.

        As much will be read for each of the `number` sequences that decode together, whose steps
        gain so much of a plain one by guesses. The first guesses' pass takes in a short prompt.
        """
        if self._budget is None or gain <= 0.0 or self.patience < 0.0:
            return False
        reading_s = self._budget.draft_pass_s(num_rows)
        if reading_s - self._budget.draft_pass_s(1) < _SHORT * self._plain_s:
            return False
        return number * reading_s <= gain * MOST_STEPS * self._plain_s

    def note_read(self, num_rows: int) -> None:
        """Note that so many rows of prompts are read, for which all that decode wait."""
        if self._budget is not None:
            steps = self._budget.draft_pass_s(num_rows) / self._plain_s
            self._read[_PROMPTS] = self._read.get(_PROMPTS, 0.0) + steps

    def end_step(self, trees: Trees) -> None:
        """Note what a step with trees consists of."""
        if self._budget is None:
            return
        step, num_nodes = self._step, trees.num_guesses
        has_guesses = num_nodes > 0 or (step is not None and step.num_levels > 0)
        self._choice.note_guesses(has_guesses=has_guesses, is_bound=self._is_bound)
        if step is None:
            return
        target_s = step.target_pass_s(step.num_rows + num_nodes, step.context)
        self._shape = StepShape(
            num_sequences=step.num_rows,
            passes_s=step.passes_s + target_s + sum(step.reading_s.values()),
            num_parts=step.num_levels + 1,
        )
        more_s = step.passes_s + target_s - step.target_pass_s(step.num_rows, step.context)
        more_s += self._shape.num_parts * self.host_times.part(step.num_rows)
        self._stretch = 1.0 + more_s / self._plain_s
        self._read |= {who: seconds / self._plain_s for who, seconds in step.reading_s.items()}
        if sum(step.reading_s.values()) > _SHORT * self._plain_s:
            self._choice.note_reading()

    def end_plain_step(self, sequences: SequenceOf[Sequence]) -> None:
        """Note what a step without guesses consists of."""
        if self._budget is not None:
            number = len(sequences) + len(self._large_work.streams)
            self._shape = StepShape(num_sequences=number, passes_s=self._plain_pass_s)
            self._stretch = 1.0

    def of_step(
        self, drafts: SequenceOf[Draft], model: DraftModel, asked: SequenceOf[Draft]
    ) -> StepBudget | None:
        """Return the step's budget for trees as they were weighed last (`weighted_probs`).

        `asked`: for which a model makes guesses. What the step has spent so far counts.
        """
        if self._budget is None:
            return None
        who = (model, frozenset(map(id, asked)))
        if self._step is not None and who == self._step_of and not self._step.num_levels:
            return self._step
        most_stretch = self._most_stretch(drafts, asked)
        self._is_bound = most_stretch < self._budget.max_stretch
        growth, large_work = self._growths.get(model), self._large_work
        block = None if growth is None else growth.block
        number = len(drafts) + len(large_work.streams)
        step = self._budget.of_step(
            model,
            num_sequences=number,
            num_prompt_rows=large_work.num_prompt_rows,
            most_stretch=most_stretch,
            context=_mean_length([draft.sequence for draft in drafts]),
            base_tokens=sum(draft.urgency for draft in drafts) + len(large_work.streams),
            step_host_s=self.host_times.plain(number),
            # A probe tells whether it is still so much.
            part_host_s=0.0 if self._choice.is_probe else self.host_times.part.most(number),
            num_block_rows=0 if block is None else block.num_rows,
        )
        if self._step is not None:
            step.passes_s, step.num_levels = self._step.passes_s, self._step.num_levels
            step.reading_s = self._step.reading_s
        self._step, self._step_of = step, who
        return step

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


def _mean_length(sequences: SequenceOf[Sequence]) -> float:
    return sum(len(sequence.token_ids) for sequence in sequences) / max(len(sequences), 1)
