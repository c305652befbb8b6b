"""From a pass plan to the rows of a pass, and from its logits to what is emitted."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.events import FinishReason, TokenLogprobs
from engine.runner import ForwardSlice
from engine.scheduler import PassPlan
from engine.sequence import Sequence
from engine.token_tree import TokenTree


@dataclass(slots=True, kw_only=True)
class Judged:
    """A sequence whose next token this pass decides, and the tree under it."""

    sequence: Sequence
    tree: TokenTree
    first_row: int  # of its tree's logits


def answer_slices(plan: PassPlan) -> tuple[list[ForwardSlice], list[Judged]]:
    """Slices of the plan's own sequences, and those of them that get a next token.

    Every decode is judged and so is every prefill that is complete with this pass; all slices that
    are judged stand in the same order as the judged.
    """
    slices: list[ForwardSlice] = []
    judged: list[Judged] = []
    partial: list[ForwardSlice] = []
    row = 0
    for sequence, num_tokens in [(s, 1) for s in plan.decodes] + plan.prefills:
        start = sequence.view.num_computed_tokens
        end = start + num_tokens
        is_complete = end == len(sequence.token_ids)
        piece = ForwardSlice(
            view=sequence.view,
            token_ids=sequence.token_ids[start:end],
            start_slot=start,
            num_logit_rows=int(is_complete),
        )
        if is_complete:
            tree = TokenTree.root_only(sequence.token_ids[-1])
            judged.append(Judged(sequence=sequence, tree=tree, first_row=row))
            slices.append(piece)
            row += 1
        else:
            partial.append(piece)
    return slices + partial, judged


def plant(piece: ForwardSlice, tree: TokenTree) -> None:
    """Turn a decode's slice of one row into the rows of a tree."""
    root_slot = piece.start_slot
    piece.token_ids = tree.token_ids
    piece.positions = [root_slot + depth for depth in tree.depth]
    piece.tree_start = root_slot
    piece.ancestor_masks = tree.ancestor_mask
    piece.num_logit_rows = tree.num_nodes


def cut_at_end(
    token_ids: list[int], stop_token_ids: tuple[int, ...], num_remaining: int
) -> tuple[list[int], FinishReason | None]:
    """What may be emitted of the accepted tokens, and why it ends there, if it does."""
    for index, token_id in enumerate(token_ids[:num_remaining]):
        if token_id in stop_token_ids:
            return token_ids[: index + 1], "stop"
    if len(token_ids) >= num_remaining:
        return token_ids[:num_remaining], "length"
    return token_ids, None


def token_logprobs(
    logits: Tensor, rows: list[int], token_ids: list[int], num_logprobs: int | None
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of emitted tokens from the rows that chose them."""
    if num_logprobs is None:
        return ()
    log_probs = logits[rows].log_softmax(-1)  # [num_emitted, vocab_size]
    chosen = log_probs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    num_top = min(num_logprobs, log_probs.shape[1])
    values, indices = log_probs.topk(num_top) if num_top else (None, None)
    top = [
        tuple(zip(ids, numbers, strict=True))
        for ids, numbers in zip(
            indices.tolist() if indices is not None else [[]] * len(rows),
            values.tolist() if values is not None else [[]] * len(rows),
            strict=True,
        )
    ]
    return tuple(
        TokenLogprobs(token_id=token_id, logprob=logprob, top=alternatives)
        for token_id, logprob, alternatives in zip(
            token_ids, chosen[:, 0].tolist(), top, strict=True
        )
    )
