"""Stored weights stand for the numbers that they decode to, alone and together."""

import pytest
import torch

from outrider.kernels.quantised.stored_weight import StoredWeight, joined
from tests.kernels.quantised.stored_weights import random_stored


def test_decoding_computes_in_float32_and_rounds_once() -> None:
    weight = random_stored("int4", 6, 2, 8, minimums=True)
    assert weight.zeros is not None
    assert weight.minimums is not None
    for row, column in ((0, 0), (3, 7), (5, 15)):
        group = column // 8
        number = weight.codes[row, column].float() - weight.zeros[row, group]
        number = number * weight.scales[row, group] - weight.minimums[row, group]
        assert weight.decoded(torch.float32)[row, column] == number
        assert weight.decoded()[row, column] == number.bfloat16()


def test_weights_of_other_bits_and_groups_are_one_without_a_change() -> None:
    parts = [
        random_stored("int4", 3, 2, 32, minimums=True),
        random_stored("int8", 2, 4, 16),
        random_stored("int4", 1, 1, 64, zeros=False),
    ]
    together = joined(parts)
    assert together is not None
    assert (together.number, together.group_size) == ("int8", 16)
    assert torch.equal(together.decoded(), torch.cat([part.decoded() for part in parts]))
    alike = joined([parts[0], parts[0].rows(torch.tensor([2, 0]))])
    assert alike is not None
    assert (alike.number, alike.group_size) == ("int4", 32)
    assert torch.equal(alike.decoded()[3:], parts[0].decoded()[[2, 0]])


def test_what_has_no_common_form_is_not_one() -> None:
    assert joined([random_stored("int8", 3, 2, 32), random_stored("float8", 3, 2, 32)]) is None


def test_parts_that_do_not_fit_are_refused() -> None:
    weight = random_stored("int8", 4, 2, 8)
    codes, scales, zeros = weight.codes, weight.scales, weight.zeros
    with pytest.raises(ValueError, match="no matrix of uint8"):
        StoredWeight(number="int8", codes=codes.short(), scales=scales, zeros=zeros)
    with pytest.raises(ValueError, match=r"scales are \[3, 2\], not \[4, groups\]"):
        StoredWeight(number="int8", codes=codes, scales=scales[:3], zeros=zeros)
    with pytest.raises(ValueError, match="15 columns are no whole number of 2 groups"):
        StoredWeight(number="int8", codes=codes[:, 1:], scales=scales, zeros=zeros)
    with pytest.raises(ValueError, match=r"zeros are None for int8"):
        StoredWeight(number="int8", codes=codes, scales=scales)
    with pytest.raises(ValueError, match=r"minimums are \[4, 1\], not \[4, 2\]"):
        StoredWeight(number="int8", codes=codes, scales=scales, zeros=zeros, minimums=scales[:, :1])
