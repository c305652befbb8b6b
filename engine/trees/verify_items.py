"""Turns a pass plan into the rows of a pass, and its logits into what is emitted."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import numpy as np
from torch import Tensor

from outrider.engine.cache.block_pool import OutOfBlocksError
from outrider.engine.errors import NotFiniteError
from outrider.engine.events import FinishReason, PrefillDone, TokensEmitted
from outrider.engine.passes.runner import ForwardSlice, ModelRunner, PassOutput
from outrider.engine.sequences.sequence import Sequence
from outrider.engine.trace import StepTrace
from outrider.engine.trees.origins import step_trace
from outrider.engine.trees.speculation_counts import num_predicted, num_reused
from outrider.kernels.upload import read_back, upload
from outrider.verifier.logprobs import (
    logprob_rows,
    most_wanted,
    prompt_logprobs,
    token_logprobs,
)
from outrider.verifier.own_failure import OwnFailure
from outrider.verifier.params import Tier
from outrider.verifier.token_logprobs import TokenLogprobs
from outrider.verifier.token_tree import TokenTree
from outrider.verifier.verdict import Verdict

NO_TREES: Final[Mapping[str, TokenTree]] = {}


@dataclass(slots=True, kw_only=True)
class VerifyItem:
    """A sequence whose next token this pass decides, and the tree under it."""

    sequence: Sequence
    tree: TokenTree
    first_row: int
    """The first row of its tree's logits."""


@dataclass(slots=True, kw_only=True)
class VerifiedPass:
    """A pass and a verdict for each of its items, in order."""

    items: list[VerifyItem]
    output: PassOutput
    verdicts: list[Verdict] = field(default_factory=list)
    logprobs: list[tuple[TokenLogprobs, ...]] = field(default_factory=list)
    """Log-probabilities of the verdicts' tokens, for each item; empty where none are wanted."""


def answer_slices(
    decodes: list[Sequence],
    prefills: list[tuple[Sequence, int]],
    trees: Mapping[str, TokenTree] = NO_TREES,
) -> tuple[list[ForwardSlice], list[VerifyItem]]:
    """Slices of a plan's sequences, and those of them that get a next token.

    Every decode is judged and so is every prefill that is complete with this pass; their slices
    stand in the same order as the items. `trees`: of decodes, by request id; their slices do not
    have them yet.
    """
    slices: list[ForwardSlice] = []
    items: list[VerifyItem] = []
    partial: list[ForwardSlice] = []
    row = 0
    for sequence, num_tokens in [(s, 1) for s in decodes] + prefills:
        start = sequence.view.num_computed_tokens
        end = start + num_tokens
        is_complete = end == len(sequence.token_ids)
        piece = ForwardSlice(
            view=sequence.view,
            token_ids=sequence.token_ids[start:end],
            start_slot=start,
            num_logit_rows=int(is_complete) or num_scored_rows(sequence, end),
        )
        if is_complete:
            tree = trees.get(sequence.request_id) or TokenTree.root_only(sequence.token_ids[-1])
            items.append(VerifyItem(sequence=sequence, tree=tree, first_row=row))
            slices.append(piece)
            row += 1
        else:
            partial.append(piece)
    return slices + partial, items


def num_scored_rows(sequence: Sequence, end: int) -> int:
    """Count the rows of a prompt, up to slot `end`, whose scores are still wanted."""
    if not sequence.num_unscored_tokens:
        return 0
    return max(end - sequence.num_scored_rows, 0)


def note_scores(
    prefills: list[tuple[Sequence, int]],
    slices: list[ForwardSlice],
    logits: Tensor,
    *,
    first_row: int,
) -> None:
    """Score the tokens of the prompts that a pass has computed, where that is wanted.

    To be called before the prefills are noted. `first_row`: the first row of the slices' logits.
    """
    wanted = {id(s.view): s for s, _ in prefills if s.num_unscored_tokens}
    if not wanted:
        return
    row = first_row
    for piece in slices:
        sequence, num_rows = wanted.get(id(piece.view)), piece.num_logit_rows
        if sequence is not None and num_rows:
            _score(sequence, logits[row : row + num_rows])
        row += num_rows


