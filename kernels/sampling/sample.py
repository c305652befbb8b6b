"""The distribution of a request, and its likeliest or drawn tokens, row by row.

A token is drawn as argmax(log target + Gumbel noise), so drawing is ranking; the noise is a
function of its key (kernels/sampling/gumbel_noise.py) and never stored.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from outrider.kernels.sampling.floor_search import scaled
from outrider.kernels.sampling.gumbel_noise import gumbel_noise, gumbel_of
from outrider.kernels.sampling.sampling_rows import SamplingRows, SamplingTable
from outrider.kernels.sampling.truncation_floor import floor_on_host, truncation_floor
from outrider.kernels.triton_support import jit, launch, next_power_of_2, tl, uses_triton

__all__ = [
    "MAX_TOP_TOKENS",
    "SamplingRows",
    "SamplingTable",
    "TopTokens",
    "log_target",
    "perturb",
    "top_tokens",
]

MAX_TOP_TOKENS: Final = 8
_CHUNK: Final = 2048  # tokens that one program reads
_NUM_WARPS: Final = 8


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class TopTokens:
    """The best tokens of each row, the best first."""

    token_ids: Tensor
    """int64 [num_rows, num_tokens]."""
    scores: Tensor
    """float32 [num_rows, num_tokens]."""
    probs: Tensor | None
    """float32 [num_rows, num_tokens], exp(score) as a share of its sum over the row, where it was
    asked for."""


def log_target(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Unnormalised log-probabilities after temperature, top-k, top-p and min-p, in this order.

    `logits`: float32 [num_rows, vocab_size]; the parameters: [num_rows] (float32, top_k int64),
    with temperature > 0; top_k 0, top_p 1 and min_p 0 are off. Tokens that are cut have -inf; of
    equal logits at the border all stay. The likeliest token always stays. In torch, on every
    device; waits for the device.
    """
    scores = logits / temperature[:, None]  # [num_rows, vocab_size]
    vocab_size = scores.shape[1]
    cuts_k = (top_k > 0) & (top_k < vocab_size)
    cuts_p = top_p < 1.0
    if not bool((cuts_k | cuts_p | (min_p > 0)).any()):
        return scores
    floor = floor_on_host(scores, top_k.where(cuts_k, vocab_size), top_p, min_p)
    return scores.masked_fill(scores < floor, float("-inf"))


# ---- the specification ----------------------------------------------------------------------


def _reference_scores(
    logits: Tensor, rows: SamplingRows, *, with_noise: bool, ids: Tensor | None = None
) -> Tensor:
    if not rows.has_sampled:
        return logits
    is_sampled = (rows.temperature > 0)[:, None]
    scores = logits / rows.temperature[:, None].where(is_sampled, 1.0)  # [num_rows, vocab_size]
    if rows.has_truncation:
        floor = truncation_floor(logits, rows)[:, None]
        scores.masked_fill_(scores < floor, -torch.inf)
    if with_noise:
        noise = gumbel_noise(rows.noise_keys, logits.shape[1] if ids is None else _end(ids))
        scores += (noise if ids is None else noise[:, ids]).where(is_sampled, 0.0)
    return scores


def _end(ids: Tensor) -> int:
    """Return the number behind the largest; waits for the device."""
    return int(ids.max()) + 1 if len(ids) else 0


def _order(scores: Tensor, ids: Tensor | None = None) -> Tensor:
    """int64 numbers in the order of the scores, equal ones by descending token id."""
    bits = (scores + 0.0).view(torch.int32)  # the two zeros are one
    ascending = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    token_ids = torch.arange(scores.shape[1], device=scores.device) if ids is None else ids
    return (ascending << 32) + (0xFFFFFFFF - token_ids)


def _reference_top(
    logits: Tensor,
    rows: SamplingRows,
    num_tokens: int,
    *,
    with_probs: bool,
    ids: Tensor | None,
) -> TopTokens:
    scores = _reference_scores(logits, rows, with_noise=True, ids=ids)
    if num_tokens == 1 and ids is None:
        places = scores.argmax(-1, keepdim=True)
    else:
        places = _order(scores, ids).topk(num_tokens).indices
    best = scores.gather(1, places)
    return TopTokens(
        token_ids=places if ids is None else ids[places],
        scores=best,
        probs=(best - scores.logsumexp(-1, keepdim=True)).exp() if with_probs else None,
    )


# ---- in Triton ------------------------------------------------------------------------------


