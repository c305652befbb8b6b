"""Products of 8-bit rows with weights of 8 or 4 bits on a GPU: two launches, weights as packed.

The first rounds rows, the second multiplies integers and scales the sums. Sums of integers are
exact, and those of groups are added in their order, so tiles may follow the number of rows: the
bits are those of `int8_linear_reference` and `int4_linear_reference` for any.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.kernels.quantised.weight import QuantisedWeight, packed_nibbles
from outrider.kernels.triton_support import jit, launch, next_power_of_2, rounded, tl, uses_triton

# Tensor cores take 8-bit operands in depths of 32, so this divides rows as they are stored.
_DEPTH: Final = 32
_DEPTHS: Final = (128, 64, 32)
# Adding and subtracting it rounds a float32 of at most 2^22 to a whole number, ties to even.
_ROUNDER: Final = tl.constexpr(1.5 * 2.0**23)
# Groups that the kernel for 4 bits is written for: a group is one step along k.
_GROUP_SIZES: Final = (32, 64, 128)
_ELEMENTS_PER_WARP: Final = 16 * 32
_MAX_WARPS: Final = 16


@jit
def _round_rows_kernel(  # type: ignore[no-untyped-def]
    x, codes, scales, x_stride, WIDTH: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr
):
    """Program i: row i as `int8_rows` has it, with zeros up to STORED columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    is_number = values == values
    largest = tl.max(tl.where(is_number, tl.abs(values), float("inf")), axis=0)
    is_finite = largest < float("inf")
    scale = tl.div_rn(largest, tl.full((), 127.0, tl.float32))
    # A row of zeros, or one that holds a NaN or an infinity, has zeros for codes.
    divisor = tl.where(is_finite & (scale > 0.0), scale, 1.0)
    values = tl.where(is_finite, values, 0.0)
    whole = tl.div_rn(values, tl.zeros_like(values) + divisor) + _ROUNDER - _ROUNDER
    tl.store(codes + row * STORED + columns, whole.to(tl.int8), mask=columns < STORED)
    tl.store(scales + row, tl.where(is_finite, scale, float("nan")))


@jit
def _finish(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - what both kernels end with
    sums, row_scales, bias, output, rows, columns, num_rows, out_features, HAS_BIAS: tl.constexpr
):
    """Store `sums * row_scales + bias`; sums: float32, each row of them still without its scale."""
    is_row, is_column = rows < num_rows, columns < out_features
    sums *= tl.load(row_scales + rows, mask=is_row, other=0.0)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    places = output + rows.to(tl.int64)[:, None] * out_features + columns[None, :]
    is_inside = is_row[:, None] & is_column[None, :]
    tl.store(places, rounded(sums, output.dtype.element_ty), mask=is_inside)


