"""Rows by which the small model reads prompts in the steps in which the large model does.

Sequences that decode together wait for a prompt in any case; if the small model read it later, they
would all wait once more, for what only one of them needs.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from outrider.draft.draft_state import DraftState
from outrider.engine.cache.block_pool import OutOfBlocksError
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.engine.sequences.sequence import Sequence


def prompt_rows(
    prompts: SequenceOf[tuple[Sequence, int]],
    runner: ModelRunner,
    *,
    state_of: Callable[[Sequence], DraftState],
    max_rows: int,
) -> list[tuple[DraftState, ForwardSlice]]:
    """Return the rows by which the small model comes as far as the large one, less a root.

    `prompts`: with the tokens of each that the large model's pass computes. In all `max_rows` at
    most; what does not fit is read later. So is a prompt for which there are no blocks.
    """
    pieces: list[tuple[DraftState, ForwardSlice]] = []
    for sequence, num_tokens in prompts:
        state = state_of(sequence)
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
