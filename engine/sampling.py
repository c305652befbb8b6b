"""The scores whose argmax is the emitted token, for rows of many sequences at once."""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from engine.sequence import Sequence
from kernels.sample import log_target


def perturbed_scores(
    logits: Tensor, sequences: SequenceOf[Sequence], positions: SequenceOf[list[int]]
) -> Tensor:
    """log target + Gumbel noise, float32 [num_rows, vocab_size]; raw logits for greedy sequences.

    logits: float32 [num_rows, vocab_size], the rows of the sequences one after the other.
    positions: for each sequence, the position in the text that each of its rows decides. The
    target and the drafter rank with the same function, which is what makes them agree.
    """
    if all(sequence.request.sampling.is_greedy for sequence in sequences):
        return logits
    rows: list[int] = []
    parameters: list[tuple[float, float, float, float]] = []
    noise: list[Tensor] = []
    start = 0
    for sequence, decided in zip(sequences, positions, strict=True):
        sampling = sequence.request.sampling
        if decided and not sampling.is_greedy:
            first, last = min(decided), max(decided)
            table = sequence.noise.rows(first, last - first + 1, logits.device)
            noise.append(table[[position - first for position in decided], : logits.shape[1]])
            rows.extend(range(start, start + len(decided)))
            own = (sampling.temperature, float(sampling.top_k), sampling.top_p, sampling.min_p)
            parameters.extend([own] * len(decided))
        start += len(decided)
    if not rows:
        return logits
    columns = torch.tensor(parameters, dtype=torch.float32, device=logits.device).T.contiguous()
    temperature, top_k, top_p, min_p = columns  # [num_sampled_rows] each
    is_mixed = len(rows) < logits.shape[0]  # greedy rows keep their logits
    index = torch.tensor(rows, device=logits.device)
    sampled = logits[index] if is_mixed else logits
    scores = log_target(sampled, temperature, top_k.to(torch.int64), top_p, min_p)
    scores += torch.cat(noise)
    return logits.index_copy(0, index, scores) if is_mixed else scores
