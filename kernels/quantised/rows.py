"""Activations in 8 bits: the other side of products whose sums are whole numbers.

A row is scaled by its own largest magnitude, so its numbers depend on no other row (Dettmers et
al., "LLM.int8()", 2022, vector-wise scales). With exact sums, neither does all that follows.
"""

import torch
from torch import Tensor

from outrider.kernels.quantised.weight import QuantisedWeight


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to 8 bits: (int8 [n, width], float32 scales [n, 1]).

    `x`: floats [n, width]. The scale of a row that holds a NaN or an infinity is NaN: its results
    are to be NaN.
    """
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True) if x.shape[1] else wide.new_zeros(len(x), 1)
    scales = largest / largest.new_full((1,), 127)  # on a GPU `/ 127` would be a product
    codes = (wide / scales).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)
    return codes, scales.masked_fill_(~largest.isfinite(), torch.nan)


def int8_linear_reference(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`x @ (weight * scales).T + bias` with the rows of x rounded to int8, to the bit.

    `x`: bfloat16 [n, in_features] -> bfloat16 [n, out_features]; `weight`: int8 [out_features,
    in_features]; `scales`: float32 [out_features]; `bias`: [out_features] or None. A row is scaled
    symmetrically by its largest magnitude; one that holds a NaN or an infinity becomes NaN.
    """
    rows, row_scales = int8_rows(x)
    # Sums of integers are exact in float64; each is rounded to float32 once, and none is -0.
    sums = (rows.double() @ weight.double().T).long().float()
    return scaled_sums(sums, scales, row_scales, bias)


def int4_linear_reference(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` with the rows of x rounded to int8, group after group, to the bit.

    `x`: bfloat16 [n, in_features] -> bfloat16 [n, out_features]; `weight`: of 4 bits, without zero
    points; `bias`: [out_features] or None. Rows as in `int8_linear_reference`.
    """
    if weight.bits != 4 or weight.zeros is not None:
        raise ValueError(f"a weight of {weight.bits} bits, or with zero points, is not one of 4")
    rows, row_scales = int8_rows(x)
    size = weight.group_size
    sums = x.new_zeros((len(x), weight.shape[0]), dtype=torch.float32)
    for group, scales in enumerate(weight.scales.T):
        columns = slice(group * size, (group + 1) * size)
        # 127 * 8 * group_size is far below 2^24, so that float32 holds every sum.
        part = rows[:, columns].float() @ weight.codes[:, columns].float().T
        sums += part * scales
    y = sums * row_scales
    if bias is not None:
        y = y + bias.float()
    return y.to(torch.bfloat16)


def scaled_sums(sums: Tensor, scales: Tensor, row_scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return bfloat16 results of float32 sums [n, out]: one order of roundings for every product.

    `scales`: float32 [out]; `row_scales`: float32 [n, 1].
    """
    y = sums * scales * row_scales
    if bias is not None:
        y = y + bias.float()
    return y.to(torch.bfloat16)
