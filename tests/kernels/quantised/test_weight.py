"""Weights in few bits: what they mean, how they are rounded, and which are refused."""

from typing import Any

import pytest
import torch

from outrider.kernels.quantised.weight import (
    QuantisedWeight,
    packed_nibbles,
    rounded_to_int4,
    rounded_to_int8,
    unpacked_nibbles,
)


def parts(**changes: Any) -> dict[str, Any]:
    sound = {
        "codes": torch.randint(-8, 8, (6, 64), dtype=torch.int8),
        "scales": torch.rand(6, 2),
        "bits": 4,
        "group_size": 32,
    }
    return sound | changes


def test_each_group_has_its_scale_and_zero() -> None:
    zeros = torch.randint(-2, 3, (6, 2)).float()
    weight = QuantisedWeight(**parts(zeros=zeros))
    expected = torch.empty(6, 64)
    for row in range(6):
        for column in range(64):
            group = column // 32
            code = weight.codes[row, column].float() - zeros[row, group]
            expected[row, column] = code * weight.scales[row, group]
    assert torch.equal(weight.dequantised(torch.float32), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": torch.zeros(6, 64)}, "no matrix of int8"),
        ({"codes": torch.zeros(64, dtype=torch.int8)}, "no matrix of int8"),
        ({"group_size": 48}, "groups of 48 do not divide 64 columns"),
        ({"group_size": 0}, "groups of 0"),
        ({"scales": torch.rand(6)}, r"scales are \[6\], not \[6, 2\]"),
        ({"zeros": torch.rand(6, 3)}, r"zeros are \[6, 3\], not \[6, 2\]"),
        ({"bits": 5}, "5 bits are not one of 4, 8"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantisedWeight(**parts(**changes))


def test_a_weight_of_8_bits_is_as_near_as_its_scale_allows() -> None:
    weight = torch.randn(40, 300).bfloat16()
    weight[3] = 0
    found = rounded_to_int8(weight)
    error = (found.dequantised(torch.float32) - weight.float()).abs()
    assert (error <= found.scales / 2 * 1.001).all()
    assert found.codes.abs().amax(1).tolist() == [0 if row == 3 else 127 for row in range(40)]


@pytest.mark.parametrize("group_size", [32, 64])
def test_a_weight_of_4_bits_is_nearer_than_by_the_largest_magnitude_alone(group_size: int) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3] = 0
    found = rounded_to_int4(weight, group_size=group_size)
    groups = weight.float().view(64, -1, group_size)
    scales = groups.abs().amax(-1, keepdim=True) / 7
    plain = (groups / scales).round().nan_to_num(0) * scales
    error = (found.dequantised(torch.float32) - weight.float()).norm()
    assert error < 0.88 * (plain.view(64, 256) - weight.float()).norm()
    assert found.codes.amin() >= -8
    assert found.codes.amax() <= 7
    assert not found.codes[3].any()
    assert torch.equal(found.scales.bfloat16().float(), found.scales)


def test_numbers_that_4_bits_hold_are_kept() -> None:
    codes = torch.randint(-8, 8, (40, 96), dtype=torch.int8)
    codes[:, ::32] = -8
    weight = (codes.float() * 0.25).bfloat16()
    assert torch.equal(rounded_to_int4(weight, group_size=32).dequantised(torch.bfloat16), weight)


def test_groups_that_do_not_divide_the_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 32 do not divide 40 columns"):
        rounded_to_int4(torch.randn(4, 40), group_size=32)


def test_nibbles_are_unpacked_as_they_were_packed() -> None:
    codes = torch.randint(-8, 8, (7, 64), dtype=torch.int8)
    packed = packed_nibbles(codes)
    assert (packed.dtype, packed.shape) == (torch.uint8, (7, 32))
    assert torch.equal(unpacked_nibbles(packed), codes)
