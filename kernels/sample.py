"""The target distribution of a request: temperature, top-k, top-p and min-p, row by row."""

import torch
from torch import Tensor

# Truncations are worked out on the likeliest tokens; the whole vocabulary is sorted only where a
# nucleus reaches beyond them.
_NUM_LIKELIEST = 256


def log_target(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Unnormalised log-probabilities after temperature, top-k, top-p and min-p, in this order.

    logits: float32 [num_rows, vocab_size]; the parameters: [num_rows] (float32, top_k int64), with
    temperature > 0; top_k 0, top_p 1 and min_p 0 are off. Tokens that are cut have -inf; of equal
    logits at the border all stay. The likeliest token always stays.
    """
    scores = logits / temperature[:, None]  # [num_rows, vocab_size]
    vocab_size = scores.shape[1]
    cuts_k = (top_k > 0) & (top_k < vocab_size)
    cuts_p = top_p < 1.0
    if not bool((cuts_k | cuts_p | (min_p > 0)).any()):
        return scores
    floor = _truncation_floor(scores, top_k.where(cuts_k, vocab_size), top_p, min_p)
    return scores.masked_fill(scores < floor, float("-inf"))


def _truncation_floor(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The least score that stays in each row, [num_rows, 1]."""
    vocab_size = scores.shape[1]
    largest_k = int(top_k.where(top_k < vocab_size, 0).max())
    num_sorted = min(vocab_size, max(_NUM_LIKELIEST, largest_k))
    ordered = scores.topk(num_sorted).values  # [num_rows, num_sorted], descending
    log_total = scores.logsumexp(-1, keepdim=True)
    if num_sorted < vocab_size:
        covered = ordered.logsumexp(-1, keepdim=True) - log_total
        rows_need_more = (top_k >= vocab_size) & (covered[:, 0].exp() < top_p)
        if bool((rows_need_more & (top_p < 1.0)).any()):
            ordered = scores.sort(-1, descending=True).values
            num_sorted = vocab_size
    ranks = torch.arange(num_sorted, device=scores.device)
    in_top_k = ranks < top_k[:, None]
    # Whoever keeps the whole vocabulary at this stage is normalised over all of it.
    kept = ordered.masked_fill(~in_top_k, float("-inf"))
    keeps_all = (top_k >= vocab_size)[:, None]
    log_kept = torch.where(keeps_all, log_total, kept.logsumexp(-1, keepdim=True))
    probs = (kept - log_kept).exp()
    mass_before = probs.cumsum(-1) - probs
    # Rounded sums reach 1 too early, so a top-p of 1 must not be compared with them.
    nucleus = torch.where(top_p < 1.0, top_p, float("inf"))[:, None]
    stays = in_top_k & ((mass_before < nucleus) | (ranks == 0))
    # min-p compares with the likeliest token, so renormalising would not change it.
    stays &= ordered >= ordered[:, :1] + min_p.log()[:, None]
    stays[:, 0] = True
    floor = ordered.masked_fill(~stays, float("inf")).amin(-1, keepdim=True)
    # A row without top-k and top-p keeps what min-p leaves, also beyond the sorted part.
    only_min_p = keeps_all & (top_p >= 1.0)[:, None]
    return torch.where(only_min_p, ordered[:, :1] + min_p.log()[:, None], floor)
