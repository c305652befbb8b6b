"""The small kernels at the shapes of Qwen3-8B, with the bytes that each must move."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.gpu_timing import num_input_sets
from outrider.kernels.kv.compact_kv import compact_kv
from outrider.kernels.kv.rope_write_kv import rope_write_kv
from outrider.kernels.kv.write_kv import write_kv
from outrider.kernels.layers.embedding import embed_tokens
from outrider.kernels.layers.gated_mul import Activation, gated_mul
from outrider.kernels.layers.linear import Linear
from outrider.kernels.layers.rms_norm import RmsNorm, add_rms_norm, rms_norm
from outrider.kernels.layers.rope import RopeConfig, RotaryTable
from outrider.kernels.layers.row_invariant_linear import make_linear, row_invariant_linear
from outrider.kernels.layers.split_k_linear import (
    FEW_ROWS,
    HalfNormed,
    SplitScratch,
    split_k_add,
    split_k_linear,
    split_shape,
)
from outrider.kernels.quantised.weight import QuantisedWeight, rounded_to_int4, rounded_to_int8

BLOCK_SIZE = 16
INT4_GROUP_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a model, from which the kernels' sizes follow."""

    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_query_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    num_layers: int = 36
    vocab_size: int = 151936
    dtype: torch.dtype = torch.bfloat16

    @property
    def qkv_size(self) -> int:
        """Width of the fused projection."""
        return (self.num_query_heads + 2 * self.num_kv_heads) * self.head_dim


