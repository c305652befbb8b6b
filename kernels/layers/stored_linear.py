"""Products with weights as checkpoints store them, on a GPU: 8 or 4 bits or float8, bfloat16 rows.

Weights are read as they are packed, decoded in registers as `StoredWeight.decoded` has it, rounded
to bfloat16 and multiplied in the tiles of `row_invariant_linear`: the bits are those of that
product with the decoded weight, for any number of rows.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.kernels.layers.linear_tiles import GROUP_TILES, tile_shape
from outrider.kernels.quantised.stored_weight import StoredWeight
from outrider.kernels.triton_support import dot, jit, launch, rounded, tl, uses_triton

# The bias of float32's exponent less that of float8's: where its bits are taken over.
_FLOAT8_FACTOR: Final = tl.constexpr(2.0**120)


def stored_linear_reference(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """`x @ weight.decoded().T + bias` with float32 sums, row after row. bfloat16 [n, out]."""
    wide = weight.decoded().float()
    rows = [row @ wide.T + (0.0 if bias is None else bias.float()) for row in x.float()]
    return torch.stack(rows).bfloat16() if rows else x.new_empty((0, len(wide)))


@jit
def _decoded(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - what there is of a weight
    codes,
    scales,
    zeros,
    minimums,
    places,
    is_column,
    ZERO: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
):
    """Codes [k, columns] to bfloat16. places: of their groups' scales; is_column: [1, columns]."""
    scale = tl.load(scales + places, mask=is_column, other=0.0).to(tl.float32)
    if IS_FLOAT8:
        wide = codes.to(tl.int32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        values = bits.to(tl.float32, bitcast=True) * _FLOAT8_FACTOR
    else:
        zero = ZERO
        if HAS_ZEROS:
            zero = tl.load(zeros + places, mask=is_column, other=0).to(tl.int32)
        values = (codes.to(tl.int32) - zero).to(tl.float32)
    values = values * scale
    if HAS_MINIMUMS:
        values = values - tl.load(minimums + places, mask=is_column, other=0.0).to(tl.float32)
    return rounded(values, tl.bfloat16)


@jit
def _stored_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel's arguments
    x,
    codes,
    scales,
    zeros,
    minimums,
    bias,
    output,
    num_rows,
    out_features,
    WIDTH: tl.constexpr,
    STORED: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Program i: one tile of the output, in the order of `row_invariant_linear`'s.

    Of 4 bits a byte holds a code of one block of BLOCK_K columns and, above it, one of the next.
    """
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    group = program // (GROUP_M * column_tiles)
    group_tiles = tl.minimum(row_tiles - group * GROUP_M, GROUP_M)
    place = program % (GROUP_M * column_tiles)
    row_tile, column_tile = group * GROUP_M + place % group_tiles, place // group_tiles

    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = (rows < num_rows)[:, None], (columns < out_features)[None, :]
    k = tl.arange(0, BLOCK_K)
    x_tile = x + rows.to(tl.int64)[:, None] * WIDTH
    code_tile = codes + columns.to(tl.int64)[None, :] * STORED + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        at = start + k
        left = tl.load(x_tile + at[None, :], mask=is_row & (at < WIDTH)[None, :], other=0.0)
        if BITS == 4:
            block = start // BLOCK_K
            packed = tl.load(code_tile + block // 2 * BLOCK_K, mask=is_column, other=0)
            found = (packed >> (block % 2 * 4)) & 15
        else:
            found = tl.load(code_tile + start, mask=is_column, other=0)
        # Columns beyond the last have a scale too, and rows of zeros to be multiplied with.
        groups = tl.minimum(at, WIDTH - 1) // GROUP
        places = groups[:, None] * out_features + columns[None, :]
        right = _decoded(
            found,
            scales,
            zeros,
            minimums,
            places,
            is_column,
            ZERO,
            IS_FLOAT8,
            HAS_ZEROS,
            HAS_MINIMUMS,
        )
        sums = dot(left, right, sums)
    if HAS_BIAS:
        added = tl.load(bias + columns, mask=columns < out_features, other=0.0)
        sums += added.to(tl.float32)[None, :]
    places = output + rows.to(tl.int64)[:, None] * out_features + columns[None, :]
    tl.store(places, rounded(sums, output.dtype.element_ty), mask=is_row & is_column)


class StoredLinear:
    """`x @ weight.decoded().T + bias` with the weight held as it is stored, packed."""

    __slots__ = (
        "_bias",
        "_codes",
        "_constants",
        "_minimums",
        "_scales",
        "_shape",
        "_zeros",
    )

    def __init__(self, weight: StoredWeight, bias: Tensor | None = None) -> None:
        """`weight`: a tame one (`StoredWeight.is_tame`); `bias`: [out_features] or None."""
        self._bias = bias
        self._shape = weight.shape
        is_float8 = weight.number == "float8"
        zero, zeros = weight.common_zero, weight.own_zeros
        dtype = weight.scale_dtype
        self._scales = weight.scales.t().contiguous().to(dtype)  # [groups, out_features]
        self._zeros = None if zeros is None else zeros.t().contiguous()
        minimums = weight.minimums
        self._minimums = None if minimums is None else minimums.t().contiguous().to(dtype)
        out_features, in_features = weight.shape
        depth = tile_shape(out_features, in_features, torch.bfloat16)["BLOCK_K"]
        bits = 4 if weight.number == "int4" else 8
        step = 2 * depth if bits == 4 else depth
        codes = pad(weight.codes, (0, -in_features % step))
        self._codes = _pairs_of_blocks(codes, depth) if bits == 4 else codes.contiguous()
        self._constants = {
            "WIDTH": in_features,
            "STORED": self._codes.shape[1],
            "GROUP": weight.group_size,
            "ZERO": zero,
            "BITS": bits,
            "IS_FLOAT8": is_float8,
            "HAS_ZEROS": zeros is not None,
            "HAS_MINIMUMS": minimums is not None,
            "HAS_BIAS": bias is not None,
            "GROUP_M": GROUP_TILES,
        }

    @property
    def is_packed(self) -> bool:
        """True: the weight lies as its kernel reads it."""
        return True

    def __call__(self, x: Tensor) -> Tensor:
        """`x`: bfloat16 [n, in_features] -> [n, out_features]."""
        num_rows, (out_features, in_features) = len(x), self._shape
        output = torch.empty((num_rows, out_features), dtype=torch.bfloat16, device=x.device)
        tile = tile_shape(out_features, in_features, torch.bfloat16)
        row_tiles, column_tiles = (
            -(-num_rows // tile["BLOCK_M"]),
            -(-out_features // tile["BLOCK_N"]),
        )
        launch(
            _stored_kernel,
            (row_tiles * column_tiles,),
            x.contiguous(),
            self._codes,
            self._scales,
            self._zeros,
            self._minimums,
            self._bias,
            output,
            num_rows,
            out_features,
            enable_fp_fusion=False,  # a product and a difference round twice, as when decoded
            **self._constants,
            **tile,
        )
        return output


def can_use_stored_tiles(weight: StoredWeight, device: torch.device) -> bool:
    """True if the Triton kernel multiplies with such a weight on a device."""
    return uses_triton(device) and weight.is_tame


def _pairs_of_blocks(codes: Tensor, depth: int) -> Tensor:
    """Put each second block of so many columns above the one before it: uint8 [out, width / 2]."""
    pairs = codes.view(len(codes), -1, 2, depth)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(codes), -1)
