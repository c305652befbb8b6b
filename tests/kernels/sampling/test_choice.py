"""The chosen tokens are those of the scores and the noise worked out in full."""

import numpy as np
import pytest
import torch

from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.sampling.choice import (
    MASK_BITS,
    choose_allowed_tokens,
    choose_row_tokens,
)
from outrider.kernels.sampling.sample import perturb
from outrider.kernels.sampling.sampling_rows import SamplingRows
from outrider.kernels.triton_support import use_kernels

WIDTHS = (1, 5, 16, 17, 128, 130, 1000, 20_000)
CUTS = ((0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (40, 0.95, 0.01))
needs_library = pytest.mark.skipif(
    product_support().library is None, reason="needs the compiled library"
)


def sampling_rows(
    num_rows: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> SamplingRows:
    random = np.random.default_rng(seed)
    keys = random.integers(-(2**31), 2**31, (num_rows, 2), dtype=np.int32)
    return SamplingRows(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k, dtype=torch.int32),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), min_p),
        noise_keys=torch.from_numpy(keys),
        has_sampled=True,
        has_truncation=True,
    )


def greatest(logits: torch.Tensor, rows: SamplingRows) -> list[int]:
    """The places of the greatest scores, all of which are computed."""
    return [int(place) for place in perturb(logits, rows).numpy().argmax(-1)]


@pytest.mark.parametrize("temperature", [0.01, 0.8, 1.0, 50.0])
@pytest.mark.parametrize("cut", CUTS)
def test_a_token_is_that_of_all_scores(temperature: float, cut: tuple[int, float, float]) -> None:
    random = torch.Generator().manual_seed(1)
    for width in WIDTHS:
        for scale in (0.1, 3.0, 1000.0):
            logits = torch.randn(4, width, generator=random) * scale
            logits[1, 1::3] = -torch.inf
            rows = sampling_rows(4, temperature, *cut, seed=width)
            assert choose_row_tokens(logits, rows).tolist() == greatest(logits, rows)


def test_many_draws_are_those_of_all_scores() -> None:
    # One row's scores with very many keys: tokens that only great noise lifts are found, too.
    logits = torch.linspace(0.0, -16.0, 300).repeat(4000, 1)
    rows = sampling_rows(4000, 1.0)
    chosen = choose_row_tokens(logits, rows).tolist()
    assert chosen == greatest(logits, rows)
    assert max(chosen) > 100


def test_equal_scores_choose_the_first_of_the_greatest_noise() -> None:
    logits = torch.zeros(64, 333)
    rows = sampling_rows(64, 1.0)
    assert choose_row_tokens(logits, rows).tolist() == greatest(logits, rows)


def test_rows_with_and_without_a_temperature_go_together() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(2))
    rows = sampling_rows(6, 0.7)
    rows.temperature[::2] = 0.0
    chosen = choose_row_tokens(logits, rows)
    assert chosen.tolist() == greatest(logits, rows)
    assert chosen[::2].tolist() == logits[::2].argmax(-1).tolist()


def test_rows_of_a_larger_tensor_are_read_where_they_are() -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(3))[:, :650]
    rows = sampling_rows(3, 1.0)
    assert choose_row_tokens(logits, rows).tolist() == greatest(logits, rows)


@needs_library
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_what_is_not_finite_is_chosen(temperature: float) -> None:
    logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(4))
    logits[0, 150] = torch.nan
    logits[1, [30, 20]] = torch.inf
    logits[2, 10], logits[2, 50] = torch.inf, torch.nan
    logits[3] = -torch.inf
    logits[4, 199] = torch.nan
    rows = sampling_rows(5, temperature)
    assert choose_row_tokens(logits, rows).tolist() == [150, 20, 50, 0, 199]


@needs_library
def test_scores_that_overflow_choose_the_first_of_them() -> None:
    logits = torch.full((1, 64), 1.0)
    logits[0, [9, 40]] = 3e38
    assert choose_row_tokens(logits, sampling_rows(1, 0.5)).tolist() == [9]


@needs_library
def test_the_library_and_the_reference_choose_alike() -> None:
    # Their noise may differ in last bits, which decides nothing here.
    logits = torch.randn(32, 4096, generator=torch.Generator().manual_seed(5)) * 3
    rows = sampling_rows(32, 0.9, 50, 0.95)
    compiled = choose_row_tokens(logits, rows)
    with use_kernels("reference"):
        assert choose_row_tokens(logits, rows).tolist() == compiled.tolist()


@needs_library
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("cut", CUTS)
def test_a_mask_leaves_the_tokens_that_it_has_bits_for(
    temperature: float, cut: tuple[int, float, float]
) -> None:
    random = np.random.default_rng(6)
    for width in (3, 32, 33, 500, 4096):
        num_words = -(-width // MASK_BITS)
        masks = random.integers(-(2**31), 2**31, (5, num_words), dtype=np.int32)
        masks[1] = -1
        masks[2] &= random.integers(-(2**31), 2**31, num_words, dtype=np.int32)
        masks[3, : num_words // 2] = 0
        masks[:, -1] |= 1
        logits = torch.from_numpy(random.normal(size=(5, width)).astype(np.float32)) * 3
        logits[4, 1] = torch.nan
        masks[4, 0] &= ~2
        rows = sampling_rows(5, temperature, *cut, seed=width)
        allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :width]
        masked = logits.masked_fill(torch.from_numpy(allowed == 0), -torch.inf)
        chosen = choose_allowed_tokens(logits, rows, masks)
        assert chosen is not None
        assert chosen.tolist() == greatest(masked, rows)


@needs_library
def test_a_mask_that_leaves_nothing_is_not_decided_here() -> None:
    logits = torch.zeros(2, 40)
    logits[1, 8:] = -torch.inf
    masks = np.array([[-1, -1], [1 << 9, 1]], dtype=np.int32)
    assert choose_allowed_tokens(logits, sampling_rows(2, 1.0), masks) is None
