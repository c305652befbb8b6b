"""The scores whose argmax is the emitted token, for rows of many sequences at once.

Where only a token is wanted, kernels make the noise as they need it, from keys and parameters that
go to the device in one copy. Where scores are wanted on a CPU (of drafts, of a cascade), a
sequence's noise is computed once and kept.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kernels.sampling.choice import (
    MASK_BITS,
    choose_allowed_tokens,
    choose_row_tokens,
)
from outrider.kernels.sampling.gumbel_noise import row_keys
from outrider.kernels.sampling.sample import log_target, perturb
from outrider.kernels.sampling.sampling_rows import SamplingRows, SamplingTable, field_stride
from outrider.kernels.triton_support import uses_triton
from outrider.kernels.upload import upload
from outrider.verifier.judged import JudgedSequence
from outrider.verifier.logit_rules import LogitEdits, LogitRule, MaskRule, SamplingRule
from outrider.verifier.noise import SequenceNoise
from outrider.verifier.own_failure import OwnFailure
from outrider.verifier.params import SamplingParams

# Beyond every vocabulary, and still exact in float32.
_MOST_TOP_K = 2**24

NOT_FINITE: Final = -2
"""In the place of a token that was chosen by a number that is not finite."""


@dataclass(slots=True, kw_only=True)
class RowGroup:
    """The rows of one sequence, each of which decides a token."""

    sequence: JudgedSequence
    depths: list[int]
    """For each row, the tokens between the sequence's last one and the decided one. The decided
    position is len(token_ids) + depth."""
    paths: Callable[[], list[list[int]]]
    """Makes these tokens, for the few sequences with rules that look at them."""
    noise: SequenceNoise | None = None
    """In place of the sequence's own."""


def process_logits(logits: Tensor, groups: SequenceOf[RowGroup]) -> Tensor:
    """The logits after every sequence's rules; `logits` itself where there are none.

    `logits`: float32 [num_rows, vocab_size], the groups' rows one after the other; not changed.
    """
    processed = logits
    edits = LogitEdits(logits.shape[1])  # of all sequences, made in one go
    others: list[tuple[LogitRule, int, RowGroup, list[list[int]]]] = []
    start = 0
    for group in groups:
        sequence, num_rows = group.sequence, len(group.depths)
        if sequence.rules and num_rows and sequence.failure is None:
            with OwnFailure(sequence):
                paths = group.paths()
                for rule in sequence.rules:
                    if isinstance(rule, SamplingRule):
                        rule.collect(edits, start, sequence.token_ids, paths)
                    else:
                        others.append((rule, start, group, paths))
        start += num_rows
    if edits or others:
        processed = logits.clone()
    if edits:
        edits.apply(processed)
    for rule, start, group, paths in others:  # after the edits: what they forbid has the last word
        rows = processed[start : start + len(group.depths)]
        with OwnFailure(group.sequence):
            rule.apply(rows, group.sequence.token_ids, paths)
    return processed


def perturbed_scores(logits: Tensor, groups: SequenceOf[RowGroup]) -> Tensor:
    """log target + Gumbel noise, float32 [num_rows, vocab_size]; processed logits when greedy.

    `logits`: float32 [num_rows, vocab_size], the groups' rows one after the other. The target and
    the drafter rank with the same function, which is what makes them agree.
    """
    if all(takes_greatest(group.sequence) for group in groups):
        return logits
    return perturbed(process_logits(logits, groups), groups)


def takes_greatest(sequence: JudgedSequence) -> bool:
    """True if a sequence's scores are the logits as they are."""
    return sequence.sampling.is_greedy and not sequence.rules


def perturbed(processed: Tensor, groups: SequenceOf[RowGroup]) -> Tensor:
    """`perturbed_scores` of logits after `process_logits`."""
    if uses_triton(processed):
        return perturb(processed, sampling_rows(groups, processed.device))
    return add_noise(log_targets(processed, groups), groups)


