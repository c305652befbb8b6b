"""Triton's grouped products of a mixture of experts: all experts' rows in two launches.

Rows are sorted by expert on the device and cut into tiles of one expert each (cut_tiles.py). There
are as many programs as there can be tiles, and those beyond the last do nothing.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outrider.kernels.experts.cut_tiles import cut_tiles
from outrider.kernels.experts.route import Routed
from outrider.kernels.layers.gated_mul import Activation, sigmoid
from outrider.kernels.triton_support import dot, jit, launch, next_power_of_2, rounded, tl, triton

GateKind = Activation | Literal["clamped_swiglu"]

_COMBINE_CHUNK = 1024
# From so many rows an expert, on average, a tile has 64 of them.
_WIDE_FROM_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStack:
    """All experts' weights."""

    gate_up: Tensor
    """[e, 2 * inner, width]."""
    down: Tensor
    """[e, width, inner]."""
    gate_up_bias: Tensor | None = None
    """[e, 2 * inner], or None."""
    down_bias: Tensor | None = None
    """[e, width], or None."""


@jit
def _gate(gate, up, GATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Activate float32 values, as `GateKind` says."""
    if GATE == "silu":
        result = gate * sigmoid(gate) * up
    elif GATE == "gelu_tanh":
        result = gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    elif GATE == "gelu":
        result = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        ALL: tl.constexpr = tl.PropagateNan.ALL  # without it, not-a-number would become a bound
        gate = tl.minimum(gate, 7.0, ALL)
        up = tl.minimum(tl.maximum(up, -7.0, ALL), 7.0, ALL)
        result = (up + 1.0) * gate * sigmoid(1.702 * gate)
    return result


@jit
def _expert_gate_up_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    x,
    weight,
    bias,
    order,
    tile_expert,
    tile_start,
    tile_end,
    result,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (i, j): columns j of tile i's rows, both projections and the gate between them."""
    tile = tl.program_id(0)
    start, end = tl.load(tile_start + tile), tl.load(tile_end + tile)
    if start < end:
        expert = tl.load(tile_expert + tile).to(tl.int64)
        place = start + tl.arange(0, BLOCK_M)
        is_row = place < end
        row = (tl.load(order + place, mask=is_row, other=0) // NUM_CHOSEN).to(tl.int64)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = column < INNER
        k = tl.arange(0, BLOCK_K)
        x_tile = x + row[:, None] * WIDTH + k[None, :]
        gate_tile = weight + expert * (2 * INNER * WIDTH) + column[None, :] * WIDTH + k[:, None]
        up_tile = gate_tile + INNER * WIDTH
        gates = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        ups = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for first in range(0, WIDTH, BLOCK_K):
            is_k = first + k < WIDTH
            left = tl.load(x_tile, mask=is_row[:, None] & is_k[None, :], other=0.0)
            is_weight = is_column[None, :] & is_k[:, None]
            gates = dot(left, tl.load(gate_tile, mask=is_weight, other=0.0), gates)
            ups = dot(left, tl.load(up_tile, mask=is_weight, other=0.0), ups)
            x_tile += BLOCK_K
            gate_tile += BLOCK_K
            up_tile += BLOCK_K
        if HAS_BIAS:
            biases = bias + expert * (2 * INNER) + column
            gates += tl.load(biases, mask=is_column, other=0.0).to(tl.float32)[None, :]
            ups += tl.load(biases + INNER, mask=is_column, other=0.0).to(tl.float32)[None, :]
        gated = rounded(_gate(gates, ups, GATE), result.dtype.element_ty)
        target = result + place.to(tl.int64)[:, None] * INNER + column[None, :]
        tl.store(target, gated, mask=is_row[:, None] & is_column[None, :])


@jit
def _expert_down_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    x,
    weight,
    bias,
    order,
    tile_expert,
    tile_start,
    tile_end,
    result,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (i, j): columns j of tile i's rows, stored where their pairs stand."""
    tile = tl.program_id(0)
    start, end = tl.load(tile_start + tile), tl.load(tile_end + tile)
    if start < end:
        expert = tl.load(tile_expert + tile).to(tl.int64)
        place = start + tl.arange(0, BLOCK_M)
        is_row = place < end
        pair = tl.load(order + place, mask=is_row, other=0).to(tl.int64)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = column < WIDTH
        k = tl.arange(0, BLOCK_K)
        x_tile = x + place.to(tl.int64)[:, None] * INNER + k[None, :]
        weight_tile = weight + expert * (WIDTH * INNER) + column[None, :] * INNER + k[:, None]
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for first in range(0, INNER, BLOCK_K):
            is_k = first + k < INNER
            left = tl.load(x_tile, mask=is_row[:, None] & is_k[None, :], other=0.0)
            right = tl.load(weight_tile, mask=is_column[None, :] & is_k[:, None], other=0.0)
            sums = dot(left, right, sums)
            x_tile += BLOCK_K
            weight_tile += BLOCK_K
        if HAS_BIAS:
            biases = tl.load(bias + expert * WIDTH + column, mask=is_column, other=0.0)
            sums += biases.to(tl.float32)[None, :]
        target = result + pair[:, None] * WIDTH + column[None, :]
        tl.store(
            target,
            rounded(sums, result.dtype.element_ty),
            mask=is_row[:, None] & is_column[None, :],
        )


@jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    results,
    weights,
    total,
    WIDTH: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (i, j): columns j * CHUNK and so on of row i, summed from the best expert on."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_inside = columns < WIDTH
    sums = tl.zeros((CHUNK,), dtype=tl.float32)
    for rank in range(NUM_CHOSEN):
        pair = row * NUM_CHOSEN + rank
        values = tl.load(results + pair * WIDTH + columns, mask=is_inside, other=0.0)
        sums += values.to(tl.float32) * tl.load(weights + pair)
    tl.store(total + row * WIDTH + columns, rounded(sums, total.dtype.element_ty), mask=is_inside)


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Return the rows of a tile: 64 where experts have many, else the least that there can be."""
    return 64 if num_pairs >= _WIDE_FROM_ROWS * num_experts else 16


def grouped_mlp(
    rows: Tensor,
    routed: Routed,
    stack: ExpertStack,
    *,
    gate: GateKind = "silu",
    deterministic: bool = False,
) -> Tensor:
    """Each row's experts' feed-forward results, weighted and summed. [n, width] -> [n, width].

    `rows`: of the weights' dtype. Sums are float32. `deterministic`: tiles have one shape for every
    number of rows. Reads the weights of used experts once a tile of rows.
    """
    num_rows, num_chosen = routed.experts.shape
    num_experts, width, inner = stack.down.shape
    num_pairs = num_rows * num_chosen
    total = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if not num_rows:
        return total
    block_m = 16 if deterministic else tile_rows(num_pairs, num_experts)
    is_half = rows.dtype != torch.float32
    shape = {
        "BLOCK_M": block_m,
        "BLOCK_N": 64 if is_half else 32,
        "BLOCK_K": 64 if is_half else 32,
        "num_warps": 4,
        "num_stages": 3,
    }
    tiles = cut_tiles(routed.experts, num_experts, block_m)
    cut = (tiles.order, tiles.expert, tiles.start, tiles.end)
    gated = torch.empty((num_pairs, inner), dtype=rows.dtype, device=rows.device)
    launch(
        _expert_gate_up_kernel,
        (len(tiles.expert), triton.cdiv(inner, shape["BLOCK_N"])),
        rows.contiguous(),
        stack.gate_up,
        stack.gate_up_bias,
        *cut,
        gated,
        WIDTH=width,
        INNER=inner,
        NUM_CHOSEN=num_chosen,
        HAS_BIAS=stack.gate_up_bias is not None,
        GATE=gate,
        **shape,
    )
    results = torch.empty((num_pairs, width), dtype=rows.dtype, device=rows.device)
    launch(
        _expert_down_kernel,
        (len(tiles.expert), triton.cdiv(width, shape["BLOCK_N"])),
        gated,
        stack.down,
        stack.down_bias,
        *cut,
        results,
        WIDTH=width,
        INNER=inner,
        HAS_BIAS=stack.down_bias is not None,
        **shape,
    )
    return combine(results, routed.weights, total)


def combine(results: Tensor, weights: Tensor, total: Tensor) -> Tensor:
    """Sum each row's results, in the order of its experts, times their weights, into `total`.

    `results`: [n * k, width]; `weights`: float32 [n, k]; `total`: [n, width], returned.
    """
    (num_rows, num_chosen), width = weights.shape, total.shape[1]
    chunk = min(_COMBINE_CHUNK, next_power_of_2(width))
    launch(
        _combine_kernel,
        (num_rows, triton.cdiv(width, chunk)),
        results,
        weights.contiguous(),
        total,
        WIDTH=width,
        NUM_CHOSEN=num_chosen,
        CHUNK=chunk,
        num_warps=4,
    )
    return total
