"""How often three rules accept drafted tokens, given a text that the target has sampled.

All three are exact: the text follows the target's distribution, whatever was drafted. So they can
be compared on one text. A rule says for each token of it, by rank, how likely the draft's candidate
of that rank was accepted there:

- shared noise: candidates are the best of log draft + G, accepted if equal to argmax(log target +
  G). This is what Outrider does.
- greedy drafts: the draft's likeliest tokens, accepted if equal to the token that the target has
  sampled. This is what llama.cpp and others do.
- ratio test: candidates are drawn from the draft without replacement, accepted with probability
  min(1, target / draft), the target's rest taken after each refusal (Leviathan et al. 2023; with
  several candidates: Miao et al., "SpecInfer", 2024, and Jeon et al., "Recursive Speculative
  Decoding", 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.sampling.sample import log_target
from outrider.verifier.params import SamplingParams

MOST_CANDIDATES = 8

_CHUNK_SCORES = 4_000_000
_MOST_DRAWS = 4
_LARGE_VOCAB = 10_000


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SampledText:
    """An answer of the target, and what both models and the noise said at each of its tokens."""

    token_ids: Tensor
    """int64 [length]."""
    target: Tensor
    """float32 [length, vocab_size]: logits that chose each token."""
    draft: Tensor
    """float32 [length, vocab_size]: the drafter's logits behind the same text."""
    noise: Tensor
    """float32 [length, vocab_size]."""
    sampling: SamplingParams

    def chosen(self) -> Tensor:
        """Return the token that target and noise choose at each place: int64 [length]."""
        return (self.log_probs(self.target) + self.noise).argmax(-1)

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return log-probabilities after temperature and truncation; -inf for cut tokens."""
        rows, sampling = logits.shape[0], self.sampling
        return log_target(
            logits,
            torch.full((rows,), sampling.temperature),
            torch.full((rows,), sampling.top_k),
            torch.full((rows,), sampling.top_p),
            torch.full((rows,), sampling.min_p),
        ).log_softmax(-1)


def shared_noise(text: SampledText, *, sharpness: float = 1.0) -> Tensor:
    """Return the chance of each rank, float32 [length, MOST_CANDIDATES]: here 0 or 1.

    `sharpness`: the draft's log-probabilities times this; infinite, it would be `greedy_drafts`.
    """
    return _hits(sharpness * text.log_probs(text.draft) + text.noise, text.token_ids)


def cut_behind_first(text: SampledText) -> Tensor:
    """Return the same as Outrider ranks: tokens that top-p cuts stand behind the best that stays.

    Among the others they are as likely as the draft says, less one in the logarithm
    (draft/guesses/cut_tokens.py).
    """
    is_cut = text.log_probs(text.draft).isinf()
    scores = text.draft / text.sampling.temperature + text.noise
    best_kept = scores.masked_fill(is_cut, -torch.inf).amax(-1, keepdim=True)
    best_cut = scores.masked_fill(~is_cut, -torch.inf).amax(-1, keepdim=True)
    loss = (best_cut - best_kept).clamp(min=0.0) + 1.0
    return _hits(scores.where(~is_cut, scores - loss), text.token_ids)


def greedy_drafts(text: SampledText) -> Tensor:
    """Return the same for the draft's likeliest tokens."""
    return _hits(text.draft, text.token_ids)


def independent_draws(text: SampledText, generator: torch.Generator) -> Tensor:
    """Return the same for tokens drawn from the draft without replacement, with other noise."""
    uniform = torch.rand(text.draft.shape, generator=generator).clamp_(1e-12, 1.0 - 1e-7)
    return _hits(text.log_probs(text.draft) - (-uniform.log()).log(), text.token_ids)


def _hits(scores: Tensor, token_ids: Tensor) -> Tensor:
    """Whether a token has each rank among the scores; cut tokens are never candidates."""
    own = scores.gather(1, token_ids[:, None])  # [length, 1]
    rank = (scores > own).sum(-1, keepdim=True)  # [length, 1]
    return ((rank == torch.arange(MOST_CANDIDATES)) & own.isfinite()).float()


def ratio_test(text: SampledText, generator: torch.Generator) -> Tensor:
    """Return the chance of each rank, given that the rule has emitted the text's token.

    The first rank's is min(1, draft / target), exactly. Later ones depend on what was refused
    before: that is drawn, several times where the vocabulary is small, and the mean is taken.
    """
    vocab_size = text.target.shape[1]
    num_draws = _MOST_DRAWS if vocab_size < _LARGE_VOCAB else 1
    size = max(1, _CHUNK_SCORES // (num_draws * vocab_size))
    pieces = [
        _ratio_rows(p.exp(), q.exp(), token_ids, generator, num_draws)
        for p, q, token_ids in zip(
            torch.split(text.log_probs(text.target), size),
            torch.split(text.log_probs(text.draft), size),
            torch.split(text.token_ids, size),
            strict=True,
        )
    ]
    return torch.cat(pieces)


def _ratio_rows(
    target: Tensor, draft: Tensor, token_ids: Tensor, generator: torch.Generator, num_draws: int
) -> Tensor:
    """`ratio_test` of some rows; probabilities [rows, vocab_size]."""
    num_rows = len(token_ids)
    emitted = target.gather(1, token_ids[:, None])[:, 0].repeat(num_draws)  # [rows * draws]
    wanted = token_ids.repeat(num_draws)[:, None]
    p, q = target.repeat(num_draws, 1), draft.repeat(num_draws, 1)
    reached = torch.ones(num_rows * num_draws)
    chances = []
    for _ in range(MOST_CANDIDATES):
        accepted = torch.minimum(p, q)
        chances.append(reached * accepted.gather(1, wanted)[:, 0] / emitted)
        refused = (q - p).clamp_(min=0.0)  # what is drafted here and refused, by token
        mass = refused.sum(-1)
        reached = reached * mass
        is_over = mass <= 0.0
        refused[is_over] = 1.0
        token = torch.multinomial(refused, 1, generator=generator)
        p = (p - q).clamp_(min=0.0)
        p /= p.sum(-1, keepdim=True).clamp_(min=1e-30)
        q = q.scatter(1, token, 0.0)
        q /= q.sum(-1, keepdim=True).clamp_(min=1e-30)
    stacked = torch.stack(chances, dim=-1)  # [rows * draws, ranks]
    return stacked.view(num_draws, num_rows, MOST_CANDIDATES).mean(0).clamp_(max=1.0)


def tokens_per_pass(chances: Sequence[Tensor], *, num_candidates: int, max_depth: int) -> float:
    """Return the tokens of a pass whose tree has so many candidates at each depth.

    `chances`: by text, as the rules return them. The first candidate of a depth has the next
    depth's as children, the others are leaves. Each text begins with a new pass.
    """
    num_tokens, num_passes = 0, 0.0
    for text in chances:
        first = text[:, 0].tolist()
        rest = text[:, 1:num_candidates].sum(-1).tolist()
        length = len(first)
        starts = [0.0] * (length + max_depth + 2)
        starts[0] = 1.0
        for place in range(length):
            reached = starts[place]
            if reached == 0.0:
                continue
            for depth in range(max_depth):
                here = place + depth
                if here >= length:
                    reached = 0.0
                    break
                starts[here + 2] += reached * rest[here]
                starts[here + 1] += reached * max(0.0, 1.0 - first[here] - rest[here])
                reached *= first[here]
            starts[min(place + max_depth + 1, length)] += reached
        num_tokens += length
        num_passes += sum(starts[:length])
    return num_tokens / num_passes
