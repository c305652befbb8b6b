"""Products of up to 16 rows on a GPU, with what stands before and behind them in the same launch.

A pass of few rows is over when its weights are read, and each launch costs what a megabyte or
several do. So the norm in front of a product, and the gate or the addition to the residual stream
behind it, belong to the product's kernel. The columns of a weight alone would occupy a part of
the device, so its sums over k are split among programs ("split-K": Osama et al., "Stream-K", 2023,
compares the ways); the last of them to arrive adds up all splits in their order, so the bits do
not depend on which one that is. The norm's factor is applied behind the sums: with the factor f of
a row, (f * x * norm) @ w.T is f * ((x * norm) @ w.T), and the squares are summed on the way.

A row has the same bits in any pass of up to 16 rows, not in larger ones, which run other kernels:
deterministic mode does not use this module.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.layers.gated_mul import Activation, activated, gated_mul_reference
from kernels.layers.linear import Linear
from kernels.layers.rms_norm import RmsNorm, rms_norm_reference
from kernels.triton_support import (
    dot,
    jit,
    launch,
    launches_early,
    num_multiprocessors,
    rounded,
    tl,
    uses_triton,
    wait_for_inputs,
)

FEW_ROWS: Final = 16
"""Rows of the tile, the least that tensor cores take."""

DTYPES: Final = (torch.bfloat16, torch.float32)
# Not float16: the factor of the norm comes after the sums, and x * norm could be too large for it.

_PROGRAMS_PER_MULTIPROCESSOR: Final = 2
# Blocks of k of a program at least: fewer would wait for memory more than they read.
_MIN_BLOCKS: Final = 2


def split_k_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: RmsNorm | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The norm, the product, the gate and the addition as torch has them, one after the other."""
    rows = x if norm is None else rms_norm_reference(x, norm.weight, norm.eps).to(x.dtype)
    product = torch.nn.functional.linear(rows, weight, bias)
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
    rows,
    columns,
    is_stored,
    eps,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Store whole sums: scaled, gated, or added to the output."""
    if HAS_NORM:
        inverse = tl.rsqrt(squares / WIDTH + eps)[:, None]
        sums = sums * inverse
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=columns < OUT, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        if HAS_NORM:
            up_sums = up_sums * inverse
        if HAS_BIAS:
            up_bias = tl.load(bias + OUT + columns, mask=columns < OUT, other=0.0)
            up_sums += up_bias.to(tl.float32)[None, :]
        sums = activated(sums, ACTIVATION) * up_sums
    places = output + rows[:, None] * OUT + columns[None, :]
    if ADDS:
        sums += tl.load(places, mask=is_stored, other=0.0).to(tl.float32)
    tl.store(places, rounded(sums, output.dtype.element_ty), mask=is_stored)


@jit
def _split_k_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0913 - a kernel's arguments
    x,
    norm_weight,
    weight,
    bias,
    output,
    partials,
    arrivals,
    num_rows,
    eps,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_EARLY: tl.constexpr,
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
    squares = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    if IS_EARLY:
        wait_for_inputs()
    for start in range(0, SPLIT, BLOCK_K):
        places = first + start + k
        is_k = places < WIDTH
        left = tl.load(x_tile, mask=is_row[:, None] & is_k[None, :], other=0.0)
        mask = is_column[None, :] & is_k[:, None]
        right = tl.load(weight_tile, mask=mask, other=0.0)
        if HAS_NORM:
            values = left.to(tl.float32)
            squares += values * values
            norm = tl.load(norm_weight + places, mask=is_k, other=0.0).to(tl.float32)
            left = rounded(values * norm[None, :], x.dtype.element_ty)
        sums = dot(left, right, sums)
        if ACTIVATION is not None:
            right = tl.load(weight_tile + OUT * WIDTH, mask=mask, other=0.0)
            up_sums = dot(left, right, up_sums)
        x_tile += BLOCK_K
        weight_tile += BLOCK_K

    own_squares = tl.sum(squares, axis=1)  # [BLOCK_M]
    is_stored = is_row[:, None] & is_column[None, :]
    if NUM_SPLITS == 1:
        _finish(
            sums, up_sums, own_squares, bias, output, rows, columns, is_stored, eps,
            OUT, WIDTH, HAS_NORM, HAS_BIAS, ADDS, ACTIVATION,
        )  # fmt: skip
    else:
        NUM_SUMS: tl.constexpr = BLOCK_M * BLOCK_N
        SIZE: tl.constexpr = BLOCK_M + (1 if ACTIVATION is None else 2) * NUM_SUMS
        parts = partials + tile * (NUM_SPLITS * SIZE)
        own = parts + split * SIZE
        at = BLOCK_M + rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(own + rows, own_squares, mask=is_row)
        tl.store(own + at, sums, mask=is_row[:, None])
        if ACTIVATION is not None:
            tl.store(own + NUM_SUMS + at, up_sums, mask=is_row[:, None])
        tl.debug_barrier()  # all threads' parts are stored before one of them says so
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == NUM_SPLITS - 1:
            sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            up_sums = sums
            own_squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
            for number in range(NUM_SPLITS):
                part = parts + number * SIZE
                # Not from the level-1 cache: other multiprocessors wrote them.
                own_squares += tl.load(part + rows, mask=is_row, other=0.0, cache_modifier=".cg")
                sums += tl.load(part + at, mask=is_row[:, None], other=0.0, cache_modifier=".cg")
                if ACTIVATION is not None:
                    up_sums += tl.load(
                        part + NUM_SUMS + at, mask=is_row[:, None], other=0.0, cache_modifier=".cg"
                    )
            tl.store(arrivals + tile, 0)  # for the next launch
            _finish(
                sums, up_sums, own_squares, bias, output, rows, columns, is_stored, eps,
                OUT, WIDTH, HAS_NORM, HAS_BIAS, ADDS, ACTIVATION,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitShape:
    """Constants of a product's kernel: they follow from the weight and the device alone.

    split: of k, a multiple of block_k; num_tiles: of columns.
    """

    block_n: int
    block_k: int
    split: int
    num_splits: int
    num_tiles: int
    num_stages: int
    is_gated: bool

    @property
    def partial_size(self) -> int:
        """Count the float32 of all partial sums; 0 without splits."""
        if self.num_splits == 1:
            return 0
        sums = FEW_ROWS * self.block_n * (2 if self.is_gated else 1)
        return self.num_tiles * self.num_splits * (FEW_ROWS + sums)


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
    wanted = -(-_PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(weight.device) // num_tiles)
    blocks = max(-(-num_blocks // wanted), min(_MIN_BLOCKS, num_blocks))
    return SplitShape(
        block_n=block_n,
        block_k=block_k,
        split=blocks * block_k,
        num_splits=-(-num_blocks // blocks),
        num_tiles=num_tiles,
        num_stages=num_stages,
        is_gated=is_gated,
    )


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


def split_k_linear(
    x: Tensor,
    product: Linear,
    scratch: SplitScratch,
    *,
    norm: RmsNorm | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`product(norm(x))`, gated, or added to the residual stream in place. One launch.

    x: [n, in_features], n at most FEW_ROWS, contiguous; product: as `can_split` has it; norm: of
    the rows; activation: as `gated_mul` of the result, whose gates stand in front; residual:
    [n, out_features], contiguous. Returns [n, out_features], half as wide if gated.
    """
    weight, bias = product.plain_weight, product.bias
    assert weight is not None
    if not uses_triton(x):
        return split_k_linear_reference(
            x, weight, bias, norm=norm, activation=activation, residual=residual
        )
    num_rows, width = x.shape
    if num_rows > FEW_ROWS or not x.is_contiguous():
        raise ValueError(f"{num_rows} rows of strides {x.stride()}: at most {FEW_ROWS}, contiguous")
    shape = split_shape(weight, is_gated=activation is not None)
    out_features = weight.shape[0] // (1 if activation is None else 2)
    output = residual
    if output is None:
        output = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return output
    launch(
        _split_k_kernel,
        (shape.num_tiles, shape.num_splits),
        x,
        None if norm is None else norm.weight,
        weight,
        bias,
        output,
        scratch.partials,
        scratch.arrivals,
        num_rows,
        0.0 if norm is None else norm.eps,
        num_warps=4,
        num_stages=shape.num_stages,
        OUT=out_features,
        WIDTH=width,
        SPLIT=shape.split,
        NUM_SPLITS=shape.num_splits,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        ADDS=residual is not None,
        ACTIVATION=activation,
        IS_EARLY=launches_early(x.device),
        BLOCK_M=FEW_ROWS,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
    )
    return output
