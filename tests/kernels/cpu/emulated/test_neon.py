"""The library built for ARM, in an emulator: the references' bits, and AVX2's where sums are alike.

The emulator does not tell how fast anything is, and no ARM processor has run these kernels.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.engine.model.load import load_model
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.kernels.attention.row_plan import plan_row_keys
from outrider.kernels.cpu.grouped_panel_linear import GroupedPanelLinear, Int4PanelLinear
from outrider.kernels.cpu.panel_linear import Int8PanelLinear, PanelLinear
from outrider.kernels.cpu.product_library import InstructionSet, product_support
from outrider.kernels.cpu.row_attention import attend_rows
from outrider.kernels.cpu.stored_panel_linear import StoredPanelLinear
from outrider.kernels.quantised.rows import int4_linear_reference, int8_linear_reference
from outrider.kernels.quantised.stored_weight import Number
from outrider.kernels.quantised.weight import rounded_to_int4, rounded_to_int8
from outrider.kernels.sampling.gumbel_noise import gumbel_noise
from outrider.kernels.sampling.likeliest import likeliest_tokens
from outrider.kernels.sampling.truncation_floor import floor_on_host
from tests.engines import PAIR_FOLDER
from tests.kernels.attention.companies import company
from tests.kernels.attention.naive import naive_attention
from tests.kernels.layers.bits import same_bits
from tests.kernels.layers.test_compiled_rows import everything
from tests.kernels.quantised.grouped_reference import grouped_linear_reference
from tests.kernels.quantised.stored_weights import random_stored

pytestmark = pytest.mark.slow

# By the emulator's names. The last has all features there are.
PROCESSORS = {
    "cortex-a72": InstructionSet.NEON,
    "neoverse-n1": InstructionSet.NEON_DOT,
    "max": InstructionSet.NEON_BF16,
}
each_processor = pytest.mark.parametrize("processor", PROCESSORS)
Choose = Callable[[str], None]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@each_processor
def test_a_processor_runs_the_best_that_it_has(on_processor: Choose, processor: str) -> None:
    on_processor(processor)
    best = PROCESSORS[processor]
    assert product_support().instruction_set is best
    assert f"compiled, for {best.name} in" in product_support().detail  # which doctor shows
    library = product_support().library
    assert library is not None
    assert library.instruction_sets == {each for each in PROCESSORS.values() if each <= best}
    assert not library.has_matrix_tiles


def test_another_architecture_s_instruction_set_is_not_run(
    on_processor: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CPU", "avx2")
    on_processor("max")
    assert product_support().library is None
    assert "no instruction set that may be used" in product_support().detail


@each_processor
def test_products_of_whole_numbers_have_their_references_bits(
    on_processor: Choose, processor: str
) -> None:
    on_processor(processor)
    weight, bias, x = random(70, 96), random(70, seed=1), random(8, 96, seed=2)
    int8, int4 = rounded_to_int8(weight), rounded_to_int4(weight, group_size=32)
    expected = int8_linear_reference(x, int8.codes, int8.scales.flatten(), bias)
    assert same_bits(Int8PanelLinear(int8, bias)(x), expected)
    assert same_bits(Int4PanelLinear(int4, bias)(x), int4_linear_reference(x, int4, bias))
    extreme = torch.full((70, 96), -128, dtype=torch.int8)
    int8.codes.copy_(extreme)
    x[3:] = -1.0
    expected = int8_linear_reference(x, extreme, int8.scales.flatten(), None)
    assert same_bits(Int8PanelLinear(int8)(x), expected)


@each_processor
@pytest.mark.parametrize("number", ["int4", "int8"])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_grouped_products_have_their_references_bits(
    on_processor: Choose, processor: str, number: Number, scale_dtype: torch.dtype
) -> None:
    on_processor(processor)
    weight = random_stored(
        number, 97, 3, 40, zeros=True, minimums=scale_dtype != torch.bfloat16,
        scale_dtype=scale_dtype,
    )  # fmt: skip
    x = random(5, 120)
    result = GroupedPanelLinear(weight)(x)
    assert same_bits(result, grouped_linear_reference(x, weight))
    assert same_bits(GroupedPanelLinear(weight)(x[1:2]), result[1:2])


@each_processor
@pytest.mark.parametrize("number", ["int4", "int8", "float8"])
def test_stored_products_are_those_of_the_decoded_weight(
    on_processor: Choose, processor: str, number: Number
) -> None:
    on_processor(processor)
    for groups, rows in (((6, 4), 66), ((3, 320), 7)):
        weight = random_stored(
            number, 70, *groups, zeros=True, minimums=True, scale_dtype=torch.float16
        )
        x = random(rows, weight.shape[1])
        assert same_bits(StoredPanelLinear(weight)(x), PanelLinear(weight.decoded())(x))


@each_processor
def test_products_of_bfloat16_are_products_and_rows_keep_their_bits(
    on_processor: Choose, processor: str
) -> None:
    weight, bias, x = random(97, 517), random(97, seed=1), random(70, 517, seed=2)
    exact = x.double() @ weight.double().T + bias.double()
    on_processor(processor)
    linear = PanelLinear(weight, bias)
    result = linear(x)
    torch.testing.assert_close(
        result.double(), exact, rtol=2**-8, atol=1e-5 * 517**0.5, check_dtype=False
    )
    for rows in (1, 2, 5):
        assert same_bits(linear(x[:rows].contiguous()), result[:rows])


def attended() -> tuple[Tensor, Tensor]:
    """Attention of a company, and the same by its definition."""
    batch, caches, query = company(1), random(2, 900, 1, 2, 80), random(163, 6, 80, seed=1)
    sinks = 3 * torch.randn(6, generator=torch.Generator().manual_seed(2))
    keys = plan_row_keys(batch, block_size=1, window=40)
    result = attend_rows(query, *caches, keys, scale=0.7, softcap=20.0, sinks=sinks)
    return result, naive_attention(
        query, *caches, batch, scale=0.7, window=40, softcap=20.0, sinks=sinks
    )


@each_processor
def test_attention_is_its_definition(on_processor: Choose, processor: str) -> None:
    on_processor(processor)
    result, expected = attended()
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=2**-8 * 1.01)


def logits(folder: Path) -> Tensor:
    """The logits of a prompt's tokens and of two that follow, each in a pass of one call."""
    runner = ModelRunner(model=load_model(str(folder)), num_blocks=8, block_size=16)
    view = runner.new_view("")
    view.reserve(16)
    found = []
    for start, token_ids in ((0, [5, 6, 7]), (3, [9]), (4, [11])):
        piece = ForwardSlice(
            view=view, token_ids=token_ids, start_slot=start, num_logit_rows=len(token_ids)
        )
        found.append(runner.forward([piece]).logits.clone())
    return torch.cat(found)


