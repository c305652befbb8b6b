"""Products of up to 16 rows on a GPU, with what stands before and behind them in the same launch.

A pass of few rows is over when its weights are read, and each launch costs what a megabyte or
several do. So the gate or the addition to the residual stream behind a product belong to its
kernel, and so do the norms, in two parts. A product that adds to the residual stream also stores
the new rows times the next norm's weight, and their squares' sums. The product behind the norm
applies the norm's factor to its sums: with the factor f of a row, (f * x * norm) @ w.T is
f * ((x * norm) @ w.T). (To multiply by the norm's weight in front of each product of tiles costs
as much again as reading the weights: measured on an H200.)

The columns of a weight alone would occupy a part of the device, so its sums over k are split among
programs ("split-K": Osama et al., "Stream-K", 2023, compares the ways); the last of them to arrive
adds up all splits in their order, so the bits do not depend on which one that is.

A row has the same bits in any pass of up to 16 rows, not in larger ones, which run other kernels:
deterministic mode does not use this module.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from outrider.kernels.layers.gated_mul import Activation, activated, gated_mul_reference
from outrider.kernels.layers.linear import Linear
from outrider.kernels.layers.rms_norm import RmsNorm
from outrider.kernels.triton_support import (
    dot,
    jit,
    launch,
    next_power_of_2,
    num_multiprocessors,
    rounded,
    tl,
    uses_triton,
)

FEW_ROWS: Final = 16
"""Rows of the tile, the least that tensor cores take."""

DTYPES: Final = (torch.bfloat16, torch.float32)
# Not float16: the factor of the norm comes after the sums, and x * norm could be too large for it.

# Programs of a multiprocessor at most, of which as many fit beside one another.
_MOST_PROGRAMS: Final = 3
# Blocks of k of a program at least: fewer would wait for memory more than they read.
_MIN_BLOCKS: Final = 2


def split_k_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The product, the gate and the addition as torch has them, one after the other."""
    product = torch.nn.functional.linear(x, weight, bias)
    if activation is not None:
        return gated_mul_reference(product, activation)
    return product if residual is None else residual.add_(product)


