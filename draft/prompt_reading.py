"""Has the small model read prompts in the steps in which the large model does.

Sequences that decode together wait for a prompt in any case; if the small model read it later, they
would all wait once more, for what only one of them needs.
"""

from collections.abc import Callable, Generator
from collections.abc import Sequence as SequenceOf

from outrider.draft.budget.budget import AcceptanceEstimate
from outrider.draft.budget.group_choice import StepKind
from outrider.draft.budget.step_choice import StepChoice
from outrider.draft.config import DraftConfig
from outrider.draft.draft_state import DraftState
from outrider.draft.step_budgets import StepBudgets
from outrider.engine.cache.block_pool import OutOfBlocksError
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.engine.protocols import DraftLogits, DraftPass, LargeWork
from outrider.engine.sequences.sequence import Sequence


class PromptReading:
    """Has prompts read where the small model is to draft for several requests.

    A request that is alone gets its first token before the small model reads. `acceptance`: of all
    sequences. `offered`: the kinds that a step of sequences may be of. `state_of`: a sequence's.
    """

    def __init__(
        self,
        runner: ModelRunner | None,
        *,
        config: DraftConfig,
        budgets: StepBudgets,
        choice: StepChoice,
        acceptance: AcceptanceEstimate,
        offered: Callable[[SequenceOf[Sequence]], list[StepKind]],
        state_of: Callable[[Sequence], DraftState],
    ) -> None:
        self._runner = runner
        self._config = config
        self._budgets = budgets
        self._choice = choice
        self._acceptance = acceptance
        self._offered = offered
        self._state_of = state_of

    def read(
        self, sequences: SequenceOf[Sequence], large_work: LargeWork
    ) -> Generator[DraftPass, DraftLogits, None]:
        """Read the prompts beside these sequences in one pass, if that pays."""
        runner = self._runner
        number = len(sequences) + len(large_work.streams) + large_work.num_prompts
        if runner is None or not large_work.prompts or number < 2:
            return
        prompts = [each for each in large_work.prompts if "small" in self._offered([each[0]])]
        if not prompts or not self._may_read(sequences, prompts, number):
            return
        max_rows = max(self._config.max_catch_up_tokens, 2 * large_work.num_prompt_rows)
        pieces = self._rows(prompts, runner, max_rows=max_rows)
        if not pieces:
            return
        self._budgets.note_read(sum(len(piece.token_ids) for _, piece in pieces))
        yield DraftPass(
            slices=[piece for _, piece in pieces],
            owners=[state.sequence for state, _ in pieces],
        )
        for state, piece in pieces:
            if state.view is piece.view:  # or its blocks were taken away
                state.caught_up()

    def _may_read(
        self,
        sequences: SequenceOf[Sequence],
        prompts: SequenceOf[tuple[Sequence, int]],
        number: int,
    ) -> bool:
        """Return whether reading pays for `number` sequences, as measured or else as expected."""
        company = [*sequences, *(sequence for sequence, _ in prompts)]
        gain = self._choice.gain_of("small", company, first=self._offered(company)[0])
        if gain is None:
            gain = self._budgets.expected_gain(
                company, number, self._acceptance.value, self._config.max_draft_depth
            )
        most = max(self._num_unread(sequence) for sequence, _ in prompts)
        return self._budgets.may_read(most, number, gain)

    def _num_unread(self, sequence: Sequence) -> int:
        """Count the tokens of a prompt that the small model has not read.

        Before it begins, its cache is taken to hold as much of the prompt as the large model's.
        """
        state = self._state_of(sequence)
        if state.view is None:
            return len(sequence.token_ids) - sequence.view.num_computed_tokens
        return state.num_missing_tokens

    def _rows(
        self,
        prompts: SequenceOf[tuple[Sequence, int]],
        runner: ModelRunner,
        *,
        max_rows: int,
    ) -> list[tuple[DraftState, ForwardSlice]]:
        """Return the rows by which the small model comes as far as the large one, less a root.

        `prompts`: with the tokens of each that the large model's pass computes. In all `max_rows`
        at most; what does not fit is read later. So is a prompt for which there are no blocks.
        """
        pieces: list[tuple[DraftState, ForwardSlice]] = []
        for sequence, num_tokens in prompts:
            state = self._state_of(sequence)
            if state.old_token_ids is not None:  # of an answer on the small tier: it is there
                continue
            view = state.open(runner)
            start = view.num_computed_tokens
            end = min(sequence.view.num_computed_tokens + num_tokens, len(sequence.token_ids) - 1)
            end = min(end, start + max_rows)
            if end <= start or not state.can_be_read(runner.vocab_size):
                continue
            try:
                runner.copy_blocks(view.reserve(end))
            except OutOfBlocksError:
                continue
            max_rows -= end - start
            pieces.append((state, state.catch_up_slice(end - start)))
        return pieces
