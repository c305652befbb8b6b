"""Matrix products in which a row's result does not depend on the rows beside it, to the bit.

Libraries choose their kernels by the number of rows, and kernels add up in different orders. Here
the order is fixed: on a GPU by one tile shape for every number of rows, whole sums over k in one
program; on the CPU by running only row counts that were tried and found to agree.
He, 2025 ("Defeating nondeterminism in LLM inference").
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.cpu.grouped_panel_linear import (
    GroupedPanelLinear,
    Int4PanelLinear,
    can_hold_grouped,
)
from outrider.kernels.cpu.panel_linear import (
    Int8PanelLinear,
    PanelLinear,
    can_use_panels,
    prefers_onednn,
)
from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.cpu.stored_panel_linear import StoredPanelLinear, can_hold_stored
from outrider.kernels.layers.compiled_rows import CompiledNorm, can_run_rows
from outrider.kernels.layers.int4_linear import Int4Linear
from outrider.kernels.layers.int8_linear import Int8Linear
from outrider.kernels.layers.integer_linear import IntegerLinear, can_use_integer_tiles
from outrider.kernels.layers.linear import PACK_ROWS, Linear, can_pack
from outrider.kernels.layers.linear_tiles import GROUP_TILES, tile_shape
from outrider.kernels.layers.rms_norm import RmsNorm
from outrider.kernels.layers.row_invariant_ops import RowInvariantNorm
from outrider.kernels.layers.stored_linear import StoredLinear, can_use_stored_tiles
from outrider.kernels.quantised.stored_weight import StoredWeight
from outrider.kernels.quantised.weight import QuantisedWeight
from outrider.kernels.triton_support import dot, is_automatic, jit, launch, rounded, tl, uses_triton

# The tile that defines the right bits on a CPU, and the other numbers of rows that may be run
# where they give the same ones. A pass is padded to the next of them: at most half of it.
TILE_ROWS = 16
RUN_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
# A sum in another order differs in its last bits, which rounding to 16 bits hides in most results:
# in all but one of some 4,000 of bfloat16. So a row count is tried on many, and on no more rows.
_TRIED_RESULTS = 1 << 17
_MOST_TRIED_ROWS = 1024
# Torch's own tensors start at multiples of this; at other addresses sums may be cut differently.
ALIGNMENT_BYTES = 64


def row_invariant_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply one row after the other: nothing that a neighbour could change."""
    rows = [F.linear(x[index : index + 1], weight, bias) for index in range(x.shape[0])]
    return torch.cat(rows) if rows else x.new_empty((0, weight.shape[0]))


@jit
def _linear_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel's arguments
    x,
    weight,
    bias,
    output,
    num_rows,
    out_features,
    IN_FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    group = program // (GROUP_M * column_tiles)
    group_tiles = tl.minimum(row_tiles - group * GROUP_M, GROUP_M)
    place = program % (GROUP_M * column_tiles)
    row_tile, column_tile = group * GROUP_M + place % group_tiles, place // group_tiles

    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < out_features
    k = tl.arange(0, BLOCK_K)
    x_tile = x + rows.to(tl.int64)[:, None] * IN_FEATURES + k[None, :]
    weight_tile = weight + columns.to(tl.int64)[None, :] * IN_FEATURES + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_K):
        if IN_FEATURES % BLOCK_K == 0:
            left = tl.load(x_tile, mask=is_row[:, None], other=0.0)
            right = tl.load(weight_tile, mask=is_column[None, :], other=0.0)
        else:
            is_k = start + k < IN_FEATURES
            left = tl.load(x_tile, mask=is_row[:, None] & is_k[None, :], other=0.0)
            right = tl.load(weight_tile, mask=is_column[None, :] & is_k[:, None], other=0.0)
        sums = dot(left, right, sums)
        x_tile += BLOCK_K
        weight_tile += BLOCK_K
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    places = output + rows.to(tl.int64)[:, None] * out_features + columns[None, :]
    sums = rounded(sums, output.dtype.element_ty)
    tl.store(places, sums, mask=is_row[:, None] & is_column[None, :])


