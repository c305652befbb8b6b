"""Stored weights of random numbers, for tests."""

import torch

from outrider.kernels.quantised.stored_weight import NUMBERS, Number, StoredWeight


def random_stored(  # noqa: PLR0913 - what there is of a weight
    number: Number,
    out_features: int,
    num_groups: int,
    group_size: int,
    *,
    zeros: bool = True,
    minimums: bool = False,
    scale_dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> StoredWeight:
    """zeros: of their own for each group; minimums: not for float8."""
    generator = torch.Generator().manual_seed(seed)
    shape = (out_features, num_groups * group_size)
    codes = torch.randint(0, 1 << NUMBERS[number], shape, generator=generator, dtype=torch.uint8)
    groups = (out_features, num_groups)
    scales = (torch.randn(groups, generator=generator) * 0.1).to(scale_dtype).float()
    if number == "float8":
        codes[(codes & 127) == 127] = 0
        return StoredWeight(number=number, codes=codes, scales=scales)
    each = torch.randint(0, 17, groups, generator=generator, dtype=torch.int16)
    return StoredWeight(
        number=number,
        codes=codes,
        scales=scales,
        zeros=each if zeros else torch.full_like(each, 8),
        minimums=scales.flip(0) * 4 if minimums else None,
    )
