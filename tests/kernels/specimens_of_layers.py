"""Launches of what layers are made of, but attention."""

from functools import partial

import torch

from outrider.kernels.experts.cut_tiles import cut_tiles
from outrider.kernels.experts.expert_mlp import ExpertMlp, ExpertWeights
from outrider.kernels.experts.grouped_mlp import ExpertStack, GateKind, grouped_mlp
from outrider.kernels.experts.route import Routed
from outrider.kernels.kv.compact_kv import compact_kv
from outrider.kernels.kv.rope_write_kv import rope_write_kv
from outrider.kernels.kv.write_kv import write_kv
from outrider.kernels.layers.embedding import embed_tokens
from outrider.kernels.layers.gated_mul import Activation, gated_mul
from outrider.kernels.layers.integer_linear import IntegerLinear
from outrider.kernels.layers.linear import Linear
from outrider.kernels.layers.lora import LoraPart, LoraWeights, TritonLoraRows
from outrider.kernels.layers.rms_norm import RmsNorm, add_rms_norm, rms_norm
from outrider.kernels.layers.rope import RopeConfig, RotaryTable, norm_and_rotate
from outrider.kernels.layers.row_invariant_linear import row_invariant_linear
from outrider.kernels.layers.split_k_linear import (
    FEW_ROWS,
    HalfNormed,
    SplitScratch,
    split_k_add,
    split_k_add_norm,
    split_k_linear,
    split_shape,
)
from outrider.kernels.layers.stored_linear import StoredLinear
from outrider.kernels.quantised.stored_weight import Number, StoredWeight
from outrider.kernels.quantised.weight import Bits, QuantisedWeight
from tests.kernels.specimen import (
    BF16,
    BLOCK_SIZE,
    FP16,
    FP32,
    HEADS,
    I32,
    NUM_ROWS,
    QWEN3_8B,
    VOCAB_SIZE,
    Heads,
    Specimen,
    integers,
)


def _rotary(heads: Heads) -> RotaryTable:
    config = RopeConfig(head_dim=heads.head_dim)
    return RotaryTable(config, max_positions=64, dtype=heads.dtype)


def _norm(heads: Heads, num_heads: int) -> RmsNorm | None:
    if not heads.has_norm:
        return None
    return RmsNorm(torch.empty(num_heads, heads.head_dim, dtype=heads.dtype), 1e-6)


def _rope_write(heads: Heads) -> None:
    num_heads = heads.num_query_heads + 2 * heads.num_kv_heads
    rope_write_kv(
        torch.empty(NUM_ROWS, num_heads, heads.head_dim, dtype=heads.dtype),
        integers(NUM_ROWS),
        integers(NUM_ROWS),
        _rotary(heads),
        *heads.cache(),
        num_query_heads=heads.num_query_heads,
        qk_norm=_norm(heads, heads.num_query_heads + heads.num_kv_heads),
        k_scale=heads.scales()[0],
        v_scale=heads.scales()[1],
    )


def _rope(heads: Heads) -> None:
    num_heads = heads.num_query_heads + heads.num_kv_heads
    rows = torch.empty(NUM_ROWS, num_heads, heads.head_dim, dtype=heads.dtype)
    norm_and_rotate(rows, integers(NUM_ROWS), _rotary(heads), norm=_norm(heads, num_heads))


def _write(heads: Heads) -> None:
    rows = torch.empty(NUM_ROWS, heads.num_kv_heads, heads.head_dim, dtype=heads.dtype)
    write_kv(rows, rows, *heads.cache(), integers(NUM_ROWS), *heads.scales())


