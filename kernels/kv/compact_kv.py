"""Move cached keys and values between slots, across all layers at once."""

import torch
from torch import Tensor

from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.triton_support import (
    is_automatic,
    jit,
    launch,
    next_power_of_2,
    tl,
    triton,
    uses_triton,
)

# A program holds its share of all moves: (at most so many, 8-byte words of each one's row, warps),
# no more than 16 words a thread, and no less than a sector of 32 bytes of a row.
_TILES = ((16, 128, 4), (64, 32, 4), (256, 16, 8), (1024, 4, 8))
_MAX_MOVES_AT_ONCE = _TILES[-1][0]
# Beyond, rows go through a buffer, a few planes at a time.
_MAX_BUFFER_BYTES = 64 << 20
_MAX_COPY_WORDS = 1024


def compact_kv_reference(
    cache: Tensor, src_slots: Tensor, dst_slots: Tensor, scales: Tensor | None = None
) -> None:
    """`compact_kv` in torch."""
    if src_slots.numel() == 0:
        return
    for tensor in (cache,) if scales is None else (cache, scales):
        if tensor.dtype == torch.float8_e4m3fn:  # which torch does not index
            tensor = tensor.view(torch.uint8)
        _move(_slots_of(tensor), src_slots, dst_slots)


def _move(slots: Tensor, src_slots: Tensor, dst_slots: Tensor) -> None:
    if src_slots.is_cpu:
        try:
            contents = slots.index_select(1, src_slots)
        except (IndexError, RuntimeError):  # whichever torch raises for this dtype
            # Pairs that move nothing are rare here, so they are not looked for before.
            if not (src_slots == -1).any():
                raise
        else:
            slots.index_copy_(1, dst_slots, contents)
            return
    moves = (src_slots != -1).nonzero().squeeze(1)
    contents = slots.index_select(1, src_slots.index_select(0, moves))
    slots.index_copy_(1, dst_slots.index_select(0, moves), contents)


def _slots_of(tensor: Tensor) -> Tensor:
    """[planes, num_slots, elements of a slot] of [num_layers, 2, num_blocks, block_size, ...]."""
    return tensor.view(tensor.shape[0] * 2, tensor.shape[2] * tensor.shape[3], -1)


@jit
def _move_slots_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0913
    slots,
    src_slots,
    dst_slots,
    num_moves,
    plane_stride,
    ROW_WORDS: tl.constexpr,
    MOVES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Program (i, j): words j * WORDS and so on of all moves, in plane i.

    Programs share no word of the cache, and each has read all its words before it writes one: that
    is why overlaps, chains and cycles do no harm.
    """
    move = tl.arange(0, MOVES)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    src = tl.load(src_slots + move, mask=move < num_moves, other=-1)  # [MOVES]
    dst = tl.load(dst_slots + move, mask=move < num_moves, other=-1)
    is_moved = (src >= 0) & (dst >= 0) & (src != dst)
    mask = is_moved[:, None] & (word < ROW_WORDS)[None, :]
    plane = slots + tl.program_id(0).to(tl.int64) * plane_stride
    contents = tl.load(plane + src[:, None] * ROW_WORDS + word[None, :], mask=mask)
    tl.debug_barrier()  # a thread's destination may be another thread's source
    tl.store(plane + dst[:, None] * ROW_WORDS + word[None, :], contents, mask=mask)


@jit
def _copy_slots_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0913
    slots,
    buffer,
    src_slots,
    dst_slots,
    num_moves,
    plane_stride,
    IS_GATHER: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Program (i, j): move i in plane j, from the cache to the buffer or back."""
    move = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    src = tl.load(src_slots + move)
    dst = tl.load(dst_slots + move)
    if (src >= 0) & (dst >= 0) & (src != dst):
        held = buffer + (plane * num_moves + move) * ROW_WORDS
        base = slots + plane * plane_stride
        for start in range(0, ROW_WORDS, WORDS):
            word = start + tl.arange(0, WORDS)
            mask = word < ROW_WORDS
            if IS_GATHER:
                contents = tl.load(base + src * ROW_WORDS + word, mask=mask)
                tl.store(held + word, contents, mask=mask)
            else:
                contents = tl.load(held + word, mask=mask)
                tl.store(base + dst * ROW_WORDS + word, contents, mask=mask)


