"""The speculative cascade: a lossy target between the small and the large model.

Narasimhan, Jitkrittum, Rawat, Kim, Gupta, Menon, Kumar, "Faster Cascades via Speculative Decoding",
ICLR 2025 (arXiv 2405.19261). At each position a deferral rule makes one distribution pi out of the
two models' own. The numbers of the equations are those that the authors' code gives
(github.com/google-research/google-research, speculative_cascades/speculative_cascades_gemma.ipynb),
which this module follows. `small` and `large` are the distributions that the request samples from
(rules, temperature, top-k, top-p, min-p; at temperature 0 all mass is on the likeliest token),
`small1` and `large1` those at temperature 1 without truncation:

opt (eq. 10)
    r = 1 iff  max small1 < max large1 - alpha * D_TV(small, large),
    D_TV(small, large) = sum_v max(0, small(v) - large(v)),
    pi = large if r = 1 else small.
    At temperature 0 the distance is 1 wherever the two models disagree, which leaves the rule Diff
    (eq. 5): max small1 < max large1 - alpha.

token_specific (V3, eq. 15)
    r(v) = 1 iff  large1(v) < (1 - alpha) * max large1,
    pi(v) = small(v) * (1 - r(v)) + large(v) * sum_w r(w) * small(w).
    At temperature 0 that is the small model's token if r is 0 there, else the large model's.

The emitted token is argmax(log pi + G), with the same noise as without a cascade. So it depends on
the two distributions at its position only, and the answer is the same for every tree. Where the
small one is not known, nothing is emitted. Both models have to read the answer, so an id that only
one of them knows is impossible.

What alpha 0 means: opt keeps the small model where it is at least as sure as the large one.
token_specific keeps the large model's likeliest token only. So neither is lossless when sampling.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.upload import upload
from outrider.verifier.judged import JudgedSequence
from outrider.verifier.params import CascadeRule
from outrider.verifier.sampling import RowGroup, add_noise, log_targets, process_logits
from outrider.verifier.token_tree import TokenTree

# The sides of eq. 10 are equal by themselves where the models agree (alpha 0) or where two tokens
# have all the mass (alpha 1): rounding must not decide there, it differs from tree to tree.
_ROUNDING = 1e-5

UNDECIDED = -1  # instead of a token: nothing can be emitted at this node


def cascade_choices(
    chosen: Tensor,
    processed: Tensor,
    sequences: SequenceOf[JudgedSequence],
    trees: SequenceOf[TokenTree],
) -> Tensor:
    """The tokens chosen at all nodes, cascades' by pi; `UNDECIDED` where a cascade cannot say.

    `chosen`: int64 [num_nodes], what the large model alone chooses; `processed`: float32
    [num_nodes, vocab_size], its logits after `process_logits`. Nodes of all trees in order.
    """
    rows: list[int] = []
    undecided: list[int] = []
    groups: list[RowGroup] = []
    small: list[Tensor] = []
    start = 0
    for sequence, tree in zip(sequences, trees, strict=True):
        if sequence.cascade is not None:
            logits = dict(enumerate(tree.draft_logits))
            known = [node for node in range(tree.num_nodes) if logits.get(node) is not None]
            undecided.extend(range(start, start + tree.num_nodes))
            rows.extend(start + node for node in known)
            small.extend(row for row in tree.draft_logits if row is not None)
            groups.append(_row_group(sequence, tree, known))
        start += tree.num_nodes
    device = chosen.device
    chosen = chosen.index_fill(0, upload(np.array(undecided, np.int64), device), UNDECIDED)
    if not rows:
        return chosen
    index = upload(np.array(rows, np.int64), device)
    scores = mixture_scores(torch.stack(small), processed[index], groups)
    return chosen.index_copy(0, index, scores.argmax(-1))


def _row_group(sequence: JudgedSequence, tree: TokenTree, nodes: list[int]) -> RowGroup:
    return RowGroup(
        sequence=sequence,
        depths=[tree.depth[node] for node in nodes],
        paths=lambda: [tree.paths[node] for node in nodes],
    )


def mixture_scores(small: Tensor, processed: Tensor, groups: SequenceOf[RowGroup]) -> Tensor:
    """log pi with the noise, float32 [num_rows, num_tokens], over the ids that both models know.

    `small`: the small model's logits, [num_rows, …]; `processed`: float32 [num_rows, vocab_size],
    the large one's after `process_logits`. The groups' rows one after the other.
    """
    small_logits = process_logits(small.to(processed), groups)
    num_common = min(small_logits.shape[1], processed.shape[1])
    log_pi = log_mixture(small_logits[:, :num_common], processed[:, :num_common], groups)
    return add_noise(log_pi, groups)


def log_mixture(small: Tensor, large: Tensor, groups: SequenceOf[RowGroup]) -> Tensor:
    """log pi up to a constant a row, float32 [num_rows, num_tokens].

    `small`, `large`: float32 [num_rows, num_tokens], both models' processed logits; the groups'
    rows one after the other, each group's sequence with a cascade.
    """
    parameters: list[tuple[float, float, float]] = []
    rules: set[CascadeRule] = set()
    for group in groups:
        cascade, sampling = group.sequence.cascade, group.sequence.sampling
        assert cascade is not None
        own = (cascade.alpha, float(cascade.rule == "opt"), float(sampling.is_greedy))
        parameters.extend([own] * len(group.depths))
        rules.add(cascade.rule)
    columns = upload(np.array(parameters, np.float32), small.device)  # [num_rows, 3]
    alpha, is_opt, is_greedy = columns[:, :1], columns[:, 1:2] > 0, columns[:, 2:] > 0
    log_small, log_large = log_targets(small, groups), log_targets(large, groups)
    if any(group.sequence.sampling.is_greedy for group in groups):
        log_small = _concentrate(log_small, is_greedy)
        log_large = _concentrate(log_large, is_greedy)
    small_probs, large_probs = log_small.softmax(-1), log_large.softmax(-1)
    large1 = large.softmax(-1)
    max_large = large1.amax(-1, keepdim=True)  # [num_rows, 1]

    log_pi = log_large
    if "opt" in rules:
        max_small = small.softmax(-1).amax(-1, keepdim=True)
        distance = (small_probs - large_probs).clamp(min=0.0).sum(-1, keepdim=True)
        defers = max_small < max_large - alpha * distance - _ROUNDING
        log_pi = torch.where(defers, log_large, log_small)
    if "token_specific" in rules:
        is_rejected = large1 < (1.0 - alpha) * max_large  # [num_rows, num_tokens]
        rejected_mass = (small_probs * is_rejected).sum(-1, keepdim=True)
        log_specific = (small_probs * ~is_rejected + large_probs * rejected_mass).log()
        log_pi = torch.where(is_opt, log_pi, log_specific)
    # What the small model cannot say at all (its rules left nothing) is left to the large one.
    return torch.where(small.amax(-1, keepdim=True) == -torch.inf, log_large, log_pi)


def _concentrate(log_probs: Tensor, is_greedy: Tensor) -> Tensor:
    """Put all mass on the likeliest token at temperature 0; `is_greedy`: bool [num_rows, 1]."""
    best = log_probs.argmax(-1, keepdim=True)
    point = torch.full_like(log_probs, -torch.inf).scatter_(1, best, 0.0)
    return torch.where(is_greedy, point, log_probs)
