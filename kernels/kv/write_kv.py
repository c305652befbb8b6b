"""Store this step's keys and values in the paged cache, in fp8 with scales if the cache is fp8."""

import torch
from torch import Tensor

from outrider.kernels.triton_support import jit, launch, next_power_of_2, tl, triton, uses_triton

# float8_e4m3fn's largest value. A product, because torch divides by constants in two ways.
FP8_MAX = 448.0
_FP8_STEP = 1 / FP8_MAX
# Heads whose values are all below this are stored as zeros: their scale would not be normal.
_FP8_TINY = 2.0**-100
_HEADS_PER_PROGRAM = 8


def quantise_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Heads as fp8 and a scale each, so that fp8 * scale is about the head.

    `rows`: [..., d] of a floating type; returns float8_e4m3fn [..., d], rounded to nearest, ties to
    even, and float32 [...]: the head's largest magnitude / 448, or 1 where that is (almost) 0.
    """
    values = rows.float()
    largest = values.abs().amax(-1)  # [...]
    scale = torch.where(largest > _FP8_TINY, largest * _FP8_STEP, 1.0)
    return (values / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


def write_kv_reference(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`write_kv` in torch. On the CPU a slot outside the cache is an IndexError."""
    if k_scale is not None and v_scale is not None:
        key, key_scale = quantise_fp8(key)
        value, value_scale = quantise_fp8(value)
        _store(key_scale, value_scale, k_scale, v_scale, slot_mapping)
        # index_copy_ does not know fp8.
        key, value, k_cache, v_cache = (
            tensor.view(torch.uint8) for tensor in (key, value, k_cache, v_cache)
        )
    _store(key, value, k_cache, v_cache, slot_mapping)


def _store(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    if slot_mapping.is_cpu:
        try:
            k_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
            v_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)
        except IndexError:  # rows without a slot are rare here, so they are not looked for before
            if not (slot_mapping == -1).any():
                raise
        else:
            return
    rows = (slot_mapping != -1).nonzero().squeeze(1)
    slots = slot_mapping.index_select(0, rows)
    k_cache.flatten(0, 1).index_copy_(0, slots, key.index_select(0, rows))
    v_cache.flatten(0, 1).index_copy_(0, slots, value.index_select(0, rows))


@jit
def fp8_scale(largest):  # type: ignore[no-untyped-def]
    """The scale of heads whose largest magnitudes these are; float32."""
    TINY: tl.constexpr = 2.0**-100
    STEP: tl.constexpr = 1 / 448
    return tl.where(largest > TINY, largest * STEP, 1.0)


@jit
def fp8_bits(values, scale):  # type: ignore[no-untyped-def]
    """float8_e4m3fn of values / scale as uint8; float32, of a magnitude of 448 at most.

    By hand, because the type does not exist on sm_80. To nearest, ties to even, as torch's cast.
    """
    scaled = tl.div_rn(values, scale)
    bits = scaled.to(tl.int32, bitcast=True)
    # All above 448, and so not-a-number, becomes 480, which is fp8's 0x7F. A device's own NaN is
    # 0x7FFFFFFF, to which nothing can be added.
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43F00000)
    # 3 of 23 bits of the mantissa stay; the exponent's bias is 7 instead of 127.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the step is 2**-9, and so it is for float32 at 2**14: the sum's last bits count.
    shifted = (tl.abs(scaled) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    rounded = tl.where(magnitude < 0x3C800000, shifted, normal)  # 2**-6
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)


@jit
def _write_kv_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0913
    key,
    value,
    k_cache,
    v_cache,
    slot_mapping,
    k_scale,
    v_scale,
    key_stride,
    value_stride,
    slot_stride,
    num_slots,
    IS_FP8: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Program (i, j): heads j * HEADS and so on of row i."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    if (slot >= 0) & (slot < num_slots):
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        columns = tl.arange(0, DIM_BLOCK)
        is_inside = (head < NUM_HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
        at = head[:, None] * HEAD_DIM + columns[None, :]  # [HEADS, DIM_BLOCK]
        keys = tl.load(key + row * key_stride + at, mask=is_inside, other=0.0)
        values = tl.load(value + row * value_stride + at, mask=is_inside, other=0.0)
        k_target = k_cache + slot * slot_stride + at
        v_target = v_cache + slot * slot_stride + at
        if IS_FP8:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
            key_scale = fp8_scale(tl.max(tl.abs(keys), axis=1))  # [HEADS]
            value_scale = fp8_scale(tl.max(tl.abs(values), axis=1))
            scale_at = slot * NUM_HEADS + head
            tl.store(k_scale + scale_at, key_scale, mask=head < NUM_HEADS)
            tl.store(v_scale + scale_at, value_scale, mask=head < NUM_HEADS)
            tl.store(k_target, fp8_bits(keys, key_scale[:, None]), mask=is_inside)
            tl.store(v_target, fp8_bits(values, value_scale[:, None]), mask=is_inside)
        else:
            tl.store(k_target, keys, mask=is_inside)
            tl.store(v_target, values, mask=is_inside)


def write_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Row i goes to slot `slot_mapping[i]` = block * block_size + offset; -1 writes nothing.

    `key`, `value`: [n, num_kv_heads, head_dim], a row's heads contiguous; `k_cache`, `v_cache`:
    [num_blocks, block_size, num_kv_heads, head_dim], contiguous; `slot_mapping`: [n] int64, without
    repeats but for -1. `k_scale`, `v_scale`: for a float8_e4m3fn cache, float32 [num_blocks,
    block_size, num_kv_heads], written by `quantise_fp8`'s rule. A slot outside the cache is an
    IndexError on the CPU and writes nothing on a GPU.
    """
    if not uses_triton(key):
        write_kv_reference(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        return
    num_rows, num_heads, head_dim = key.shape
    heads = min(_HEADS_PER_PROGRAM, next_power_of_2(num_heads))
    is_fp8 = k_scale is not None
    launch(
        _write_kv_kernel,
        (num_rows, triton.cdiv(num_heads, heads)),
        key,
        value,
        k_cache.view(torch.uint8) if is_fp8 else k_cache,
        v_cache.view(torch.uint8) if is_fp8 else v_cache,
        slot_mapping,
        k_scale,
        v_scale,
        key.stride(0),
        value.stride(0),
        k_cache.stride(1),
        k_cache.shape[0] * k_cache.shape[1],
        num_warps=4,
        IS_FP8=is_fp8,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS=heads,
        DIM_BLOCK=next_power_of_2(head_dim),
    )