@jit
def _scores_of(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    logits,
    token_ids,
    row,
    temperature_ptr,
    floor_ptr,
    keys_ptr,
    IS_SAMPLED: tl.constexpr,
    IS_CUT: tl.constexpr,
    HAS_NOISE: tl.constexpr,
):
    """log target + noise of some of a row's tokens; their logits where it is greedy."""
    scores = logits
    if IS_SAMPLED:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            scores = scaled(logits, temperature)
            if IS_CUT:
                floor = tl.load(floor_ptr + row)
                scores = tl.where(scores < floor, float("-inf"), scores)
            if HAS_NOISE:
                key_low, key_high = tl.load(keys_ptr + 2 * row), tl.load(keys_ptr + 2 * row + 1)
                scores += gumbel_of(key_low, key_high, token_ids)
    return scores


@jit
def _perturb_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    scores_ptr,
    logits_ptr,
    temperature_ptr,
    floor_ptr,
    keys_ptr,
    logits_stride,
    vocab_size,
    IS_CUT: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token_ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_token = token_ids < vocab_size
    logits = tl.load(logits_ptr + row * logits_stride + token_ids, mask=is_token)
    scores = _scores_of(
        logits, token_ids, row, temperature_ptr, floor_ptr, keys_ptr, True, IS_CUT, HAS_NOISE
    )
    tl.store(scores_ptr + row * vocab_size + token_ids, scores, mask=is_token)


@jit
def _chunk_top_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    best_ptr,
    peaks_ptr,
    sums_ptr,
    logits_ptr,
    temperature_ptr,
    floor_ptr,
    keys_ptr,
    ids_ptr,
    logits_stride,
    vocab_size,
    HAS_IDS: tl.constexpr,
    IS_SAMPLED: tl.constexpr,
    IS_CUT: tl.constexpr,
    HAS_TOTALS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The best tokens of one chunk of a row, as numbers in `_order`, and its share of the total."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
    is_token = token_ids < vocab_size
    logits = tl.load(
        logits_ptr + row * logits_stride + token_ids, mask=is_token, other=float("-inf")
    )
    if HAS_IDS:  # what lies beyond ranks behind every token
        token_ids = tl.load(ids_ptr + token_ids, mask=is_token, other=0x7FFFFFFF).to(tl.int32)
    scores = _scores_of(
        logits, token_ids, row, temperature_ptr, floor_ptr, keys_ptr, IS_SAMPLED, IS_CUT, True
    )
    place = row * tl.num_programs(1) + chunk
    if HAS_TOTALS:
        peak = tl.max(scores, axis=0)
        tl.store(peaks_ptr + place, peak)
        weights = tl.exp(scores - tl.where(peak == float("-inf"), 0.0, peak))
        tl.store(sums_ptr + place, tl.sum(weights, axis=0))
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # the two zeros are one
    ascending = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    order = (ascending << 32) + (0xFFFFFFFF - token_ids.to(tl.int64))
    # What lies beyond the vocabulary has -inf, and ranks behind every token that has it, too.
    for rank in tl.static_range(NUM_TOKENS):
        best = tl.max(order, axis=0)
        tl.store(best_ptr + place * NUM_TOKENS + rank, best)
        if rank + 1 < NUM_TOKENS:
            order = tl.where(order == best, -0x8000000000000000, order)


@jit
def _merge_top_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    token_ids_ptr,
    scores_ptr,
    probs_ptr,
    best_ptr,
    peaks_ptr,
    sums_ptr,
    num_chunks,
    HAS_PROBS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_places = num_chunks * NUM_TOKENS
    places = tl.arange(0, PLACES)
    order = tl.load(
        best_ptr + row * num_places + places, mask=places < num_places, other=-0x8000000000000000
    )
    if HAS_PROBS:
        chunks = tl.arange(0, CHUNKS)
        is_chunk = chunks < num_chunks
        peaks = tl.load(peaks_ptr + row * num_chunks + chunks, mask=is_chunk, other=float("-inf"))
        sums = tl.load(sums_ptr + row * num_chunks + chunks, mask=is_chunk, other=0.0)
        peak = tl.max(peaks, axis=0)
        total = tl.sum(sums * tl.exp(peaks - tl.where(peak == float("-inf"), 0.0, peak)), axis=0)
        log_total = peak + tl.log(total)
    for rank in tl.static_range(NUM_TOKENS):
        best = tl.max(order, axis=0)
        order = tl.where(order == best, -0x8000000000000000, order)
        bits = (best >> 32).to(tl.int32)
        score = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(token_ids_ptr + row * NUM_TOKENS + rank, 0xFFFFFFFF - (best & 0xFFFFFFFF))
        tl.store(scores_ptr + row * NUM_TOKENS + rank, score)
        if HAS_PROBS:
            tl.store(probs_ptr + row * NUM_TOKENS + rank, tl.exp(score - log_total))