def _compact(heads: Heads, num_moves: int) -> None:
    size = (36, 2, 64, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    cache = torch.empty(size, dtype=heads.kv_dtype or heads.dtype)
    scales = None if heads.kv_dtype is None else torch.empty(size[:-1])
    compact_kv(cache, integers(num_moves), integers(num_moves), scales)


def _norms(width: int, dtype: torch.dtype) -> None:
    rows, weight = torch.empty(NUM_ROWS, width, dtype=dtype), torch.empty(width, dtype=dtype)
    rms_norm(rows, weight, 1e-6)
    add_rms_norm(rows, torch.empty_like(rows), weight, 1e-6)


def _gated_mul(width: int, dtype: torch.dtype, activation: Activation) -> None:
    gated_mul(torch.empty(NUM_ROWS, 2 * width, dtype=dtype), activation)


def _linear(
    in_features: int, out_features: int, dtype: torch.dtype, *, has_bias: bool = False
) -> None:
    row_invariant_linear(
        torch.empty(NUM_ROWS, in_features, dtype=dtype),
        torch.empty(out_features, in_features, dtype=dtype),
        torch.empty(out_features, dtype=dtype) if has_bias else None,
    )


def _split_k_linear(
    in_features: int, out_features: int, dtype: torch.dtype, activation: Activation | None
) -> None:
    weight = torch.empty(out_features, in_features, dtype=dtype)
    bias = torch.empty(out_features, dtype=dtype) if activation == "gelu_tanh" else None
    product = Linear(weight, bias, pack=False)
    scratch = SplitScratch(weight.device, [split_shape(weight, is_gated=activation is not None)])
    x = torch.empty(FEW_ROWS, in_features, dtype=dtype)
    half = HalfNormed(values=x, squares=torch.empty(64, FEW_ROWS), eps=1e-6)
    split_k_linear(half, product, scratch, activation=activation)
    if activation is None:
        split_k_linear(x, product, scratch)
        stream = torch.empty(FEW_ROWS, out_features, dtype=dtype)
        norm = RmsNorm(torch.empty(out_features, dtype=dtype), 1e-6)
        split_k_add(x, product, scratch, stream)
        split_k_add_norm(x, product, scratch, stream, norm)


def _quantised(in_features: int, out_features: int, bits: Bits, group_size: int) -> QuantisedWeight:
    return QuantisedWeight(
        codes=torch.empty(out_features, in_features, dtype=torch.int8),
        scales=torch.empty(out_features, in_features // group_size),
        bits=bits,
        group_size=group_size,
    )


def _integer_linear(
    in_features: int, out_features: int, bits: Bits, group_size: int, num_rows: int
) -> None:
    weight = _quantised(in_features, out_features, bits, group_size)
    x = torch.empty(num_rows, in_features, dtype=BF16)
    IntegerLinear(weight, torch.empty(out_features, dtype=BF16))(x)


BITS: tuple[Bits, ...] = (8, 4)
_STORED: tuple[tuple[Number, tuple[int, int], bool], ...] = (
    ("int4", (32, 128), False),
    ("int4", (128, 32), True),
    ("int8", (5, 40), False),
    ("float8", (32, 128), False),
)


def _stored_linear(number: Number, groups: tuple[int, int], *, has_minimums: bool = False) -> None:
    out_features = 1024
    codes = torch.zeros(out_features, groups[0] * groups[1], dtype=torch.uint8)
    scales = torch.ones(out_features, groups[0])
    zeros = None
    if number != "float8":
        zeros = torch.arange(scales.numel(), dtype=torch.int16).view_as(scales)
    weight = StoredWeight(
        number=number,
        codes=codes,
        scales=scales,
        zeros=zeros,
        minimums=scales if has_minimums else None,
    )
    linear = StoredLinear(weight, torch.empty(out_features, dtype=BF16))
    linear(torch.empty(NUM_ROWS, codes.shape[1], dtype=BF16))


def _experts(gate: GateKind, dtype: torch.dtype, num_rows: int, *, has_bias: bool = False) -> None:
    width, inner, number = 2048, 768, 8
    stack = ExpertStack(
        gate_up=torch.empty(number, 2 * inner, width, dtype=dtype),
        down=torch.empty(number, width, inner, dtype=dtype),
        gate_up_bias=torch.empty(number, 2 * inner, dtype=dtype) if has_bias else None,
        down_bias=torch.empty(number, width, dtype=dtype) if has_bias else None,
    )
    routed = Routed(
        experts=torch.zeros(num_rows, 4, dtype=torch.int64), weights=torch.empty(num_rows, 4)
    )
    grouped_mlp(torch.empty(num_rows, width, dtype=dtype), routed, stack, gate=gate)


def _integer_experts(bits: Bits, num_rows: int) -> None:
    width, inner, number = 2048, 768, 8
    experts = [
        ExpertWeights(
            gate_up=_quantised(width, 2 * inner, bits, 64 if bits == 4 else width),
            down=_quantised(inner, width, bits, 64 if bits == 4 else inner),
            gate_up_bias=torch.empty(2 * inner, dtype=BF16),
            down_bias=torch.empty(width, dtype=BF16),
        )
        for _ in range(number)
    ]
    routed = Routed(
        experts=torch.zeros(num_rows, 4, dtype=torch.int64), weights=torch.empty(num_rows, 4)
    )
    ExpertMlp(experts)(torch.empty(num_rows, width, dtype=BF16), routed)


def _lora(width: int, columns: int, dtype: torch.dtype) -> None:
    part = LoraPart(
        a=torch.empty(16, width, dtype=dtype),
        b=torch.empty(16, columns, dtype=dtype),
        start=0,
        scale=2.0,
    )
    rows = TritonLoraRows([LoraWeights([[part]], digest="")], integers(NUM_ROWS, dtype=I32))
    rows.add(
        0, torch.empty(NUM_ROWS, width, dtype=dtype), torch.empty(NUM_ROWS, columns, dtype=dtype)
    )


LAYERS = (
    *(
        Specimen(stem=stem, name=heads.name, run=partial(run, heads), is_long=heads.is_long)
        for heads in HEADS
        for stem, run in (("rope_write_kv", _rope_write), ("rope", _rope), ("write_kv", _write))
    ),
    *(
        Specimen(
            stem="compact_kv", name=f"{heads.name}, {moves}", run=partial(_compact, heads, moves)
        )
        for heads in (QWEN3_8B, HEADS[2])
        for moves in (1, 16, 1000, 4096)
    ),
    *(
        Specimen(stem="rms_norm", name=f"{width}, {dtype}", run=partial(_norms, width, dtype))
        for width, dtype in ((4096, BF16), (1024, BF16), (896, FP16), (192, FP32))
    ),
    *(
        Specimen(
            stem="gated_mul",
            name=f"{activation}, {width}, {dtype}",
            run=partial(_gated_mul, width, dtype, activation),
        )
        for activation, width, dtype in (
            ("silu", 12288, BF16),
            ("silu", 3072, BF16),
            ("silu", 8960, FP16),
            ("silu", 512, FP32),
            ("gelu_tanh", 9216, BF16),
            ("gelu", 3072, BF16),
        )
    ),
    *(
        Specimen(
            stem="grouped_mlp",
            name=f"{gate}, {rows} rows, {dtype}",
            run=partial(_experts, gate, dtype, rows, has_bias=has_bias),
        )
        for gate, dtype, rows, has_bias in (
            ("silu", BF16, 8, False),
            ("silu", BF16, 1000, False),
            ("gelu_tanh", FP16, 8, False),
            ("clamped_swiglu", BF16, 8, True),
            ("silu", FP32, 8, False),
        )
    ),
    *(
        Specimen(
            stem="integer_experts",
            name=f"{bits} bits, {rows} rows",
            run=partial(_integer_experts, bits, rows),
        )
        for bits in BITS
        for rows in (8, 1000)
    ),
    *(
        Specimen(
            stem="cut_tiles",
            name=f"{rows} rows, {number} experts",
            run=partial(cut_tiles, torch.zeros(rows, 8, dtype=torch.int64), number, tile_rows),
        )
        for rows, number, tile_rows in ((1, 128, 16), (64, 8, 16), (4096, 60, 64), (64, 512, 16))
    ),
    Specimen(
        stem="embedding",
        name="Qwen3-8B",
        run=lambda: embed_tokens(torch.empty(VOCAB_SIZE, 4096, dtype=BF16), integers(NUM_ROWS)),
    ),
    *(
        Specimen(
            stem="row_invariant_linear", name=name, run=partial(_linear, *sizes, has_bias=has_bias)
        )
        for name, sizes, has_bias in (
            ("gate and up", (4096, 24576, BF16), False),
            ("narrow, bias", (1024, 2048, BF16), True),
            ("half precision", (4096, 4096, FP16), False),
            ("float32", (192, 512, FP32), False),
            ("odd sizes, bias", (200, 333, BF16), True),
        )
    ),
    *(
        Specimen(
            stem="split_k_linear",
            name=name,
            run=partial(_split_k_linear, *sizes, activation),
            is_long=name not in ("Qwen3-8B, gate and up", "odd sizes, bias"),
        )
        for name, sizes, activation in (
            ("Qwen3-8B, queries and keys", (4096, 6144, BF16), None),
            ("Qwen3-8B, gate and up", (4096, 24576, BF16), "silu"),
            ("Qwen3-8B, down", (12288, 4096, BF16), None),
            ("Qwen3-0.6B, gate and up", (1024, 6144, BF16), "silu"),
            ("Qwen3-0.6B, queries and keys", (1024, 4096, BF16), None),
            ("odd sizes, bias", (200, 666, BF16), "gelu_tanh"),
            ("float32", (192, 512, FP32), "silu"),
            ("float32, odd sizes", (200, 333, FP32), None),
        )
    ),
    *(
        Specimen(stem="lora", name=f"{sizes}, {dtype}", run=partial(_lora, *sizes, dtype))
        for sizes, dtype in (((4096, 6144), BF16), ((12288, 4096), FP16), ((192, 333), FP32))
    ),
    *(
        Specimen(
            stem="integer_linear",
            name=f"{bits} bits, {rows} rows, {width} columns",
            run=partial(_integer_linear, width, 1024, bits, group_size, rows),
        )
        for bits, group_size, width in ((8, 4096, 4096), (8, 200, 200), (4, 64, 4096), (4, 32, 224))
        for rows in (8, 64, 1000)
    ),
    *(
        Specimen(
            stem="stored_linear",
            name=f"{number}, groups {groups}, {has_minimums}",
            run=partial(_stored_linear, number, groups, has_minimums=has_minimums),
        )
        for number, groups, has_minimums in _STORED
    ),
)
