"""Rows by which the small model reads a text that is judged, where both models wrote it."""

from collections.abc import Callable

from outrider.draft.draft_state import DraftState
from outrider.engine.cache.block_pool import OutOfBlocksError
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.engine.sequences.sequence import Sequence


def judged_rows(
    state: DraftState,
    runner: ModelRunner,
    *,
    end: int,
    max_rows: int,
    make_room: Callable[[Sequence, int], None],
) -> ForwardSlice | None:
    """Return the next rows up to `end`, with logits of those that judge a token; None: no room.

    `make_room`: lets the drafts of later arrivals go until so many blocks are free. So of all texts
    that are read, the oldest gets on.
    """
    sequence, first = state.sequence, state.sequence.num_scored_rows
    view = state.view
    if view is None:
        view = state.view = runner.new_view(sequence.request.cache_salt)
        view.match_prefix(sequence.cacheable_token_ids)
    elif view.num_computed_tokens > first:
        view.rewind(first)
    start = view.num_computed_tokens
    if end - start > max_rows:
        end = min(start + max_rows, first)
    needed = view.num_blocks_needed(end)
    if needed > runner.pool.num_available:
        make_room(sequence, needed)
    try:
        runner.copy_blocks(view.reserve(end))
    except OutOfBlocksError:
        return None
    return ForwardSlice(
        view=view,
        token_ids=sequence.token_ids[start:end],
        start_slot=start,
        num_logit_rows=max(end - first, 0),
    )