def _score(sequence: Sequence, logits: Tensor) -> None:
    """Score a prompt's next tokens: judge them, or keep their log-probabilities."""
    first = sequence.num_scored_rows + 1
    token_ids = sequence.token_ids[first : first + len(logits)]
    if sequence.judge is None:
        num_top = sequence.sampling.num_prompt_logprobs or 0
        sequence.prompt_logprobs += prompt_logprobs(logits, token_ids, num_top)
    else:
        sequence.judge.judge(logits, token_ids)
        sequence.failure = sequence.failure or sequence.judge.failure


def attach_tree(piece: ForwardSlice, tree: TokenTree) -> list[ForwardSlice]:
    """Put a tree in the place of a slice's last row, which is its root.

    Returns the rows in front of it, if there are any (a prefill's), as a slice of the same pass:
    in a layer all keys are written before any is read.
    """
    fronts: list[ForwardSlice] = []
    num_before = len(piece.token_ids) - 1
    if num_before:
        fronts.append(
            ForwardSlice(
                view=piece.view,
                token_ids=piece.token_ids[:-1],
                start_slot=piece.start_slot,
                num_logit_rows=0,
            )
        )
    piece.start_slot = root_slot = piece.start_slot + num_before
    piece.token_ids = tree.token_ids
    piece.positions = [root_slot + depth for depth in tree.depth]
    piece.tree_start = root_slot
    piece.ancestor_masks = tree.ancestor_mask
    piece.num_logit_rows = tree.num_nodes
    return fronts


def fit_tree(runner: ModelRunner, sequence: Sequence, tree: TokenTree) -> TokenTree:
    """Cut a tree to what the free blocks can hold: guesses never pre-empt a sequence.

    Slots up to the sequence's last token are reserved already, the tree's are then.
    """
    if not tree.num_draft_nodes:
        return tree
    view = sequence.view
    root_slot = len(sequence.token_ids) - 1
    num_free = (len(view.block_table) + view.pool.num_available) * view.pool.block_size - root_slot
    tree = tree.truncated(min(tree.num_nodes, num_free, view.num_tree_slots))
    vocab_size = runner.vocab_size
    if max(tree.token_ids) >= vocab_size:  # the drafter's vocabulary is padded further
        tree = tree.truncated(
            next(node for node, token in enumerate(tree.token_ids) if token >= vocab_size)
        )
    try:
        copies = view.reserve(root_slot + tree.num_nodes)
    except OutOfBlocksError:  # a copy of a shared block took the last one
        return tree.truncated(1)
    runner.copy_blocks(copies)
    return tree


def accepted_moves(
    items: SequenceOf[VerifyItem], verdicts: SequenceOf[Verdict]
) -> tuple[list[int], list[int]]:
    """Cache slots (sources, destinations) that put the accepted paths' keys into place."""
    sources: list[int] = []
    destinations: list[int] = []
    for item, verdict in zip(items, verdicts, strict=True):
        view = item.sequence.view
        root_slot = len(item.sequence.token_ids) - 1
        for offset, node in enumerate(verdict.accepted_nodes, start=1):
            if node != offset:
                sources.append(view.slot(root_slot + node))
                destinations.append(view.slot(root_slot + offset))
    return sources, destinations


def cut_at_end(
    token_ids: list[int], stop_token_ids: tuple[int, ...], num_remaining: int
) -> tuple[list[int], FinishReason | None]:
    """Cut accepted tokens where the answer ends; return them and the reason, if it ends."""
    for index, token_id in enumerate(token_ids[:num_remaining]):
        if token_id in stop_token_ids:
            return token_ids[: index + 1], "stop"
    if len(token_ids) >= num_remaining:
        return token_ids[:num_remaining], "length"
    return token_ids, None


def prefill_done(
    sequence: Sequence, hidden: Tensor, runners: Mapping[Tier, ModelRunner]
) -> PrefillDone:
    """The event of a prefill that is complete; `hidden`: its last row's state, [hidden_size]."""
    # Behind an answer that was kept, or was there before a pre-emption, it is not the prompt's.
    is_wanted = sequence.request.return_hidden_state and not sequence.num_output_tokens
    return PrefillDone(
        request_id=sequence.request_id,
        tier=sequence.tier,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        queue_s=sequence.queue_s or 0.0,
        num_restored_tokens=min(sequence.num_restored_tokens, sequence.num_cached_tokens or 0),
        num_pulled_tokens=min(sequence.num_pulled_tokens, sequence.num_cached_tokens or 0),
        hidden_state=tuple(hidden.float().tolist()) if is_wanted else None,
        numerics=_numerics(sequence, runners),
        prompt_logprobs=tuple(sequence.prompt_logprobs),
        judgements=() if sequence.judge is None else tuple(sequence.judge.judgements),
        left_out=() if sequence.grammar is None else sequence.grammar.left_out,
    )


