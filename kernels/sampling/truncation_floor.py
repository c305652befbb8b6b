"""The least score that top-k, top-p and min-p leave in a row.

Holtzman, Buys, Du, Forbes, Choi, "The Curious Case of Neural Text Degeneration", 2020 (top-p);
Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024.

On a GPU nothing is sorted. The vocabulary is read three times, by chunks side by side: for the
likeliest score and the sum of all weights, exp(score - likeliest); for how many tokens, and what
weight, reach each of 16 levels below the likeliest score; and to collect the tokens between the two
levels that have the border between them. Among these, mostly few, one program a row then searches
the border by halving the range of float32 numbers. Where they are too many to be collected, it
reads all logits instead. All sums are added up in an order that the row alone decides. On a CPU the
compiled library does likewise (kernels/cpu/sampling_kernels.h).
"""

import ctypes
from typing import Final

import torch
from torch import Tensor

from outrider.kernels.cpu.structs import FloorsCall
from outrider.kernels.sampling.compiled import instruction_set, num_threads_for, row_library
from outrider.kernels.sampling.floor_search import cuts_of, peak_of, scaled, search_floor_kernel
from outrider.kernels.sampling.sampling_rows import SamplingRows
from outrider.kernels.triton_support import jit, launch, next_power_of_2, tl, uses_triton

# Truncations are worked out on the likeliest tokens; the whole vocabulary is sorted only where a
# nucleus reaches beyond them.
_NUM_LIKELIEST = 256

_CHUNK: Final = 4096  # tokens that one program reads
_CAPACITY: Final = 4096  # tokens that a row can collect
_NUM_WARPS: Final = 8
NUM_LEVELS: Final = 16  # at (level + 1)^2 / 16 below the likeliest score