def compact_kv(
    cache: Tensor, src_slots: Tensor, dst_slots: Tensor, scales: Tensor | None = None
) -> None:
    """Copy slot `src_slots[i]` to `dst_slots[i]` in every layer, as if all were read first.

    `cache`: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], contiguous; `scales`:
    of an fp8 cache, [num_layers, 2, num_blocks, block_size, num_kv_heads]; slots: [n] int64, block
    * block_size + offset, a source of -1 moves nothing (its destination means nothing). Sources and
    destinations may overlap in any way, destinations are distinct. Tree verification uses it to
    move an accepted path next to its prefix. On a GPU: one launch (scales: one more) up to 1024
    moves. On a CPU compiled, where the library was built.
    """
    if not uses_triton(cache):
        library = product_support().library
        if library is None or not is_automatic() or not cache.is_cpu:
            compact_kv_reference(cache, src_slots, dst_slots, scales)
            return
        for tensor in (cache,) if scales is None else (cache, scales):
            library.move_slots(_slots_of(tensor), src_slots, dst_slots)
        return
    for tensor in (cache,) if scales is None else (cache, scales):
        slots = _as_words(_slots_of(tensor))
        if src_slots.shape[0] <= _MAX_MOVES_AT_ONCE:
            _launch_at_once(slots, src_slots, dst_slots)
        else:
            _launch_through_buffer(slots, src_slots, dst_slots)


def _as_words(slots: Tensor) -> Tensor:
    """View the memory as the widest integers that a slot's bytes divide into."""
    row_bytes = slots.shape[2] * slots.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if row_bytes % dtype.itemsize == 0:
            return slots.view(dtype)
    return slots.view(torch.uint8)


def _launch_at_once(slots: Tensor, src_slots: Tensor, dst_slots: Tensor) -> None:
    num_planes, _, row_words = slots.shape
    num_moves = src_slots.shape[0]
    tile, max_words, num_warps = next(shape for shape in _TILES if num_moves <= shape[0])
    words = min(max_words, next_power_of_2(row_words))
    launch(
        _move_slots_kernel,
        (num_planes if num_moves else 0, triton.cdiv(row_words, words)),
        slots,
        src_slots,
        dst_slots,
        num_moves,
        slots.stride(0),
        num_warps=num_warps,
        ROW_WORDS=row_words,
        MOVES=tile,
        WORDS=words,
    )


def _launch_through_buffer(slots: Tensor, src_slots: Tensor, dst_slots: Tensor) -> None:
    """Two launches for every few planes: all are read before the first is written."""
    num_planes, _, row_words = slots.shape
    num_moves = src_slots.shape[0]
    plane_bytes = num_moves * row_words * slots.element_size()
    planes_at_once = min(max(_MAX_BUFFER_BYTES // plane_bytes, 1), num_planes)
    buffer = torch.empty(
        (planes_at_once, num_moves, row_words), dtype=slots.dtype, device=slots.device
    )
    for first_plane in range(0, num_planes, planes_at_once):
        planes = slots[first_plane : first_plane + planes_at_once]
        for is_gather in (True, False):
            launch(
                _copy_slots_kernel,
                (num_moves, planes.shape[0]),
                planes,
                buffer,
                src_slots,
                dst_slots,
                num_moves,
                planes.stride(0),
                num_warps=4,
                IS_GATHER=is_gather,
                ROW_WORDS=row_words,
                WORDS=min(_MAX_COPY_WORDS, next_power_of_2(row_words)),
            )
