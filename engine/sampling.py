"""The scores whose argmax is the emitted token, for rows of many sequences at once."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.logit_rules import LogitEdits, LogitRule, SamplingRule
from engine.noise import SequenceNoise
from engine.sequence import Sequence
from kernels.sample import log_target


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """The rows of one sequence, each of which decides a token.

    depths: for each row, how many tokens stand between the sequence's last one and the decided one,
    so the decided position is len(token_ids) + depth. paths: makes these tokens, for the few
    sequences with rules that look at them. noise: instead of the sequence's own.
    """

    sequence: Sequence
    depths: list[int]
    paths: Callable[[], list[list[int]]]
    noise: SequenceNoise | None = None


def process_logits(logits: Tensor, groups: SequenceOf[RowGroup]) -> Tensor:
    """The logits after every sequence's rules; `logits` itself where there are none.

    logits: float32 [num_rows, vocab_size], the groups' rows one after the other; not changed.
    """
    processed = logits
    edits = LogitEdits(logits.shape[1])  # of all sequences, made in one go
    others: list[tuple[LogitRule, int, RowGroup, list[list[int]]]] = []
    start = 0
    for group in groups:
        sequence, num_rows = group.sequence, len(group.depths)
        paths = group.paths() if sequence.rules and num_rows else []
        for rule in sequence.rules if num_rows else ():
            if isinstance(rule, SamplingRule):
                rule.collect(edits, start, sequence.token_ids, paths)
            else:
                others.append((rule, start, group, paths))
        start += num_rows
    if edits or others:
        processed = logits.clone()
    if edits:
        edits.apply(processed)
    for rule, start, group, paths in others:  # after the edits: a grammar has the last word
        rows = processed[start : start + len(group.depths)]
        rule.apply(rows, group.sequence.token_ids, paths)
    return processed


def perturbed_scores(logits: Tensor, groups: SequenceOf[RowGroup]) -> Tensor:
    """log target + Gumbel noise, float32 [num_rows, vocab_size]; processed logits when greedy.

    logits: float32 [num_rows, vocab_size], the groups' rows one after the other. The target and the
    drafter rank with the same function, which is what makes them agree.
    """
    return add_noise(log_targets(process_logits(logits, groups), groups), groups)


def log_targets(processed: Tensor, groups: SequenceOf[RowGroup]) -> Tensor:
    """Unnormalised log target of sampled rows; greedy rows stay as they are.

    processed: float32 [num_rows, vocab_size], after `process_logits`.
    """
    rows: list[int] = []
    parameters: list[tuple[float, float, float, float]] = []
    start = 0
    for group in groups:
        sampling = group.sequence.request.sampling
        if not sampling.is_greedy:
            rows.extend(range(start, start + len(group.depths)))
            own = (sampling.temperature, float(sampling.top_k), sampling.top_p, sampling.min_p)
            parameters.extend([own] * len(group.depths))
        start += len(group.depths)
    if not rows:
        return processed
    columns = torch.tensor(parameters, dtype=torch.float32, device=processed.device).T.contiguous()
    temperature, top_k, top_p, min_p = columns  # [num_sampled_rows] each
    is_mixed = len(rows) < processed.shape[0]  # greedy rows keep their logits
    if not is_mixed:
        return log_target(processed, temperature, top_k.to(torch.int64), top_p, min_p)
    index = torch.tensor(rows, device=processed.device)
    scores = log_target(processed[index], temperature, top_k.to(torch.int64), top_p, min_p)
    return processed.index_copy(0, index, scores)


def add_noise(log_probs: Tensor, groups: SequenceOf[RowGroup]) -> Tensor:
    """Add each sampled row's Gumbel noise, by the position that it decides.

    log_probs: float32 [num_rows, vocab_size]; changed nowhere, returned where nothing is sampled.
    """
    noise: list[Tensor] = []
    rows: list[int] = []
    start = 0
    for group in groups:
        sequence, depths = group.sequence, group.depths
        if depths and not sequence.request.sampling.is_greedy:
            first, last = min(depths), max(depths)
            position = len(sequence.token_ids) + first
            noise_rows = (group.noise or sequence.noise).rows
            table = noise_rows(position, last - first + 1, log_probs.device)
            noise.append(table[[depth - first for depth in depths], : log_probs.shape[1]])
            rows.extend(range(start, start + len(depths)))
        start += len(depths)
    if not rows:
        return log_probs
    if len(rows) == log_probs.shape[0]:
        return log_probs + torch.cat(noise)
    index = torch.tensor(rows, device=log_probs.device)
    return log_probs.index_add(0, index, torch.cat(noise))