TINY = ModelShape(
    hidden_size=64,
    intermediate_size=96,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_layers=2,
    vocab_size=300,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kernel on inputs of its own: `make()` gives a call with new random inputs.

    `num_bytes`: what must be read and written once. `peer`: torch's way, on the same kind of
    inputs. `has_host_part`: it uploads something, so that no CUDA graph can hold it.
    """

    name: str
    make: Callable[[], Callable[[], object]]
    num_bytes: int
    num_flops: int = 0
    peer: Callable[[], Callable[[], object]] | None = None
    has_host_part: bool = False

    def calls(self, device: torch.device, *, of_peer: bool = False) -> list[Callable[[], object]]:
        """One call a set of inputs, as many sets as the L2 cache demands."""
        make = self.peer if of_peer else self.make
        assert make is not None
        return [make() for _ in range(num_input_sets(self.num_bytes, device))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """Makes the cases of one model shape on a device."""

    shape: ModelShape
    device: torch.device
    rows: tuple[int, ...] = (1, 64, 2048)
    trees: tuple[int, ...] = (1, 16)
    _shared: dict[str, Tensor] = field(default_factory=dict)

    def random(self, *size: int) -> Tensor:
        """Normal numbers in the model's dtype."""
        return torch.randn(size, device=self.device, dtype=self.shape.dtype)

    def integers(self, high: int, *size: int) -> Tensor:
        """Uniform int64 below `high`."""
        return torch.randint(high, size, device=self.device)

    def distinct(self, high: int, count: int) -> Tensor:
        """`count` different numbers below `high`, int64."""
        return torch.randperm(high, device=self.device)[:count]

    # ---- a layer

    def embedding(self) -> list[Case]:
        """Rows of the table."""
        shape = self.shape
        table = self.random(shape.vocab_size, shape.hidden_size)

        def make(rows: int) -> Callable[[], object]:
            return partial(embed_tokens, table, self.integers(shape.vocab_size, rows))

        row_bytes = 2 * shape.hidden_size * shape.dtype.itemsize + 8
        return [
            Case(
                name=f"embed_tokens, {rows} rows",
                make=partial(make, rows),
                num_bytes=rows * row_bytes,
            )
            for rows in self.rows
        ]

    def norms(self) -> list[Case]:
        """The residual's sum and norm: two read, two written."""
        width, size = self.shape.hidden_size, self.shape.dtype.itemsize
        weight = self.random(width)

        def make(rows: int) -> Callable[[], object]:
            # The residual grows with every call, so the update is small.
            update, residual = self.random(rows, width) * 1e-3, self.random(rows, width)
            return partial(add_rms_norm, update, residual, weight, 1e-6)

        return [
            Case(
                name=f"add_rms_norm, {rows} rows",
                make=partial(make, rows),
                num_bytes=(4 * rows + 1) * width * size,
            )
            for rows in self.rows
        ]

    def gates(self) -> list[Case]:
        """Three tensors of the inner width."""
        width = self.shape.intermediate_size

        def make(rows: int) -> Callable[[], object]:
            return partial(gated_mul, self.random(rows, 2 * width))

        return [
            Case(
                name=f"gated_mul, {rows} rows",
                make=partial(make, rows),
                num_bytes=3 * rows * width * self.shape.dtype.itemsize,
            )
            for rows in self.rows
        ]

    def cache(self, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer."""
        size = (num_blocks, BLOCK_SIZE, self.shape.num_kv_heads, self.shape.head_dim)
        return self.random(*size), self.random(*size)

    def rotations(self) -> list[Case]:
        """QK-norm, rotation and the cache's rows: the projection is read and written once."""
        shape, size = self.shape, self.shape.dtype.itemsize
        rotary = RotaryTable(
            RopeConfig(head_dim=shape.head_dim),
            max_positions=4096,
            dtype=shape.dtype,
            device=self.device,
        )
        norm = RmsNorm(
            self.random(shape.num_query_heads + shape.num_kv_heads, shape.head_dim), 1e-6
        )
        num_blocks = max(self.rows) // BLOCK_SIZE + 1
        caches = self.cache(num_blocks)
        num_heads = shape.num_query_heads + 2 * shape.num_kv_heads

        def make(rows: int) -> Callable[[], object]:
            return partial(
                rope_write_kv,
                self.random(rows, num_heads, shape.head_dim),
                self.integers(4096, rows),
                self.distinct(num_blocks * BLOCK_SIZE, rows),
                rotary,
                *caches,
                num_query_heads=shape.num_query_heads,
                qk_norm=norm,
            )

        def write(rows: int) -> Callable[[], object]:
            key, value = (self.random(rows, shape.num_kv_heads, shape.head_dim) for _ in range(2))
            slots = self.distinct(num_blocks * BLOCK_SIZE, rows)
            return partial(write_kv, key, value, *caches, slots)

        row_bytes = 2 * shape.qkv_size * size + 2 * shape.head_dim * size + 16
        kv_bytes = 4 * shape.num_kv_heads * shape.head_dim * size + 8
        return [
            case
            for rows in self.rows
            for case in (
                Case(
                    name=f"rope_write_kv, {rows} rows",
                    make=partial(make, rows),
                    num_bytes=rows * row_bytes,
                ),
                Case(
                    name=f"write_kv, {rows} rows",
                    make=partial(write, rows),
                    num_bytes=rows * kv_bytes,
                ),
            )
        ]

    def moves(self) -> list[Case]:
        """An accepted path moved next to its prefix, in all layers."""
        shape = self.shape
        num_blocks = 64
        size = (shape.num_layers, 2, num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        cache = self.random(*size)
        slot_bytes = (
            shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
        )

        def make(moves: int) -> Callable[[], object]:
            slots = self.distinct(num_blocks * BLOCK_SIZE, 2 * moves)
            return partial(
                compact_kv, cache, slots[:moves].contiguous(), slots[moves:].contiguous()
            )

        return [
            Case(
                name=f"compact_kv, {moves} moves",
                make=partial(make, moves),
                num_bytes=2 * moves * slot_bytes,
            )
            for moves in (8, 256)
        ]

    # ---- products

    def products(self) -> list[Case]:
        """The deterministic mode's product against cuBLAS: weights are read once."""
        shape = self.shape
        sizes = {
            "qkv": (shape.hidden_size, shape.qkv_size),
            "gate and up": (shape.hidden_size, 2 * shape.intermediate_size),
            "down": (shape.intermediate_size, shape.hidden_size),
        }

        def make(name: str, rows: int, product: Callable[..., Tensor]) -> Callable[[], object]:
            in_features, out_features = sizes[name]
            weight = self.random(out_features, in_features) * in_features**-0.5
            return partial(product, self.random(rows, in_features), weight)

        return [
            Case(
                name=f"row_invariant_linear, {name}, {rows} rows",
                make=partial(make, name, rows, row_invariant_linear),
                peer=partial(make, name, rows, F.linear),
                num_bytes=(in_size * out_size + rows * (in_size + out_size)) * shape.dtype.itemsize,
                num_flops=2 * rows * in_size * out_size,
            )
            for name, (in_size, out_size) in sizes.items()
            for rows in self.rows
        ]

    def few_row_products(self) -> list[Case]:
        """A layer's products of few rows with norm, gate and addition, against one launch each."""
        shape = self.shape
        width, inner = shape.hidden_size, shape.intermediate_size
        attended = shape.num_query_heads * shape.head_dim
        parts: dict[str, tuple[int, int, bool, Activation | None]] = {
            "norm and qkv": (width, shape.qkv_size, True, None),
            "output, added": (attended, width, False, None),
            "norm, gate and up, gated": (width, 2 * inner, True, "silu"),
            "down, added": (inner, width, False, None),
        }

        def make(name: str, rows: int, *, is_peer: bool = False) -> Callable[[], object]:
            in_size, out_size, has_norm, activation = parts[name]
            weight = self.random(out_size, in_size) * in_size**-0.5
            x = self.random(rows, in_size) * 1e-3  # the residual grows with every call
            residual = self.random(rows, out_size)
            product = Linear(weight, pack=False)
            norm = RmsNorm(self.random(in_size), 1e-6) if has_norm else None
            half = HalfNormed(
                values=x,
                squares=torch.ones((1, FEW_ROWS), device=self.device),
                eps=1e-6,
            )
            scratch = SplitScratch(
                self.device, [split_shape(weight, is_gated=activation is not None)]
            )

            def joined() -> object:
                if norm is None:
                    split_k_add(x, product, scratch, residual)
                    return residual
                return split_k_linear(half, product, scratch, activation=activation)

            def separate() -> Tensor:
                result = product(x if norm is None else rms_norm(x, norm.weight, norm.eps))
                if activation is not None:
                    return gated_mul(result, activation)
                return result if has_norm else residual.add_(result)

            if is_peer:
                return separate
            return joined

        return [
            Case(
                name=f"split_k_linear, {name}, {rows} rows",
                make=partial(make, name, rows),
                peer=partial(make, name, rows, is_peer=True),
                num_bytes=(in_size * out_size + rows * (in_size + out_size)) * shape.dtype.itemsize,
                num_flops=2 * rows * in_size * out_size,
            )
            for name, (in_size, out_size, *_) in parts.items()
            for rows in (1, FEW_ROWS)
        ]

    def integer_products(self) -> list[Case]:
        """Weights of 8 and 4 bits with rows of 8 against cuBLAS in the model's type."""
        in_features, out_features = self.shape.hidden_size, 2 * self.shape.intermediate_size

        def weight() -> Tensor:
            return self.random(out_features, in_features) / math.sqrt(in_features)

        def make(rows: int, round_weight: Callable[[Tensor], QuantisedWeight]) -> partial[Tensor]:
            return partial(make_linear(round_weight(weight())), self.random(rows, in_features))

        def make_peer(rows: int) -> partial[Tensor]:
            return partial(F.linear, self.random(rows, in_features), weight())

        roundings: dict[int, Callable[[Tensor], QuantisedWeight]] = {
            8: rounded_to_int8,
            4: partial(rounded_to_int4, group_size=INT4_GROUP_SIZE),
        }
        return [
            Case(
                name=f"integer_linear, gate and up, {bits} bits, {rows} rows",
                make=partial(make, rows, round_weight),
                peer=partial(make_peer, rows),
                num_bytes=in_features * out_features * bits // 8
                + rows * (in_features + out_features) * self.shape.dtype.itemsize,
                num_flops=2 * rows * in_features * out_features,
            )
            for bits, round_weight in roundings.items()
            for rows in self.rows
        ]
