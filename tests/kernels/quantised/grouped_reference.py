"""Products of 8-bit rows with stored weights in torch, to the bit: the oracle of grouped.h."""

import torch
from torch import Tensor

from outrider.kernels.quantised.rows import int8_rows
from outrider.kernels.quantised.stored_weight import StoredWeight


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return `a * b + c` of float32 with one rounding.

    Float64 holds the product; its sum is rounded to odd, after which rounding it to float32 is
    right (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product, added = a.double() * b.double(), c.double()
    total = product + added
    part = total - product
    error = (product - (total - part)) + (added - part)
    is_inexact = error != 0
    is_too_large = is_inexact & ((error < 0) != (total < 0))
    bits = total.contiguous().view(torch.int64) - is_too_large.long()
    return (bits | is_inexact.long()).view(torch.float64).float()


def grouped_linear_reference(x: Tensor, weight: StoredWeight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` with each group of each row rounded to int8, group after group.

    `x`: bfloat16 [n, in_features] -> bfloat16 [n, out_features].
    """
    size, zeros = weight.group_size, weight.zeros
    assert zeros is not None
    sums = x.new_zeros((len(x), weight.shape[0]), dtype=torch.float32)
    for group, scales in enumerate(weight.scales.T):
        columns = slice(group * size, (group + 1) * size)
        rows, row_scales = int8_rows(x[:, columns])
        codes = weight.codes[:, columns].double() - zeros[:, group].double().unsqueeze(1)
        part = (rows.double() @ codes.T).float()
        sums = fused(part, scales * row_scales, sums)
        if weight.minimums is not None:
            totals = rows.double().sum(1, keepdim=True).float() * row_scales
            sums = fused(-weight.minimums[:, group], totals, sums)
    return (sums if bias is None else sums + bias.float()).to(torch.bfloat16)