def row_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, every row with the bits it has alone.

    `x`: [n, in_features] -> [n, out_features]; `weight`: [out_features, in_features]; `bias`:
    [out_features] or None; all of one dtype: float32, bfloat16 or float16. Sums are float32. On a
    CPU it takes row after row: `RowInvariantLinear` is the fast one there.
    """
    if not uses_triton(x):
        return row_invariant_linear_reference(x, weight, bias)
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    x, weight = x.contiguous(), weight.contiguous()  # one kind of loads for every caller
    output = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    tile = tile_shape(out_features, in_features, x.dtype)
    block_m, block_n = tile["BLOCK_M"], tile["BLOCK_N"]
    launch(
        _linear_kernel,
        (-(-num_rows // block_m) * -(-out_features // block_n),),
        x,
        weight,
        bias,
        output,
        num_rows,
        out_features,
        IN_FEATURES=in_features,
        HAS_BIAS=bias is not None,
        GROUP_M=GROUP_TILES,
        **tile,
    )
    return output


class RowInvariantLinear:
    """`outrider.kernels.layers.linear.Linear` whose rows keep their bits in any batch.

    On a CPU, passes are cut into runs of `RUN_ROWS` rows, the last padded with zeros. For each
    number of threads, a trial with this very weight finds the runs that give the bits of a full
    tile, wherever a row stands in it. Where not even the tile keeps a row's bits, rows run one at a
    time.
    """

    __slots__ = ("_bias", "_linear", "_packed", "_run_rows", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> None:
        """`weight`: [out_features, in_features]; packed if `pack` and the device allow it."""
        self._bias = bias
        self._weight: Tensor | None = weight
        self._packed: Tensor | None = None
        self._linear: Any = None
        self._run_rows: dict[int, tuple[int, ...]] = {}  # by number of threads
        if uses_triton(weight):
            return
        if pack and can_pack(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
            self._linear = torch.ops.mkldnn._linear_pointwise.default
            self._weight = None
        self._find_run_rows(weight.shape[1], weight.dtype)

    @property
    def is_packed(self) -> bool:
        """True if the weight is held in oneDNN's layout."""
        return self._packed is not None

    def __call__(self, x: Tensor) -> Tensor:
        """`x`: [n, in_features] -> [n, out_features]."""
        if self._weight is not None and uses_triton(x):
            return row_invariant_linear(x, self._weight, self._bias)
        sizes = self._run_rows.get(torch.get_num_threads())
        if sizes is None:
            sizes = self._find_run_rows(x.shape[1], x.dtype)
        if x.data_ptr() % ALIGNMENT_BYTES or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
        num_rows, largest = x.shape[0], sizes[-1]
        if num_rows in sizes:
            return self._run(x)
        if num_rows < largest:
            return self._run_padded(x, sizes)
        num_whole = num_rows // largest * largest
        runs = [self._run(x[start : start + largest]) for start in range(0, num_whole, largest)]
        if num_whole < num_rows:
            runs.append(self._run_padded(x[num_whole:], sizes))
        return torch.cat(runs)

    def _run(self, x: Tensor) -> Tensor:
        if self._packed is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self._bias)
        result: Tensor = self._linear(x, self._packed, self._bias, "none", [], "")
        return result

    def _run_padded(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        num_rows = x.shape[0]
        if num_rows == 0:
            return self._run(x.new_zeros((sizes[0], x.shape[1])))[:0]
        size = next(size for size in sizes if size >= num_rows)
        if size == num_rows:
            return self._run(x)
        padded = x.new_zeros((size, x.shape[1]))
        padded[:num_rows] = x
        return self._run(padded)[:num_rows]

    def _find_run_rows(self, in_features: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Try the row counts with this number of threads and remember those that agree."""
        num_results = self._run(torch.zeros((TILE_ROWS, in_features), dtype=dtype)).shape[1]
        num_tried = _TRIED_RESULTS if dtype.itemsize < 4 else 1
        num_rows = min(-(-num_tried // max(num_results, 1)), _MOST_TRIED_ROWS)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn((num_rows + RUN_ROWS[-1], in_features), generator=generator).to(dtype)
        x = x[: len(x) // TILE_ROWS * TILE_ROWS]
        right = self._in_runs(x, TILE_ROWS)
        sizes: tuple[int, ...] = (1,)
        if self._tile_keeps_bits(x, right):
            sizes = tuple(size for size in RUN_ROWS if self._agrees(size, x, right, num_rows))
        self._run_rows[torch.get_num_threads()] = sizes
        return sizes

    def _in_runs(self, x: Tensor, size: int) -> Tensor:
        """The products of whole runs of `size` rows; what is left behind them is left out."""
        num_whole = len(x) // size * size
        return torch.cat([self._run(x[at : at + size]) for at in range(0, num_whole, size)])

    def _tile_keeps_bits(self, x: Tensor, right: Tensor) -> bool:
        """True if a row has the same bits wherever it stands in a tile, beside whatever rows."""
        tiles = x.view(-1, TILE_ROWS, x.shape[1])
        turned = self._in_runs(tiles.flip(1).flatten(0, 1), TILE_ROWS)
        if not torch.equal(turned.view(len(tiles), TILE_ROWS, -1).flip(1).flatten(0, 1), right):
            return False
        alone = self._run(x[:1].repeat(TILE_ROWS, 1))
        return torch.equal(alone, right[:1].expand_as(alone))

    def _agrees(self, size: int, x: Tensor, right: Tensor, num_rows: int) -> bool:
        """True if runs of `size` rows, at least `num_rows` in all, have the bits of tiles."""
        found = self._in_runs(x[: -(-num_rows // size) * size], size)
        return torch.equal(found, right[: len(found)])


Product = (
    Linear
    | RowInvariantLinear
    | PanelLinear
    | Int4Linear
    | Int8Linear
    | IntegerLinear
    | StoredLinear
)


def computes_in_panels(dtype: torch.dtype, device: torch.device) -> bool:
    """True if `make_linear` takes the compiled panels for such weights in either mode."""
    return _has_panels(device) and dtype == torch.bfloat16 and not prefers_onednn()


def _has_panels(device: torch.device) -> bool:
    return is_automatic() and device.type == "cpu" and product_support().library is not None


def make_linear(
    weight: Tensor | QuantisedWeight | StoredWeight,
    bias: Tensor | None = None,
    *,
    pack: bool = True,
    deterministic: bool = False,
) -> Product:
    """Return the fastest product for a weight that stays, of those that keep every row's bits.

    A quantised weight has one arithmetic, whatever the mode, the device and the number of rows.

    Without `deterministic` they need not keep them. Panels do both, so where the compiled products
    are there, bfloat16 has the same arithmetic in either mode. Measured on Zen 4 over weights of 64
    KiB to 22 MiB, oneDNN takes 1.1 to 2.1 times as long up to 64 rows and .9 to 1 times beyond; on
    AVX2 alone, 2 to 8 times as long. Only AMX, for many rows, is a reason to prefer oneDNN.
    """
    if isinstance(weight, QuantisedWeight):
        return _make_quantised(weight, bias)
    if isinstance(weight, StoredWeight):
        if can_use_stored_tiles(weight, weight.codes.device):
            return StoredLinear(weight, bias)
        if rounds_rows(weight, weight.codes.device):
            return GroupedPanelLinear(weight, bias)
        if can_keep_stored(weight, weight.codes.device):
            return StoredPanelLinear(weight, bias)
        weight = weight.decoded()
    may_use_panels = pack and is_automatic() and (deterministic or not prefers_onednn())
    if may_use_panels and can_use_panels(weight):
        return PanelLinear(weight, bias)
    if deterministic:
        return RowInvariantLinear(weight, bias, pack=pack)
    return Linear(weight, bias, pack=pack and not uses_triton(weight))


def keeps_stored_weights(dtype: torch.dtype, device: torch.device) -> bool:
    """True if `make_linear` has products with weights as checkpoints store them."""
    return dtype == torch.bfloat16 and (uses_triton(device) or _has_panels(device))


def can_keep_stored(weight: StoredWeight, device: torch.device) -> bool:
    """True if `make_linear` holds a weight on a device as it is stored, rather than decode it."""
    if uses_triton(device):
        return can_use_stored_tiles(weight, device)
    may_decode = computes_in_panels(torch.bfloat16, device) and can_hold_stored(weight)
    return may_decode or rounds_rows(weight, device)


def rounds_rows(weight: StoredWeight, device: torch.device) -> bool:
    """True if `make_linear` rounds the rows that it multiplies with a weight to 8 bits."""
    return _has_panels(device) and not weight.keeps_rows and can_hold_grouped(weight)


def _make_quantised(weight: QuantisedWeight, bias: Tensor | None) -> Product:
    if can_use_integer_tiles(weight):
        return IntegerLinear(weight, bias)
    is_compiled = is_automatic() and weight.codes.device.type == "cpu" and product_support().library
    if weight.bits == 4:
        return Int4PanelLinear(weight, bias) if is_compiled else Int4Linear(weight, bias)
    return Int8PanelLinear(weight, bias) if is_compiled else Int8Linear(weight, bias)


def make_norm(
    weight: Tensor, eps: float, *, dtype: torch.dtype, deterministic: bool = False
) -> RmsNorm:
    """Return the norm for rows of `dtype` with its weight made ready; arguments as for `RmsNorm`.

    The compiled one keeps every row's bits and is the fastest, so it serves either mode.
    """
    if is_automatic() and can_run_rows(dtype, weight.device):
        return CompiledNorm(weight, eps)
    if deterministic:
        return RowInvariantNorm(weight, eps)
    return RmsNorm(weight, eps)
