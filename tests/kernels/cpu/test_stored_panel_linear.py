"""Products with weights as they are stored have the bits of products with the decoded ones."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.cpu.grouped_panel_linear import GroupedPanelLinear
from outrider.kernels.cpu.panel_linear import PanelLinear
from outrider.kernels.cpu.product_library import InstructionSet, product_support
from outrider.kernels.cpu.stored_panel_linear import StoredPanelLinear, can_hold_stored
from outrider.kernels.layers import row_invariant_linear
from outrider.kernels.layers.row_invariant_linear import make_linear
from outrider.kernels.quantised.stored_weight import Number, StoredWeight
from outrider.kernels.triton_support import use_kernels
from tests.kernels.cpu.instruction_sets import each_instruction_set
from tests.kernels.layers.bits import same_bits, torch_threads
from tests.kernels.quantised.stored_weights import random_stored
from tests.sizes import repeats

pytestmark = pytest.mark.skipif(
    product_support().library is None, reason=f"compiled products: {product_support().detail}"
)


def random(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def both(
    weight: StoredWeight, instruction_set: InstructionSet, bias: Tensor | None = None
) -> tuple[StoredPanelLinear, PanelLinear]:
    """The product as it is stored, and the decoded one."""
    return (
        StoredPanelLinear(weight, bias, instruction_set=instruction_set),
        PanelLinear(weight.decoded(), bias, instruction_set=instruction_set),
    )


@each_instruction_set
@settings(max_examples=repeats(300, 60), deadline=None)
@given(
    number=st.sampled_from(["int4", "int8", "float8"]),
    out_features=st.sampled_from([1, 5, 31, 32, 33, 64, 97]),
    groups=st.sampled_from([(6, 4), (5, 16), (9, 32), (3, 128), (2, 320), (1, 1024)]),
    num_rows=st.sampled_from([1, 2, 3, 5, 7, 8, 9, 14, 16, 17, 33, 64, 65, 130]),
    zeros=st.booleans(),
    minimums=st.booleans(),
    scale_dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    has_bias=st.booleans(),
)
def test_it_is_the_decoded_product_to_the_bit(  # noqa: PLR0913
    instruction_set: InstructionSet,
    number: Number,
    out_features: int,
    groups: tuple[int, int],
    num_rows: int,
    zeros: bool,
    minimums: bool,
    scale_dtype: torch.dtype,
    has_bias: bool,
) -> None:
    weight = random_stored(
        number, out_features, *groups, zeros=zeros, minimums=minimums, scale_dtype=scale_dtype
    )
    bias = random(out_features) if has_bias else None
    stored, decoded = both(weight, instruction_set, bias)
    x = random(num_rows, weight.shape[1])
    assert same_bits(stored(x), decoded(x))


@each_instruction_set
@pytest.mark.parametrize("number", ["int4", "int8", "float8"])
def test_a_row_has_the_same_bits_alone_and_in_any_company(
    instruction_set: InstructionSet, number: Number
) -> None:
    linear = StoredPanelLinear(random_stored(number, 300, 9, 64), instruction_set=instruction_set)
    rows = random(150, 576)
    alone = torch.cat([linear(row) for row in rows.split(1)])
    for num_threads in (1, 2, 3):
        with torch_threads(num_threads):
            for count in (2, 7, 8, 64, 150):
                assert same_bits(linear(rows[:count]), alone[:count])


@each_instruction_set
def test_every_code_of_float8_is_decoded(instruction_set: InstructionSet) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 1)
    codes[(codes & 127) == 127] = 0
    scales = torch.tensor([[0.0123, 2.0**-90], [-64.0, 0.0]])
    weight = StoredWeight(number="float8", codes=codes, scales=scales)
    stored, decoded = both(weight, instruction_set)
    one_by_one = torch.eye(256).bfloat16()
    assert same_bits(stored(one_by_one), decoded(one_by_one))


@each_instruction_set
def test_extreme_scales_and_rows_are_the_decoded_product_s(instruction_set: InstructionSet) -> None:
    scales = torch.tensor([[2.0**-96, 2.0**96, 0.0, -(2.0**96)]]).repeat(33, 1)
    weight = replace(random_stored("int8", 33, 4, 32), scales=scales)
    stored, decoded = both(weight, instruction_set)
    x = random(9, 128)
    x[3, 7], x[4, 8], x[5] = math.inf, math.nan, 3e38
    assert same_bits(stored(x), decoded(x))


def test_panels_take_the_bits_of_codes_and_scales() -> None:
    for weight, num_bytes in (
        (random_stored("int4", 64, 4, 32, zeros=False), 64 * 128 // 2 + 64 * 4 * 2),
        (random_stored("int4", 64, 4, 32), 64 * 128 // 2 + 64 * 4 * 4),
        (random_stored("int8", 64, 4, 32, scale_dtype=torch.float32), 64 * 128 + 64 * 4 * 6),
        (random_stored("float8", 64, 4, 32), 64 * 128 + 64 * 4 * 4),
    ):
        assert StoredPanelLinear(weight).packed_bytes == weight.num_bytes == num_bytes


def test_no_rows_have_no_results() -> None:
    assert StoredPanelLinear(random_stored("int4", 40, 3, 32))(random(0, 96)).shape == (0, 40)


def test_without_compiled_kernels_the_weight_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_invariant_linear, "prefers_onednn", lambda: False)
    weight = random_stored("int4", 40, 3, 32)
    assert type(make_linear(weight, deterministic=True)) is GroupedPanelLinear
    kept = replace(weight, keeps_rows=True)
    assert type(make_linear(kept, deterministic=True)) is StoredPanelLinear
    with use_kernels("reference"):
        plain = make_linear(weight)
    assert not isinstance(plain, PanelLinear)


def test_where_onednn_is_better_whole_numbers_are_kept_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_invariant_linear, "prefers_onednn", lambda: True)
    weight = random_stored("int4", 40, 3, 32)
    assert type(make_linear(weight)) is GroupedPanelLinear
    assert not isinstance(make_linear(replace(weight, keeps_rows=True)), PanelLinear)
    assert not isinstance(make_linear(random_stored("float8", 40, 3, 32)), PanelLinear)


@pytest.mark.parametrize(
    "weight",
    [
        random_stored("int4", 8, 4, 6),
        replace(random_stored("int8", 8, 2, 32), scales=torch.full((8, 2), 2.0**-100)),
        replace(random_stored("int8", 8, 2, 32), minimums=torch.full((8, 2), math.nan)),
        replace(random_stored("float8", 8, 2, 32), scales=torch.full((8, 2), 65.0)),
        replace(random_stored("float8", 8, 1, 32), codes=torch.full((8, 32), 255).byte()),
    ],
    ids=["odd groups", "tiny", "no number", "huge", "NaN"],
)
def test_what_kernels_might_compute_differently_is_decoded(weight: StoredWeight) -> None:
    assert not can_hold_stored(weight)
    assert isinstance(make_linear(weight, deterministic=True), PanelLinear)
    with pytest.raises(ValueError, match="cannot be held in panels"):
        StoredPanelLinear(weight)