def sampled() -> Tensor:
    """Noise, the likeliest tokens and the borders of what is truncated, of a few rows of scores."""
    scores = 5 * random(3, 1003, seed=8).float()
    top_k, cuts = torch.tensor([1003, 40, 1003]), torch.tensor([0.9, 1.0, 0.5])
    floors = floor_on_host(scores, top_k, cuts, cuts / 100)
    keys = torch.arange(6, dtype=torch.int32).view(3, 2)
    likeliest = likeliest_tokens(scores, 9)
    found = (likeliest.token_ids.float(), likeliest.probs)
    return torch.cat([gumbel_noise(keys, 1003), floors, *found], 1)


def everywhere() -> Sequence[Tensor]:
    """What has AVX2's bits: operations on rows, sampling, attention, products and passes."""
    support = product_support()
    linear = PanelLinear(random(97, 517), random(97, seed=1))
    return (
        everything(random(9, 192), support.instruction_set),
        sampled(),
        attended()[0],
        linear(random(5, 517, seed=2)),
        logits(PAIR_FOLDER / "small"),
    )


@each_processor
def test_where_sums_are_alike_the_bits_are_avx2s(
    on_processor: Choose, processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CPU", "avx2")
    product_support.cache_clear()
    if product_support().library is None:
        pytest.skip("this processor has no AVX2 to compare with")
    here = everywhere()
    monkeypatch.delenv("OUTRIDER_CPU")
    on_processor(processor)
    there = everywhere()
    for number, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        if number > 1 and PROCESSORS[processor] is InstructionSet.NEON_BF16:
            # Its products round otherwise.
            torch.testing.assert_close(theirs.float(), ours.float(), atol=0.05, rtol=0.05)
        else:
            assert same_bits(ours, theirs)
    monkeypatch.setenv("OUTRIDER_NUMERICS", "portable")
    product_support.cache_clear()
    assert all(same_bits(*both) for both in zip(here, everywhere(), strict=True))