def floor_of_scores(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The specification: the least score that stays in each row, [num_rows, 1].

    `scores`: float32 [num_rows, vocab_size]; the parameters as in `SamplingRows`, but top_k is
    int64 and vocab_size (or more) where it is off.
    """
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
    # A row that keeps the whole vocabulary at this stage is normalised over all of it.
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


def floor_on_host(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`floor_of_scores`, compiled where the library takes the rows; sums may round otherwise."""
    library = row_library(scores)
    if library is None:
        return floor_of_scores(scores, top_k, top_p, min_p)
    floors = scores.new_empty(scores.shape[0], 1)
    cuts = (top_k.contiguous(), top_p.contiguous(), min_p.contiguous())
    call = FloorsCall(
        *scores.shape,
        scores.stride(0),
        scores.data_ptr(),
        *(cut.data_ptr() for cut in cuts),
        floors.data_ptr(),
    )
    library.find_floors(ctypes.addressof(call), instruction_set(), num_threads_for(scores))
    return floors


def _reference_floor(logits: Tensor, rows: SamplingRows) -> Tensor:
    vocab_size = logits.shape[1]
    is_sampled = rows.temperature > 0
    scores = logits / rows.temperature.where(is_sampled, 1.0)[:, None]  # [num_rows, vocab_size]
    top_k = rows.top_k.to(torch.int64)
    top_k = top_k.where((top_k > 0) & (top_k < vocab_size), vocab_size)
    floor = floor_on_host(scores, top_k, rows.top_p, rows.min_p)[:, 0]
    return floor.where(is_sampled, -torch.inf)


# ---- in Triton ------------------------------------------------------------------------------


@jit
def _chunk_sums_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    peaks_ptr,
    sums_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    logits_stride,
    vocab_size,
    CHUNK: tl.constexpr,
):
    """The greatest score of each chunk, and the sum of exp(score - greatest)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, cuts_k, cuts_p = cuts_of(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size)
    if cuts_k | cuts_p | ((temperature > 0) & (tl.load(min_p_ptr + row) > 0.0)):
        token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
        logits = tl.load(
            logits_ptr + row * logits_stride + token_ids,
            mask=token_ids < vocab_size,
            other=float("-inf"),
        )
        scores = scaled(logits, temperature)
        peak = tl.max(scores, axis=0)
        # A chunk without a possible token weighs nothing.
        weights = tl.exp(scores - tl.where(peak == float("-inf"), 0.0, peak))
        place = row * tl.num_programs(1) + chunk
        tl.store(peaks_ptr + place, peak)
        tl.store(sums_ptr + place, tl.sum(weights, axis=0))


@jit
def _count_levels_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    counts_ptr,
    masses_ptr,
    peaks_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    logits_stride,
    vocab_size,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Count how many tokens of each chunk reach each level, and what they weigh."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, cuts_k, cuts_p = cuts_of(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size)
    if cuts_k | cuts_p:
        num_chunks = tl.num_programs(1)
        chunks = tl.arange(0, CHUNKS)
        peaks = tl.load(
            peaks_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf")
        )
        peak = peak_of(peaks)
        token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
        is_token = token_ids < vocab_size
        logits = tl.load(
            logits_ptr + row * logits_stride + token_ids, mask=is_token, other=float("-inf")
        )
        scores = scaled(logits, temperature)
        weights = tl.exp(scores - peak)
        place = (row * num_chunks + chunk) * LEVELS
        for level in tl.static_range(LEVELS):
            is_in = is_token & (scores >= peak - (level + 1) * (level + 1) * 0.0625)
            tl.store(counts_ptr + place + level, tl.sum(is_in.to(tl.int32), axis=0))
            tl.store(masses_ptr + place + level, tl.sum(tl.where(is_in, weights, 0.0), axis=0))


@jit
def _collect_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    candidates_ptr,
    values_ptr,
    numbers_ptr,
    counts_ptr,
    masses_ptr,
    peaks_ptr,
    sums_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    logits_stride,
    vocab_size,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LEVELS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Collect the scores between the two levels that have the border between them.

    values, float32 [num_rows, 4]: the lower level, the upper one, the weight from there upwards,
    the weight of all tokens. numbers, int32 [num_rows, 2]: tokens from the upper level upwards,
    tokens between the two.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, cuts_k, cuts_p = cuts_of(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size)
    if cuts_k | cuts_p:
        num_chunks = tl.num_programs(1)
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        chunks, levels = tl.arange(0, CHUNKS), tl.arange(0, LEVELS)
        is_chunk = chunks < num_chunks
        peaks = tl.load(peaks_ptr + row * num_chunks + chunks, mask=is_chunk, other=float("-inf"))
        sums = tl.load(sums_ptr + row * num_chunks + chunks, mask=is_chunk, other=0.0)
        peak = peak_of(peaks)
        total = tl.sum(sums * tl.exp(peaks - peak), axis=0)
        places = (row * num_chunks + chunks[:, None]) * LEVELS + levels[None, :]
        counts = tl.load(counts_ptr + places, mask=is_chunk[:, None], other=0)
        masses = tl.load(masses_ptr + places, mask=is_chunk[:, None], other=0.0)
        count_of, mass_of = tl.sum(counts, axis=0), tl.sum(masses, axis=0)  # [LEVELS]

        # From the first level with enough tokens on, all of the top-k are in.
        wanted = tl.where(cuts_k, top_k, 0x7FFFFFFF)
        level_k = tl.min(tl.where(count_of >= wanted, levels, LEVELS), axis=0)
        # What the top-k weigh together is known up to a level; without top-k it is all.
        most = tl.sum(tl.where(levels == level_k, mass_of, 0.0), axis=0)
        most = tl.where(level_k < LEVELS, most, total)
        least = tl.maximum(tl.sum(tl.where(levels == level_k - 1, mass_of, 0.0), axis=0), 1.0)
        least = tl.where(cuts_k, least, total)
        wanted_mass = tl.where(cuts_p, top_p * least, float("inf"))
        first_p = tl.min(tl.where(mass_of >= wanted_mass, levels, LEVELS), axis=0)
        last_p = tl.min(tl.where(mass_of >= top_p * most, levels, LEVELS), axis=0)
        lower = tl.where(cuts_k, level_k, last_p)
        upper = tl.minimum(tl.minimum(level_k, first_p), lower) - 1  # -1: there is none above

        own_sizes = tl.minimum(tl.maximum(vocab_size - chunks * CHUNK, 0), CHUNK)
        below = tl.sum(tl.where(levels[None, :] == lower, counts, 0), axis=1)  # [CHUNKS]
        below = tl.where(lower < LEVELS, below, own_sizes)
        above = tl.sum(tl.where(levels[None, :] == upper, counts, 0), axis=1)
        num_above, num_between = tl.sum(above, axis=0), tl.sum(below - above, axis=0)
        lower_bar = peak - ((lower + 1) * (lower + 1)).to(tl.float32) * 0.0625
        lower_bar = tl.where(lower < LEVELS, lower_bar, float("-inf"))
        upper_bar = peak - ((upper + 1) * (upper + 1)).to(tl.float32) * 0.0625
        upper_bar = tl.where(upper >= 0, upper_bar, float("inf"))
        if chunk == 0:
            mass_above = tl.sum(tl.where(levels == upper, mass_of, 0.0), axis=0)
            tl.store(values_ptr + row * 4, lower_bar)
            tl.store(values_ptr + row * 4 + 1, upper_bar)
            tl.store(values_ptr + row * 4 + 2, mass_above)
            tl.store(values_ptr + row * 4 + 3, total)
            tl.store(numbers_ptr + row * 2, num_above)
            tl.store(numbers_ptr + row * 2 + 1, num_between)
        if num_between <= CAPACITY:
            start = tl.sum(tl.where(chunks < chunk, below - above, 0), axis=0)
            token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
            is_token = token_ids < vocab_size
            logits = tl.load(
                logits_ptr + row * logits_stride + token_ids, mask=is_token, other=float("-inf")
            )
            scores = scaled(logits, temperature)
            is_in = is_token & (scores >= lower_bar) & (scores < upper_bar)
            place = start + tl.cumsum(is_in.to(tl.int32), axis=0) - 1
            tl.store(candidates_ptr + row * CAPACITY + place, scores, mask=is_in)


def _launch_floor(logits: Tensor, rows: SamplingRows) -> Tensor:
    num_rows, vocab_size = logits.shape
    num_chunks = -(-vocab_size // _CHUNK)
    chunks = next_power_of_2(num_chunks)
    grid = (num_rows, num_chunks)
    peaks = torch.empty(grid, device=logits.device)
    sums = torch.empty_like(peaks)
    masses = torch.empty(*grid, NUM_LEVELS, device=logits.device)
    counts = torch.empty_like(masses, dtype=torch.int32)
    candidates = torch.empty(num_rows, _CAPACITY, device=logits.device)
    values = torch.empty(num_rows, 4, device=logits.device)
    numbers = torch.empty(num_rows, 2, dtype=torch.int32, device=logits.device)
    floor = torch.empty(num_rows, device=logits.device)
    cuts = (rows.temperature, rows.top_k, rows.top_p)
    launch(
        _chunk_sums_kernel,
        grid,
        peaks,
        sums,
        logits,
        *cuts,
        rows.min_p,
        logits.stride(0),
        vocab_size,
        num_warps=_NUM_WARPS,
        CHUNK=_CHUNK,
    )
    launch(
        _count_levels_kernel,
        grid,
        counts,
        masses,
        peaks,
        logits,
        *cuts,
        logits.stride(0),
        vocab_size,
        num_warps=_NUM_WARPS,
        CHUNK=_CHUNK,
        CHUNKS=chunks,
        LEVELS=NUM_LEVELS,
    )
    launch(
        _collect_kernel,
        grid,
        candidates,
        values,
        numbers,
        counts,
        masses,
        peaks,
        sums,
        logits,
        *cuts,
        logits.stride(0),
        vocab_size,
        num_warps=_NUM_WARPS,
        CHUNK=_CHUNK,
        CHUNKS=chunks,
        LEVELS=NUM_LEVELS,
        CAPACITY=_CAPACITY,
    )
    launch(
        search_floor_kernel,
        (num_rows,),
        floor,
        candidates,
        values,
        numbers,
        peaks,
        logits,
        *cuts,
        rows.min_p,
        logits.stride(0),
        vocab_size,
        num_chunks,
        num_warps=_NUM_WARPS,
        CHUNKS=chunks,
        CAPACITY=_CAPACITY,
    )
    return floor


def truncation_floor(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The least score, logit / temperature, that stays in each row: float32 [num_rows].

    `logits`: float32 [num_rows, vocab_size]. Top-k, top-p among its tokens, then min-p; of equal
    scores at the border all stay, and the likeliest token always does. -inf where nothing is cut,
    so also in greedy rows.
    """
    if not rows.has_truncation:
        return torch.full((logits.shape[0],), -torch.inf, device=logits.device)
    if uses_triton(logits):
        return _launch_floor(logits, rows)
    return _reference_floor(logits, rows)