def choose_tokens(processed: Tensor, groups: SequenceOf[RowGroup]) -> Tensor:
    """argmax(log target + Gumbel noise) of each row, int64 [num_rows]; only launched on CUDA.

    `processed`: float32 [num_rows, vocab_size], after `process_logits`.
    """
    return choose_row_tokens(processed, sampling_rows(groups, processed.device))


def choose_ruled_tokens(logits: Tensor, groups: SequenceOf[RowGroup]) -> Tensor:
    """`choose_tokens` of `process_logits`: of rows under grammars alone without their copies.

    `logits`: float32 [num_rows, vocab_size], as for `process_logits`.
    """
    if not uses_triton(logits) and _are_masked(groups):
        masks = _masks_of(groups, logits.shape[1])
        chosen = choose_allowed_tokens(logits, sampling_rows(groups, logits.device), masks)
        if chosen is not None:
            return chosen
    return choose_tokens(process_logits(logits, groups), groups)


def _are_masked(groups: SequenceOf[RowGroup]) -> bool:
    """True if masks are the only rules, and there are some."""
    rules = [group.sequence.rules for group in groups if group.sequence.rules]
    return bool(rules) and all(len(own) == 1 and isinstance(own[0], MaskRule) for own in rules)


def _masks_of(groups: SequenceOf[RowGroup], vocab_size: int) -> npt.NDArray[np.int32]:
    """The masks of all rows, [num_rows, ceil(vocab_size / MASK_BITS)]."""
    num_words = -(-vocab_size // MASK_BITS)
    masks = np.full((sum(len(group.depths) for group in groups), num_words), -1, dtype=np.int32)
    start = 0
    for group in groups:
        sequence = group.sequence
        for rule in sequence.rules:
            if isinstance(rule, MaskRule) and group.depths and sequence.failure is None:
                with OwnFailure(sequence):
                    own = rule.masks(sequence.token_ids, group.paths())
                    for row, mask in enumerate(own, start):
                        if mask is not None:
                            masks[row, len(mask) :] = 0
                            masks[row, : len(mask)] = mask[:num_words]
        start += len(group.depths)
    return masks


def mark_not_finite(chosen: Tensor, logits: Tensor) -> Tensor:
    """Return the tokens, `NOT_FINITE` where their own logits are NaN or infinite; only launched.

    `chosen`: int64 [num_rows]; `logits`: float32 [num_rows, vocab_size], before `process_logits`.
    So the host learns of such numbers by the tokens that it reads anyway.
    """
    known = chosen.clamp(0, logits.shape[1] - 1)  # a row of NaN may have named no token at all
    is_sound = logits.gather(1, known[:, None])[:, 0].isfinite() & (known == chosen)
    return chosen.where(is_sound, NOT_FINITE)


def log_targets(processed: Tensor, groups: SequenceOf[RowGroup]) -> Tensor:
    """Unnormalised log target of sampled rows; greedy rows stay as they are.

    `processed`: float32 [num_rows, vocab_size], after `process_logits`.
    """
    if uses_triton(processed):
        return perturb(processed, sampling_rows(groups, processed.device), with_noise=False)
    rows: list[int] = []
    parameters: list[tuple[float, float, float, float]] = []
    start = 0
    for group in groups:
        sampling = group.sequence.sampling
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

    `log_probs`: float32 [num_rows, vocab_size]; changed nowhere, returned where nothing is sampled.
    """
    if uses_triton(log_probs):
        rows_to_draw = sampling_rows(groups, log_probs.device, has_noise_only=True)
        return perturb(log_probs, rows_to_draw)
    noise: list[Tensor] = []
    rows: list[int] = []
    start = 0
    for group in groups:
        sequence, depths = group.sequence, group.depths
        if depths and not sequence.sampling.is_greedy:
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


# ---- for the kernels ------------------------------------------------------------------------


def sampling_rows(
    groups: SequenceOf[RowGroup], device: torch.device, *, has_noise_only: bool = False
) -> SamplingRows:
    """Parameters and noise keys of the groups' rows, in one copy that the host does not wait for.

    `has_noise_only`: sampled rows keep their scores as they are, but for the noise.
    """
    words = upload(sampling_words(groups, has_noise_only=has_noise_only), device)
    return sampling_rows_of(words, groups, has_noise_only=has_noise_only)


def sampling_words(
    groups: SequenceOf[RowGroup], *, has_noise_only: bool = False
) -> npt.NDArray[np.int32]:
    """Pack what `sampling_rows_of` reads on the device, as it is brought there."""
    samplings = [group.sequence.sampling for group in groups]
    counts = [len(group.depths) for group in groups]
    num_rows = sum(counts)
    if has_noise_only:
        own = np.array([[not sampling.is_greedy, 0, 1, 0] for sampling in samplings], np.float32)
    else:
        own = np.array([_parameters(sampling) for sampling in samplings], np.float32)
    positions = [
        len(group.sequence.token_ids) + depth for group in groups for depth in group.depths
    ]
    streams = [(group.noise or group.sequence.noise).stream_key for group in groups]
    keys = row_keys(
        np.repeat(np.array(streams, np.uint64), counts), np.array(positions, np.int64)
    )  # [num_rows, 2]
    stride = field_stride(num_rows)
    words = np.zeros(6 * stride, dtype=np.int32)
    fields = words[: 4 * stride].reshape(4, stride)
    fields[:, :num_rows] = np.repeat(_bits(own), counts, axis=1)
    words[4 * stride : 4 * stride + 2 * num_rows] = keys.reshape(-1)
    return words


def sampling_rows_of(
    words: Tensor, groups: SequenceOf[RowGroup], *, has_noise_only: bool = False
) -> SamplingRows:
    """The groups' rows from their `sampling_words` on the device."""
    samplings = [group.sequence.sampling for group in groups]
    return SamplingRows.of_words(
        words,
        sum(len(group.depths) for group in groups),
        has_sampled=any(not sampling.is_greedy for sampling in samplings),
        has_truncation=not has_noise_only and any(truncates(s) for s in samplings),
    )


def forest_sampling_rows(
    sequences: SequenceOf[JudgedSequence], max_depth: int, device: torch.device
) -> SamplingTable:
    """The parameters of all rows of these trees, in one copy that the host does not wait for.

    Row (b, d) decides the token behind a node of sequence b at depth d, at most `max_depth`.
    """
    samplings = [sequence.sampling for sequence in sequences]
    own = np.array([_parameters(sampling) for sampling in samplings], np.float32)
    streams = np.array([sequence.noise.stream_key for sequence in sequences], np.uint64)
    lengths = np.array([len(sequence.token_ids) for sequence in sequences], np.int64)
    keys = row_keys(streams[:, None], lengths[:, None] + np.arange(max_depth + 1))
    num_sequences = len(sequences)
    words = upload(np.concatenate((_bits(own).reshape(-1), keys.reshape(-1))), device)
    return SamplingTable(
        parameters=words[: 4 * num_sequences].view(4, num_sequences),
        noise_keys=words[4 * num_sequences :].view(num_sequences, max_depth + 1, 2),
        has_sampled=any(not sampling.is_greedy for sampling in samplings),
        has_truncation=any(truncates(sampling) for sampling in samplings),
    )


def _parameters(sampling: SamplingParams) -> tuple[float, int, float, float]:
    if sampling.is_greedy:
        return 0.0, 0, 1.0, 0.0
    top_k = min(sampling.top_k, _MOST_TOP_K)
    return sampling.temperature, top_k, sampling.top_p, sampling.min_p


def truncates(sampling: SamplingParams) -> bool:
    """True if top-k, top-p or min-p may cut tokens."""
    is_off = sampling.top_k == 0 and sampling.top_p >= 1.0 and sampling.min_p <= 0.0
    return not (sampling.is_greedy or is_off)


def _bits(parameters: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """The bits of temperature, top-k (as an integer), top-p and min-p, [4, num_sequences]."""
    fields = np.ascontiguousarray(parameters.reshape(-1, 4).T)
    bits = fields.view(np.int32).copy()
    bits[1] = fields[1].astype(np.int32)
    return bits