def _numerics(sequence: Sequence, runners: Mapping[Tier, ModelRunner]) -> str:
    """Name the arithmetic of all models that have a part in a sequence's answer."""
    is_mixed = sequence.tier == "large" and sequence.request.needs_both_models
    tiers: tuple[Tier, ...] = ("large", "small") if is_mixed else (sequence.tier,)
    parts = [runners[tier].numerics for tier in tiers]
    if (adapter := sequence.adapters.get(sequence.tier)) is not None:
        parts.append(adapter.digest)
    return " ".join(parts)


def emission(
    item: VerifyItem,
    verdict: Verdict,
    emitted: list[int],
    logprobs: tuple[TokenLogprobs, ...],
) -> TokensEmitted:
    """The event of one verdict; `emitted`: what of it the answer takes, logprobs: of all of it."""
    request = item.sequence.request
    accepted_nodes = verdict.accepted_nodes[: len(emitted)]
    return TokensEmitted(
        request_id=request.request_id,
        token_ids=tuple(emitted),
        num_drafted_tokens=item.tree.num_draft_nodes,
        num_accepted_tokens=len(accepted_nodes),
        num_predicted_tokens=(
            num_predicted(item.tree, accepted_nodes) if request.prediction_token_ids else 0
        ),
        num_unratified_tokens=sum(verdict.unratified[: len(emitted)]) if verdict.unratified else 0,
        num_reused_tokens=(
            num_reused(item.tree, accepted_nodes) if item.sequence.proposal_token_ids else 0
        ),
        logprobs=logprobs[: len(emitted)],
        trace=_trace(item, verdict, emitted) if request.traces else None,
    )


def _trace(item: VerifyItem, verdict: Verdict, emitted: list[int]) -> StepTrace | None:
    """Trace the tokens' sources; None where the sequence's grammar cannot be asked."""
    with OwnFailure(item.sequence):
        return step_trace(item.sequence, item.tree, verdict, emitted)
    return None


def note_not_finite(done: VerifiedPass) -> None:
    """Make a NaN or infinite score of a chosen token its sequence's own failure.

    An answer chosen by such numbers means nothing.
    """
    for item, verdict in zip(done.items, done.verdicts, strict=True):
        if not verdict.is_finite and item.sequence.failure is None:
            item.sequence.failure = NotFiniteError(
                f"The {item.sequence.tier} model computed numbers that are not finite (NaN or "
                "infinity) for this request. Its weights may be damaged, or overflow in their "
                "type: check the checkpoint's files, or load it as bfloat16 or float32."
            )


def pass_logprobs(done: VerifiedPass) -> list[tuple[TokenLogprobs, ...]]:
    """Log-probabilities of what a pass decided, for the items that want them, in one read-back.

    Of all tokens of a verdict; the answer may end before the last.
    """
    wanted = [item.sequence.request.sampling.num_logprobs for item in done.items]
    if all(count is None for count in wanted):
        return [()] * len(done.items)
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    sizes: list[int] = []
    for item, verdict, count in zip(done.items, done.verdicts, wanted, strict=True):
        size = len(verdict.token_ids) if count is not None else 0
        sizes.append(size)
        if size:
            rows += [item.first_row + node for node in verdict.nodes]
            tokens += verdict.token_ids
            counts += [count or 0] * size
    if not rows:
        return [()] * len(done.items)
    logits = done.output.logits
    index = upload(np.array([rows, tokens], dtype=np.int64), logits.device)
    found = logprob_rows(logits.index_select(0, index[0]), index[1], most_wanted(wanted))
    entries = iter(token_logprobs(tokens, counts, read_back(found.tensors)))
    return [tuple(islice(entries, size)) for size in sizes]
