"""Ranks children where a request's truncation (top-k, top-p, min-p) cuts some of them.

What the small model's truncation cuts, the large model's may keep. So cut tokens stay candidates:
behind the best token that is kept, which is the large model's where both agree.
"""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from outrider.verifier.sampling import RowGroup, add_noise, log_targets, process_logits, truncates

_ODDS = 1.0
"""What a token loses by being cut, as a logarithm: the large model may well cut it too."""


def has_cut_tokens(groups: SequenceOf[RowGroup]) -> bool:
    """Return whether some sequence's parameters may cut tokens."""
    return any(truncates(group.sequence.sampling) for group in groups)


def scores_with_cut_tokens(logits: Tensor, groups: SequenceOf[RowGroup]) -> Tensor:
    """`perturbed_scores` in which cut tokens have scores: float32 [num_rows, vocab_size].

    `logits`: float32 [num_rows, vocab_size], the groups' rows one after the other.
    """
    processed = process_logits(logits, groups)
    kept_scores = log_targets(processed, groups)
    is_cut = kept_scores == -torch.inf  # with what rules forbid, which stays so
    scores = kept_scores.where(~is_cut, processed / _temperatures(groups, logits.device))
    scores = add_noise(scores, groups)
    best_kept = scores.masked_fill(is_cut, -torch.inf).amax(-1, keepdim=True)
    loss = scores.amax(-1, keepdim=True) - best_kept + _ODDS  # [num_rows, 1]; `_ODDS` at least
    return scores.where(~is_cut, scores - loss)


def _temperatures(groups: SequenceOf[RowGroup], device: torch.device) -> Tensor:
    """The temperature of each row, 1 where it is greedy: float32 [num_rows, 1]."""
    own = [
        1.0 if sampling.is_greedy else sampling.temperature
        for group in groups
        for sampling in (group.sequence.sampling,)
        for _ in group.depths
    ]
    return torch.tensor(own, dtype=torch.float32, device=device)[:, None]
