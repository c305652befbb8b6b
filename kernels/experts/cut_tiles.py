"""Sort pairs of a row and an expert by expert, and cut them into tiles of one expert each.

Only the device knows how many rows an expert has. So there are as many tiles as there can be at
most, and those beyond the last are empty.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.triton_support import jit, launch, next_power_of_2, tl, uses_triton

# Numbers that a program of the kernel holds at once when it counts: pairs times experts.
_COUNTED = 8192
_MIN_COUNTED_PAIRS = 16
_SORTED_PAIRS = 512
_FILLED_TILES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiles:
    """Pairs of a row and an expert, sorted by expert, and how they are cut. All int32.

    An empty tile has start == end.
    """

    order: Tensor
    """[n * k], which pair stands where."""
    expert: Tensor
    """[number of tiles], each tile's expert."""
    start: Tensor
    """[number of tiles], the first of its pairs."""
    end: Tensor
    """[number of tiles], behind its last pair."""


def max_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Return the number of tiles that suffices for every choice of experts."""
    return min(num_pairs, -(-num_pairs // tile_rows) + num_experts)


def cut_tiles_reference(experts: Tensor, num_experts: int, tile_rows: int) -> ExpertTiles:
    """Return the tiles of experts [n, k] (int64): of each expert in order, its pairs in order."""
    pairs = experts.reshape(-1)
    order = torch.argsort(pairs, stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=pairs.device)
    counts.scatter_add_(0, pairs, torch.ones_like(pairs))
    ends = counts.cumsum(0)  # of each expert's pairs
    num_tiles = (counts + tile_rows - 1) // tile_rows
    tile_ends = num_tiles.cumsum(0)
    bound = max_tiles(len(pairs), num_experts, tile_rows)
    tiles = torch.arange(bound, device=pairs.device)
    is_used = tiles < num_tiles.sum()
    expert = torch.searchsorted(tile_ends, tiles, right=True).clamp_(max=num_experts - 1)
    start = (ends - counts)[expert] + (tiles - (tile_ends - num_tiles)[expert]) * tile_rows
    end = torch.minimum(start + tile_rows, ends[expert])
    return ExpertTiles(
        order=order.to(torch.int32),
        expert=expert.where(is_used, 0).to(torch.int32),
        start=start.where(is_used, 0).to(torch.int32),
        end=end.where(is_used, 0).to(torch.int32),
    )


@jit
def _cut_tiles_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel's arguments
    experts,
    order,
    tile_expert,
    tile_start,
    tile_end,
    num_pairs,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNTED: tl.constexpr,
    SORTED: tl.constexpr,
    FILLED: tl.constexpr,
):
    """Program i: the order and the tiles of expert i's pairs. `EXPERTS`: a power of 2.

    Each program counts the pairs of all experts, which tells where its own begin: no program waits
    for another.
    """
    own = tl.program_id(0)
    number = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(0, num_pairs, COUNTED):
        pair = first + tl.arange(0, COUNTED)
        chosen = tl.load(experts + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        counts += tl.sum((chosen[:, None] == number[None, :]).to(tl.int32), 0)
    needed = (counts + TILE_ROWS - 1) // TILE_ROWS
    start = tl.sum(tl.where(number < own, counts, 0), 0)
    end = start + tl.sum(tl.where(number == own, counts, 0), 0)
    first_tile = tl.sum(tl.where(number < own, needed, 0), 0)
    used_tiles = tl.sum(needed, 0)
    place = start
    for first in range(0, num_pairs, SORTED):
        pair = first + tl.arange(0, SORTED)
        chosen = tl.load(experts + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        is_own = (chosen == own).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_own, 0) - is_own, pair, mask=is_own != 0)
        place += tl.sum(is_own, 0)
    for first in range(0, (end - start + TILE_ROWS - 1) // TILE_ROWS, FILLED):
        tile = first + tl.arange(0, FILLED)
        begin = start + tile * TILE_ROWS
        is_tile = begin < end
        tl.store(tile_expert + first_tile + tile, tl.zeros_like(tile) + own, mask=is_tile)
        tl.store(tile_start + first_tile + tile, begin, mask=is_tile)
        tl.store(tile_end + first_tile + tile, tl.minimum(begin + TILE_ROWS, end), mask=is_tile)
    if own == NUM_EXPERTS - 1:  # the last one empties what is left
        for first in range(0, num_tiles - used_tiles, FILLED):
            tile = used_tiles + first + tl.arange(0, FILLED)
            nothing = tl.zeros_like(tile)
            tl.store(tile_expert + tile, nothing, mask=tile < num_tiles)
            tl.store(tile_start + tile, nothing, mask=tile < num_tiles)
            tl.store(tile_end + tile, nothing, mask=tile < num_tiles)


def cut_tiles(experts: Tensor, num_experts: int, tile_rows: int) -> ExpertTiles:
    """`cut_tiles_reference`; on a GPU in one launch, without waiting for the device."""
    if not uses_triton(experts):
        return cut_tiles_reference(experts, num_experts, tile_rows)
    num_pairs = experts.numel()
    num_tiles = max_tiles(num_pairs, num_experts, tile_rows)
    size = next_power_of_2(num_experts)
    order, *tiles = _empty_int32((num_pairs, *(3 * [num_tiles])), experts.device)
    launch(
        _cut_tiles_kernel,
        (num_experts if num_pairs else 0,),
        experts.contiguous(),
        order,
        *tiles,
        num_pairs,
        num_tiles,
        NUM_EXPERTS=num_experts,
        TILE_ROWS=tile_rows,
        EXPERTS=size,
        COUNTED=max(_COUNTED // size, _MIN_COUNTED_PAIRS),
        SORTED=_SORTED_PAIRS,
        FILLED=_FILLED_TILES,
        num_warps=4,
    )
    return ExpertTiles(order=order, expert=tiles[0], start=tiles[1], end=tiles[2])


def _empty_int32(lengths: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """Allocate tensors in one piece; all begin at a multiple of 16 bytes, as kernels assume."""
    sizes = [-(-length // 4) * 4 for length in lengths]
    words = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    pieces = words.split_with_sizes(sizes)
    return [piece[:length] for piece, length in zip(pieces, lengths, strict=True)]