@jit
def int8_sums(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - two tiles
    x_tile, weight_tile, scale, is_row, is_column, STORED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums along STORED columns times the weight's scales: float32 [BLOCK_M, BLOCK_N].

    `x_tile`, `weight_tile`: addresses of rows [BLOCK_M, 1] and outputs [1, BLOCK_N], each STORED
    codes; `scale`: of outputs [BLOCK_N]; `is_row`, `is_column`: [BLOCK_M], [BLOCK_N].
    """
    k = tl.arange(0, BLOCK_K)
    x_tile, weight_tile = x_tile + k[None, :], weight_tile + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for _ in range(0, STORED, BLOCK_K):
        left = tl.load(x_tile, mask=is_row[:, None], other=0)
        right = tl.load(weight_tile, mask=is_column[None, :], other=0)
        sums = tl.dot(left, right, sums, out_dtype=tl.int32)
        x_tile += BLOCK_K
        weight_tile += BLOCK_K
    return sums.to(tl.float32) * tl.load(scale, mask=is_column, other=0.0)[None, :]


@jit
def int4_sums(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - two tiles
    x_tile, weight_tile, scale, is_row, is_column, out_features, PAIRS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum as `int8_sums`; a byte holds a code of one group and, above it, one of the next.

    `scale`: of outputs in the first group; those of the next are `out_features` further on.
    """
    k = tl.arange(0, GROUP)
    x_tile, weight_tile = x_tile + k[None, :], weight_tile + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    none = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for _ in range(0, PAIRS):
        packed = tl.load(weight_tile, mask=is_column[None, :], other=0)
        low, high = (packed & 15).to(tl.int8) - 8, (packed >> 4).to(tl.int8) - 8
        left = tl.load(x_tile, mask=is_row[:, None], other=0)
        part = tl.dot(left, low, none, out_dtype=tl.int32).to(tl.float32)
        sums += part * tl.load(scale, mask=is_column, other=0.0)[None, :]
        left = tl.load(x_tile + GROUP, mask=is_row[:, None], other=0)
        part = tl.dot(left, high, none, out_dtype=tl.int32).to(tl.float32)
        scale += out_features
        sums += part * tl.load(scale, mask=is_column, other=0.0)[None, :]
        scale += out_features
        x_tile += 2 * GROUP
        weight_tile += GROUP
    return sums


@jit
def _int8_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel's arguments
    x,
    row_scales,
    weight,
    scales,
    bias,
    output,
    num_rows,
    out_features,
    STORED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program i: one tile of the output; neighbours read the same weights."""
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    rows = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    x_tile = x + rows.to(tl.int64)[:, None] * STORED
    weight_tile = weight + columns.to(tl.int64)[None, :] * STORED
    is_row, is_column = rows < num_rows, columns < out_features
    sums = int8_sums(
        x_tile, weight_tile, scales + columns, is_row, is_column, STORED, BLOCK_M, BLOCK_N, BLOCK_K
    )
    _finish(sums, row_scales, bias, output, rows, columns, num_rows, out_features, HAS_BIAS)


@jit
def _int4_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel's arguments
    x,
    row_scales,
    weight,
    scales,
    bias,
    output,
    num_rows,
    out_features,
    PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Do as `_int8_kernel`, with `int4_sums`."""
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    rows = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    x_tile = x + rows.to(tl.int64)[:, None] * (2 * PAIRS * GROUP)
    weight_tile = weight + columns.to(tl.int64)[None, :] * (PAIRS * GROUP)
    scale = scales + columns  # [2 * PAIRS, out_features]: neighbours are read together
    is_row, is_column = rows < num_rows, columns < out_features
    sums = int4_sums(
        x_tile, weight_tile, scale, is_row, is_column, out_features, PAIRS, GROUP, BLOCK_M, BLOCK_N
    )
    _finish(sums, row_scales, bias, output, rows, columns, num_rows, out_features, HAS_BIAS)


def can_use_integer_tiles(weight: QuantisedWeight) -> bool:
    """True if a Triton kernel multiplies with such a weight where it lies."""
    if not uses_triton(weight.codes) or weight.zeros is not None:
        return False
    if weight.bits == 4:
        return weight.group_size in _GROUP_SIZES
    return weight.group_size == weight.shape[1]


class IntegerLinear:
    """`x @ weight.T + bias` with x in 8 bits and weight in 8 or 4, packed once and held so."""

    __slots__ = ("_bias", "_multiply", "bits", "codes", "group_size", "scales", "stored")

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None = None) -> None:
        """`weight`: one for which `can_use_integer_tiles` is true; `bias`: [out_features] or None.

        codes: as they are packed, [out_features, n]; scales: [out_features], of 4 bits
        [groups, out_features]; stored: the columns of rows as they are rounded.
        """
        self._bias = bias
        self.bits = weight.bits
        self.group_size = weight.group_size
        self._multiply: Callable[[Tensor, Tensor, Tensor], None]
        step = 2 * weight.group_size if weight.bits == 4 else _DEPTH
        spare = -weight.shape[1] % step
        self.stored = weight.shape[1] + spare
        codes = pad(weight.codes, (0, spare)) if spare else weight.codes
        if weight.bits == 4:
            self.codes = _packed_groups(codes, weight.group_size)
            spare_groups = spare // weight.group_size
            self.scales = pad(weight.scales, (0, spare_groups)).t().contiguous().float()
            self._multiply = self._multiply_int4
        else:
            self.codes = codes.contiguous()
            self.scales = weight.scales.flatten().float()
            self._multiply = self._multiply_int8

    @property
    def is_packed(self) -> bool:
        """True: the weight lies as its kernel reads it."""
        return True

    def __call__(self, x: Tensor) -> Tensor:
        """`x`: bfloat16 [n, in_features] -> [n, out_features]."""
        output = torch.empty((len(x), len(self.codes)), dtype=torch.bfloat16, device=x.device)
        self._multiply(*rounded_rows(x, self.stored), output)
        return output

    def _multiply_int8(self, rows: Tensor, row_scales: Tensor, output: Tensor) -> None:
        tile = _tile_shape(len(rows))
        launch(
            _int8_kernel,
            _grid(output, tile),
            rows,
            row_scales,
            self.codes,
            self.scales,
            self._bias,
            output,
            *output.shape,
            STORED=self.stored,
            HAS_BIAS=self._bias is not None,
            BLOCK_K=block_depth(self.stored),
            enable_fp_fusion=False,
            num_stages=4,
            **tile,
        )

    def _multiply_int4(self, rows: Tensor, row_scales: Tensor, output: Tensor) -> None:
        tile = _tile_shape(len(rows))
        launch(
            _int4_kernel,
            _grid(output, tile),
            rows,
            row_scales,
            self.codes,
            self.scales,
            self._bias,
            output,
            *output.shape,
            PAIRS=self.stored // (2 * self.group_size),
            GROUP=self.group_size,
            HAS_BIAS=self._bias is not None,
            enable_fp_fusion=False,  # a product and a sum round twice, as in the reference
            num_stages=3,
            **tile,
        )


def block_depth(stored: int) -> int:
    """Return how many columns of 8 bits a step takes."""
    return next(depth for depth in _DEPTHS if stored % depth == 0)


def rounded_rows(x: Tensor, stored: int) -> tuple[Tensor, Tensor]:
    """Return codes, int8 [n, stored], and scales, float32 [n], of rows [n, width]."""
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, width = x.shape
    codes = torch.empty((num_rows, stored), dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = next_power_of_2(stored)
    launch(
        _round_rows_kernel,
        (num_rows,),
        x,
        codes,
        scales,
        x.stride(0),
        WIDTH=width,
        STORED=stored,
        BLOCK=block,
        enable_fp_fusion=False,
        num_warps=min(max(block // _ELEMENTS_PER_WARP, 1), _MAX_WARPS),
    )
    return codes, scales


def _packed_groups(codes: Tensor, group_size: int) -> Tensor:
    """Put each second group of columns above the one before it: uint8 [out_features, width / 2].

    Both halves of a tile of bytes are then tiles of neighbouring columns.
    """
    pairs = codes.view(len(codes), -1, 2, group_size).transpose(2, 3)
    return packed_nibbles(pairs.reshape(len(codes), -1))


def _tile_shape(num_rows: int) -> dict[str, int]:
    """Blocks and warps: few rows want many programs, so that all read weights at once."""
    if num_rows <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4}
    if num_rows <= 64:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4}


def _grid(output: Tensor, tile: dict[str, int]) -> tuple[int]:
    num_rows, out_features = output.shape
    return (-(-num_rows // tile["BLOCK_M"]) * -(-out_features // tile["BLOCK_N"]),)