@jit
def _finish(  # type: ignore[no-untyped-def] # noqa: PLR0913
    sums,
    up_sums,
    squares,
    bias,
    output,
    next_weight,
    next_values,
    next_squares,
    tile,
    rows,
    columns,
    is_stored,
    eps,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Store whole sums: scaled, gated, or added to the output, with the next norm's part."""
    if NUM_SQUARES > 0:
        parts = tl.arange(0, BLOCK_SQUARES)
        places = squares + parts[:, None] * BLOCK_M + rows[None, :]
        total = tl.sum(tl.load(places, mask=(parts < NUM_SQUARES)[:, None], other=0.0), axis=0)
        inverse = tl.rsqrt(total / WIDTH + eps)[:, None]
        sums = sums * inverse
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=columns < OUT, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        if NUM_SQUARES > 0:
            up_sums = up_sums * inverse
        if HAS_BIAS:
            up_bias = tl.load(bias + OUT + columns, mask=columns < OUT, other=0.0)
            up_sums += up_bias.to(tl.float32)[None, :]
        sums = activated(sums, ACTIVATION) * up_sums
    offsets = rows[:, None] * OUT + columns[None, :]
    if ADDS:
        sums += tl.load(output + offsets, mask=is_stored, other=0.0).to(tl.float32)
    sums = rounded(sums, output.dtype.element_ty)
    tl.store(output + offsets, sums, mask=is_stored)
    if NORMS:
        values = tl.where(is_stored, sums.to(tl.float32), 0.0)
        norm = tl.load(next_weight + columns, mask=columns < OUT, other=0.0).to(tl.float32)
        normed = rounded(values * norm[None, :], output.dtype.element_ty)
        tl.store(next_values + offsets, normed, mask=is_stored)
        tl.store(next_squares + tile * BLOCK_M + rows, tl.sum(values * values, axis=1))


@jit
def _split_k_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0913 - a kernel's arguments
    x,
    squares,
    weight,
    bias,
    output,
    next_weight,
    next_values,
    next_squares,
    partials,
    arrivals,
    num_rows,
    eps,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (i, j): the sums of columns i * BLOCK_N and so on over split j of k.

    With an activation the weight has OUT more rows, and a program computes both halves' columns.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < OUT
    first = split * SPLIT
    k = tl.arange(0, BLOCK_K)
    x_tile = x + rows[:, None] * WIDTH + first + k[None, :]
    weight_tile = weight + columns.to(tl.int64)[None, :] * WIDTH + first + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up_sums = sums
    for start in range(0, SPLIT, BLOCK_K):
        places = first + start + k
        is_k = places < WIDTH
        left = tl.load(x_tile, mask=is_row[:, None] & is_k[None, :], other=0.0)
        mask = is_column[None, :] & is_k[:, None]
        right = tl.load(weight_tile, mask=mask, other=0.0)
        sums = dot(left, right, sums)
        if ACTIVATION is not None:
            right = tl.load(weight_tile + OUT * WIDTH, mask=mask, other=0.0)
            up_sums = dot(left, right, up_sums)
        x_tile += BLOCK_K
        weight_tile += BLOCK_K

    is_stored = is_row[:, None] & is_column[None, :]
    if NUM_SPLITS == 1:
        _finish(
            sums, up_sums, squares, bias, output, next_weight, next_values, next_squares,
            tile, rows, columns, is_stored, eps, OUT, WIDTH, NUM_SQUARES, BLOCK_SQUARES,
            HAS_BIAS, ADDS, NORMS, ACTIVATION, BLOCK_M,
        )  # fmt: skip
    else:
        NUM_SUMS: tl.constexpr = BLOCK_M * BLOCK_N
        SIZE: tl.constexpr = (1 if ACTIVATION is None else 2) * NUM_SUMS
        parts = partials + tile * (NUM_SPLITS * SIZE)
        own = parts + split * SIZE
        at = rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(own + at, sums, mask=is_row[:, None])
        if ACTIVATION is not None:
            tl.store(own + NUM_SUMS + at, up_sums, mask=is_row[:, None])
        tl.debug_barrier()  # all threads' parts are stored before one of them says so
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == NUM_SPLITS - 1:
            sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            up_sums = sums
            for number in range(NUM_SPLITS):
                part = parts + number * SIZE
                # Not from the level-1 cache: other multiprocessors wrote them.
                sums += tl.load(part + at, mask=is_row[:, None], other=0.0, cache_modifier=".cg")
                if ACTIVATION is not None:
                    up_sums += tl.load(
                        part + NUM_SUMS + at, mask=is_row[:, None], other=0.0, cache_modifier=".cg"
                    )
            tl.store(arrivals + tile, 0)  # for the next launch
            _finish(
                sums, up_sums, squares, bias, output, next_weight, next_values, next_squares,
                tile, rows, columns, is_stored, eps, OUT, WIDTH, NUM_SQUARES, BLOCK_SQUARES,
                HAS_BIAS, ADDS, NORMS, ACTIVATION, BLOCK_M,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitShape:
    """Constants of a product's kernel: they follow from the weight and the device alone."""

    block_n: int
    block_k: int
    split: int
    """The part of k that one program sums, a multiple of `block_k`."""
    num_splits: int
    num_tiles: int
    """Tiles of columns."""
    num_stages: int
    num_warps: int
    is_gated: bool

    @property
    def partial_size(self) -> int:
        """Count the float32 of all partial sums; 0 without splits."""
        if self.num_splits == 1:
            return 0
        sums = FEW_ROWS * self.block_n * (2 if self.is_gated else 1)
        return self.num_tiles * self.num_splits * sums


def split_shape(weight: Tensor, *, is_gated: bool = False) -> SplitShape:
    """Return the shape for a weight, [out_features, in_features]; is_gated: gates above values."""
    out_features, width = weight.shape
    if is_gated:
        out_features //= 2
    if width % 16 or weight.dtype == torch.float32:  # narrow loads; no tensor cores
        block_n, block_k, num_stages = 32, 32, 3
    else:
        block_n, block_k, num_stages = 32 if is_gated else 64, 128, 4
    num_tiles, num_blocks = -(-out_features // block_n), -(-width // block_k)
    blocks = _blocks_of_a_split(num_tiles, num_blocks, num_multiprocessors(weight.device))
    return SplitShape(
        block_n=block_n,
        block_k=block_k,
        split=blocks * block_k,
        num_splits=-(-num_blocks // blocks),
        num_tiles=num_tiles,
        num_stages=num_stages,
        num_warps=4,
        is_gated=is_gated,
    )


def _blocks_of_a_split(num_tiles: int, num_blocks: int, multiprocessors: int) -> int:
    """Blocks of k that a program takes, so that all multiprocessors have as much to do.

    Among equals those with about two programs a multiprocessor: fewer read too little at a time,
    more add too many sums.
    """

    def rank(blocks: int) -> tuple[float, float]:
        programs = num_tiles * -(-num_blocks // blocks) / multiprocessors
        used = programs / math.ceil(programs)
        return (-round(10 * used) if programs <= _MOST_PROGRAMS else 0, abs(programs - 2.0))

    return min(range(min(_MIN_BLOCKS, num_blocks), num_blocks + 1), key=rank)


class SplitScratch:
    """Memory that the products of one model share, because they run one after the other.

    partials: float32; arrivals: int32, how many splits of a tile are stored, zero between launches.
    """

    __slots__ = ("arrivals", "partials")

    def __init__(self, device: torch.device, shapes: list[SplitShape]) -> None:
        size = max((shape.partial_size for shape in shapes), default=0)
        tiles = max((shape.num_tiles for shape in shapes), default=0)
        self.partials = torch.empty(max(size, 1), dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(max(tiles, 1), dtype=torch.int32, device=device)


def can_split(product: object) -> bool:
    """True if `split_k_linear` takes the product's weight: a plain one on a GPU, of `DTYPES`."""
    weight = product.plain_weight if isinstance(product, Linear) else None
    return (
        weight is not None
        and weight.dtype in DTYPES
        and weight.is_contiguous()
        and uses_triton(weight)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfNormed:
    """Rows in front of a product that only lack their norm's factor."""

    values: Tensor
    """[n, width], the rows times the norm's weight."""
    squares: Tensor
    """float32 [parts, FEW_ROWS], each row's sum of squares in parts."""
    eps: float
    """The norm's, added to the mean square."""


def split_k_linear(
    x: Tensor | HalfNormed,
    product: Linear,
    scratch: SplitScratch,
    *,
    activation: Activation | None = None,
) -> Tensor:
    """`product(x)`, or gated. One launch.

    `x`: [n, in_features], n at most FEW_ROWS, contiguous; `product`: as `can_split` has it;
    `activation`: as `gated_mul` of the result, whose gates stand in front. Returns
    [n, out_features], half as wide if gated.
    """
    rows = x.values if isinstance(x, HalfNormed) else x
    weight = _weight(product)
    if not uses_triton(rows):
        return split_k_linear_reference(_normed(x), weight, product.bias, activation=activation)
    width = weight.shape[0] // (1 if activation is None else 2)
    output = torch.empty((rows.shape[0], width), dtype=rows.dtype, device=rows.device)
    _launch(x, product, scratch, output, activation=activation)
    return output


def split_k_add(x: Tensor, product: Linear, scratch: SplitScratch, residual: Tensor) -> None:
    """Add `product(x)` to the residual stream, [n, out_features], contiguous. One launch.

    `x`, `product`: as for `split_k_linear`.
    """
    if not uses_triton(x):
        split_k_linear_reference(x, _weight(product), product.bias, residual=residual)
    else:
        _launch(x, product, scratch, residual, adds=True)


def split_k_add_norm(
    x: Tensor, product: Linear, scratch: SplitScratch, residual: Tensor, norm: RmsNorm
) -> HalfNormed:
    """`split_k_add`, and the new stream in front of the product behind a norm of it."""
    num_parts = split_shape(_weight(product)).num_tiles
    half = HalfNormed(
        values=torch.empty_like(residual),
        squares=torch.empty((num_parts, FEW_ROWS), dtype=torch.float32, device=x.device),
        eps=norm.eps,
    )
    if not uses_triton(x):
        split_k_add(x, product, scratch, residual)
        half.values.copy_(residual * norm.weight)
        half.squares.zero_()[0, : len(residual)] = residual.float().square().sum(-1)
    else:
        _launch(x, product, scratch, residual, adds=True, half=half, norm=norm)
    return half


def _normed(x: Tensor | HalfNormed) -> Tensor:
    """The rows as the product takes them, with the norm's factor."""
    if not isinstance(x, HalfNormed):
        return x
    total = x.squares.sum(0)[: len(x.values), None]
    inverse = torch.rsqrt(total / x.values.shape[-1] + x.eps)
    return (x.values.float() * inverse).to(x.values.dtype)


def _weight(product: Linear) -> Tensor:
    weight = product.plain_weight
    assert weight is not None
    return weight


def _launch(  # noqa: PLR0913 - what stands before and behind the product
    x: Tensor | HalfNormed,
    product: Linear,
    scratch: SplitScratch,
    output: Tensor,
    *,
    activation: Activation | None = None,
    adds: bool = False,
    half: HalfNormed | None = None,
    norm: RmsNorm | None = None,
) -> None:
    """Write the gated product, or add the product to the output and fill `half`."""
    rows = x.values if isinstance(x, HalfNormed) else x
    squares = x.squares if isinstance(x, HalfNormed) else None
    eps = x.eps if isinstance(x, HalfNormed) else 0.0
    weight, bias = _weight(product), product.bias
    num_rows, width = rows.shape
    if num_rows > FEW_ROWS or not rows.is_contiguous():
        stride = rows.stride()
        raise ValueError(f"{num_rows} rows of strides {stride}: at most {FEW_ROWS}, contiguous")
    if num_rows == 0:
        return
    shape = split_shape(weight, is_gated=activation is not None)
    num_squares = 0 if squares is None else squares.shape[0]
    launch(
        _split_k_kernel,
        (shape.num_tiles, shape.num_splits),
        rows,
        squares,
        weight,
        bias,
        output,
        None if norm is None else norm.weight,
        None if half is None else half.values,
        None if half is None else half.squares,
        scratch.partials,
        scratch.arrivals,
        num_rows,
        eps,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        OUT=output.shape[1],
        WIDTH=width,
        SPLIT=shape.split,
        NUM_SPLITS=shape.num_splits,
        NUM_SQUARES=num_squares,
        BLOCK_SQUARES=next_power_of_2(num_squares),
        HAS_BIAS=bias is not None,
        ADDS=adds,
        NORMS=half is not None,
        ACTIVATION=activation,
        BLOCK_M=FEW_ROWS,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
    )