def _floor_if_cut(logits: Tensor, rows: SamplingRows) -> Tensor | None:
    is_cut = rows.has_sampled and rows.has_truncation
    return truncation_floor(logits, rows) if is_cut else None


def _launch_perturb(logits: Tensor, rows: SamplingRows, *, with_noise: bool) -> Tensor:
    num_rows, vocab_size = logits.shape
    scores = torch.empty(num_rows, vocab_size, device=logits.device)
    launch(
        _perturb_kernel,
        (num_rows, -(-vocab_size // _CHUNK)),
        scores,
        logits,
        rows.temperature,
        _floor_if_cut(logits, rows),
        rows.noise_keys,
        logits.stride(0),
        vocab_size,
        num_warps=_NUM_WARPS,
        IS_CUT=rows.has_truncation,
        HAS_NOISE=with_noise,
        CHUNK=_CHUNK,
    )
    return scores


def _launch_top(
    logits: Tensor,
    rows: SamplingRows,
    num_tokens: int,
    *,
    with_probs: bool,
    ids: Tensor | None,
) -> TopTokens:
    num_rows, vocab_size = logits.shape
    num_chunks = -(-vocab_size // _CHUNK)
    device = logits.device
    best = torch.empty(num_rows, num_chunks, num_tokens, dtype=torch.int64, device=device)
    peaks, sums, probs = None, None, None
    if with_probs:
        peaks = torch.empty(num_rows, num_chunks, device=device)
        sums = torch.empty_like(peaks)
        probs = torch.empty(num_rows, num_tokens, device=device)
    token_ids = torch.empty(num_rows, num_tokens, dtype=torch.int64, device=device)
    scores = torch.empty(num_rows, num_tokens, device=device)
    launch(
        _chunk_top_kernel,
        (num_rows, num_chunks),
        best,
        peaks,
        sums,
        logits,
        rows.temperature,
        _floor_if_cut(logits, rows),
        rows.noise_keys,
        ids,
        logits.stride(0),
        vocab_size,
        num_warps=_NUM_WARPS,
        HAS_IDS=ids is not None,
        IS_SAMPLED=rows.has_sampled,
        IS_CUT=rows.has_sampled and rows.has_truncation,
        HAS_TOTALS=with_probs,
        NUM_TOKENS=num_tokens,
        CHUNK=_CHUNK,
    )
    launch(
        _merge_top_kernel,
        (num_rows,),
        token_ids,
        scores,
        probs,
        best,
        peaks,
        sums,
        num_chunks,
        num_warps=_NUM_WARPS,
        HAS_PROBS=with_probs,
        NUM_TOKENS=num_tokens,
        CHUNKS=next_power_of_2(num_chunks),
        PLACES=next_power_of_2(num_chunks * num_tokens),
    )
    return TopTokens(token_ids=token_ids, scores=scores, probs=probs)


# ---- the launchers --------------------------------------------------------------------------


def perturb(logits: Tensor, rows: SamplingRows, *, with_noise: bool = True) -> Tensor:
    """log target + Gumbel noise of sampled rows, float32 [num_rows, vocab_size].

    `logits`: float32 [num_rows, vocab_size]; greedy rows keep them. Without noise: the unnormalised
    log target. Where no row is sampled, `logits` itself.
    """
    if rows.has_sampled and uses_triton(logits):
        return _launch_perturb(logits, rows, with_noise=with_noise)
    return _reference_scores(logits, rows, with_noise=with_noise)


def top_tokens(
    logits: Tensor,
    rows: SamplingRows,
    num_tokens: int,
    *,
    with_probs: bool = False,
    ids: Tensor | None = None,
) -> TopTokens:
    """Each row's best tokens by log target + Gumbel noise; by logits where a row is greedy.

    `logits`: float32 [num_rows, vocab_size]. Equal scores: the lowest token id first. `with_probs`:
    the chance that a model which shares the noise agrees. `ids`: int64 [vocab_size], the token of
    each column, all different, where the columns are some of a larger vocabulary's; noise, ties and
    the result are in terms of it. Raises ValueError for `num_tokens` outside [1, 8] or above the
    vocabulary.
    """
    if not 1 <= num_tokens <= min(MAX_TOP_TOKENS, logits.shape[1]):
        raise ValueError(
            f"num_tokens={num_tokens} must be in [1, {min(MAX_TOP_TOKENS, logits.shape[1])}]"
        )
    if uses_triton(logits):
        return _launch_top(logits, rows, num_tokens, with_probs=with_probs, ids=ids)
    return _reference_top(logits, rows, num_tokens, with_probs=with_probs, ids=ids)
