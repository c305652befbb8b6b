"""Stored weights in Triton: the bits of the row-invariant product with the decoded ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.layers.row_invariant_linear import make_linear, row_invariant_linear
from outrider.kernels.layers.stored_linear import (
    StoredLinear,
    can_use_stored_tiles,
    stored_linear_reference,
)
from outrider.kernels.quantised.stored_weight import Number, StoredWeight
from outrider.kernels.triton_support import use_kernels
from tests.kernels.layers.bits import same_bits
from tests.kernels.quantised.stored_weights import random_stored
from tests.sizes import compiled_sizes, repeats

pytestmark = pytest.mark.usefixtures("triton_kernels", "equal_rows")


def random(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def check(weight: StoredWeight, x: Tensor, bias: Tensor | None) -> None:
    result = StoredLinear(weight, bias)(x)
    assert same_bits(result, row_invariant_linear(x, weight.decoded(), bias))
    expected = stored_linear_reference(x, weight, bias)
    torch.testing.assert_close(result.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@settings(max_examples=repeats(20, 10), deadline=None)
@given(
    number=st.sampled_from(["int4", "int8", "float8"]),
    out_features=compiled_sizes(range(1, 71), [33]),
    groups=compiled_sizes(
        [(3, 32), (1, 128), (5, 16), (2, 96), (3, 128), (4, 7)], [(3, 128), (4, 7)]
    ),
    num_rows=st.sampled_from([1, 3, 64, 70]),
    zeros=st.booleans(),
    minimums=st.booleans(),
    scale_dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    has_bias=st.booleans(),
)
def test_it_has_the_bits_of_the_decoded_product(  # noqa: PLR0913
    device: torch.device,
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
    ).to(device)
    bias = random(out_features).to(device) if has_bias else None
    check(weight, random(num_rows, weight.shape[1]).to(device), bias)


def test_every_code_of_float8_is_decoded(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 1)
    codes[(codes & 127) == 127] = 0
    scales = torch.tensor([[0.0123], [-64.0]])
    weight = StoredWeight(number="float8", codes=codes, scales=scales).to(device)
    check(weight, torch.eye(256).bfloat16().to(device), None)


@pytest.mark.slow
def test_a_row_has_the_same_bits_alone_and_in_any_company(device: torch.device) -> None:
    linear = StoredLinear(random_stored("int4", 40, 3, 64).to(device))
    rows = random(70, 192).to(device)
    everything = linear(rows)
    for count in (1, 2, 17, 65):
        assert same_bits(linear(rows[:count]), everything[:count])
    assert linear(rows[:0]).shape == (0, 40)


def test_it_is_what_runs_on_a_gpu(device: torch.device) -> None:
    weight = random_stored("int8", 8, 2, 32).to(device)
    assert can_use_stored_tiles(weight, device)
    assert type(make_linear(weight)) is StoredLinear
    huge = StoredWeight(number="float8", codes=weight.codes, scales=weight.scales * 1e9)
    assert not can_use_stored_tiles(huge, device)
    with use_kernels("reference"):
        assert not can_use_stored_tiles(weight, device)
