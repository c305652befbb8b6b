"""Experts with weights of 8 or 4 bits on a GPU: all experts' rows in two grouped products.

As `grouped_mlp`, with the products of `outrider.kernels.layers.integer_linear` and their bits: rows
are rounded to 8 bits in front of each, and the gate lies between. Nothing waits for the device.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.kernels.experts.cut_tiles import ExpertTiles, cut_tiles
from outrider.kernels.experts.grouped_mlp import combine, tile_rows
from outrider.kernels.experts.route import Routed
from outrider.kernels.layers.integer_linear import (
    IntegerLinear,
    block_depth,
    int4_sums,
    int8_sums,
    rounded_rows,
)
from outrider.kernels.quantised.weight import QuantisedWeight
from outrider.kernels.triton_support import jit, launch, rounded, tl

_BLOCK_N = 32


@jit
def _expert_product_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    x,
    row_scales,
    codes,
    scales,
    bias,
    order,
    tile_expert,
    tile_start,
    tile_end,
    output,
    OUT: tl.constexpr,
    STORED: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    IS_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (i, j): columns j of tile i's rows.

    The first product reads the rows themselves and writes in the order of the tiles; the second
    reads in that order and writes where the pairs stand.
    """
    tile = tl.program_id(0)
    start, end = tl.load(tile_start + tile), tl.load(tile_end + tile)
    if start < end:
        expert = tl.load(tile_expert + tile).to(tl.int64)
        place = start + tl.arange(0, BLOCK_M)
        is_row = place < end
        pair = tl.load(order + place, mask=is_row, other=0).to(tl.int64)
        if IS_FIRST:
            source, target = pair // NUM_CHOSEN, place.to(tl.int64)
        else:
            source, target = place.to(tl.int64), pair
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = column < OUT
        x_tile = x + source[:, None] * STORED
        outputs = expert * OUT + column
        if BITS == 4:
            weight_tile = codes + outputs[None, :] * (STORED // 2)
            scale = scales + expert * (STORED // GROUP * OUT) + column
            sums = int4_sums(
                x_tile, weight_tile, scale, is_row, is_column, OUT, STORED // (2 * GROUP), GROUP,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip
        else:
            weight_tile, scale = codes + outputs[None, :] * STORED, scales + outputs
            sums = int8_sums(
                x_tile, weight_tile, scale, is_row, is_column, STORED, BLOCK_M, BLOCK_N, BLOCK_K
            )
        sums *= tl.load(row_scales + source, mask=is_row, other=0.0)[:, None]
        if HAS_BIAS:
            biases = tl.load(bias + outputs, mask=is_column, other=0.0)
            sums += biases.to(tl.float32)[None, :]
        places = output + target[:, None] * OUT + column[None, :]
        tl.store(
            places,
            rounded(sums, output.dtype.element_ty),
            mask=is_row[:, None] & is_column[None, :],
        )


class ExpertProduct:
    """One product of all experts: a pair's row with the weight of its expert."""

    __slots__ = ("_bias", "_bits", "_codes", "_group_size", "_scales", "_stored")

    def __init__(self, weights: Sequence[QuantisedWeight], biases: Sequence[Tensor] | None) -> None:
        """`weights`: of one shape, each one that `can_use_integer_tiles`; `biases`: [out] each."""
        packed = [IntegerLinear(weight) for weight in weights]
        self._codes = torch.stack([one.codes for one in packed])  # [experts, out, n]
        self._scales = torch.stack([one.scales for one in packed])
        self._bias = None if biases is None else torch.stack(list(biases))
        first = packed[0]
        self._bits, self._group_size, self._stored = first.bits, first.group_size, first.stored

    @property
    def num_experts(self) -> int:
        """Count the experts."""
        return len(self._codes)

    def __call__(
        self, rows: Tensor, tiles: ExpertTiles, *, num_chosen: int, tile_rows: int, is_first: bool
    ) -> Tensor:
        """`rows`: bfloat16, [n, width] or, in the tiles' order, [pairs, width] -> [pairs, out]."""
        codes, row_scales = rounded_rows(rows, self._stored)
        out = self._codes.shape[1]
        output = torch.empty((len(tiles.order), out), dtype=torch.bfloat16, device=rows.device)
        launch(
            _expert_product_kernel,
            (len(tiles.expert), -(-out // _BLOCK_N)),
            codes,
            row_scales,
            self._codes,
            self._scales,
            self._bias,
            tiles.order,
            tiles.expert,
            tiles.start,
            tiles.end,
            output,
            OUT=out,
            STORED=self._stored,
            GROUP=self._group_size,
            BITS=self._bits,
            NUM_CHOSEN=num_chosen,
            IS_FIRST=is_first,
            HAS_BIAS=self._bias is not None,
            BLOCK_M=tile_rows,
            BLOCK_N=_BLOCK_N,
            BLOCK_K=block_depth(self._stored) if self._bits == 8 else self._group_size,
            enable_fp_fusion=False,  # a product and a sum round twice, as in the reference
            num_stages=3,
            num_warps=4,
        )
        return output


def integer_mlp(
    rows: Tensor,
    routed: Routed,
    gate_up: ExpertProduct,
    down: ExpertProduct,
    gate: Callable[[Tensor], Tensor],
) -> Tensor:
    """Each row's experts' feed-forward results, weighted and summed. bfloat16 [n, width] -> same.

    `gate`: [pairs, 2 * inner] -> [pairs, inner]. A row's bits do not depend on the other rows.
    """
    total = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if not len(rows):
        return total
    num_chosen = routed.experts.shape[1]
    size = tile_rows(routed.experts.numel(), gate_up.num_experts)
    tiles = cut_tiles(routed.experts, gate_up.num_experts, size)
    inner = gate_up(rows, tiles, num_chosen=num_chosen, tile_rows=size, is_first=True)
    results = down(gate(inner), tiles, num_chosen=num_chosen, tile_rows=size, is_first=False)
    return combine(results, routed.weights, total)
