import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.layers.lora import (
    MAX_PARTS,
    LoraPart,
    LoraRows,
    LoraWeights,
    TorchLoraRows,
    gather_lora,
)
from outrider.kernels.triton_support import KernelChoice, use_kernels

WIDTHS = st.sampled_from([1, 8, 33, 64, 200])
RANKS = st.sampled_from([1, 3, 8, 16, 21, 40])


def make_weights(
    ranks: list[int], width: int, sizes: list[int], dtype: torch.dtype, device: torch.device
) -> LoraWeights:
    """Two sites: nothing, and a part for each rank."""
    starts = itertools.accumulate(sizes, initial=0)
    parts = [
        LoraPart(
            a=(torch.randn(rank, width) / width**0.5).to(device, dtype),
            b=(torch.randn(rank, size) / rank**0.5).to(device, dtype),
            start=start,
            scale=0.5 + rank / 40,
        )
        for rank, size, start in zip(ranks, sizes, starts, strict=False)
        if rank
    ]
    return LoraWeights([[], parts], digest="")


def expected_sums(
    x: torch.Tensor, y: torch.Tensor, adapters: list[LoraWeights], slots: list[int]
) -> torch.Tensor:
    result = y.double()
    for row, slot in enumerate(slots):
        for part in adapters[slot].sites[1] if slot >= 0 else ():
            inner = part.a.double() @ x[row].double() * part.scale
            result[row, part.start : part.end] += inner @ part.b.double()
    return result


def gathered(adapters: list[LoraWeights], slots: list[int], kind: KernelChoice) -> LoraRows:
    with use_kernels(kind):
        found = gather_lora(adapters, slots)
    assert found is not None
    return found


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["auto", "reference"])
@given(data=st.data())
def test_each_row_gets_its_own_adapters_product(
    device: torch.device, kind: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    check_sums(device, kind, dtype, data)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=6)  # the interpreter runs program after program
@given(data=st.data())
def test_so_it_does_by_the_kernels(
    device: torch.device, dtype: torch.dtype, data: st.DataObject
) -> None:
    check_sums(device, "triton", dtype, data)


def check_sums(
    device: torch.device, kind: KernelChoice, dtype: torch.dtype, data: st.DataObject
) -> None:
    width, size = data.draw(WIDTHS), data.draw(WIDTHS)
    sizes = [size, 5, 17]
    adapters = [
        make_weights([data.draw(RANKS), data.draw(RANKS), 0], width, sizes, dtype, device)
        for _ in range(3)
    ]
    slots = [*data.draw(st.lists(st.integers(-1, 2), max_size=9)), 1]
    x = torch.randn(len(slots), width, device=device).to(dtype)
    y = torch.randn(len(slots), sum(sizes), device=device).to(dtype)
    expected = expected_sums(x, y, adapters, slots)
    rows = gathered(adapters, slots, kind)
    before = y.clone()
    with use_kernels(kind):
        rows.add(0, x, y)
        assert torch.equal(y, before), "a site without parts adds nothing"
        rows.add(1, x, y)
    tolerance = 1e-4 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(y[:, sum(sizes[:2]) :], before[:, sum(sizes[:2]) :])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [
    ("auto", torch.bfloat16), ("triton", torch.bfloat16), ("triton", torch.float32),
    ("auto", torch.float32),
])  # fmt: skip
def test_a_row_keeps_its_bits_in_any_company(
    device: torch.device, kind: KernelChoice, dtype: torch.dtype
) -> None:
    adapters = [make_weights([16, 7, 33], 72, [40, 24, 40], dtype, device) for _ in range(3)]
    slots = [0, 1, -1, 0, 2, 1, 0, 2, 0]
    x = torch.randn(len(slots), 72, device=device).to(dtype)
    y = torch.randn(len(slots), 104, device=device).to(dtype)
    with use_kernels(kind):
        together = gather_lora(adapters, slots, deterministic=True)
        assert together is not None
        result = y.clone()
        together.add(1, x, result)
        for row, slot in enumerate(slots):
            alone = y[row : row + 1].clone()
            own = gather_lora(adapters, [slot], deterministic=True)
            if own is not None:
                own.add(1, x[row : row + 1].clone(), alone)
            assert torch.equal(alone[0], result[row])
        some = torch.tensor([7, 2, 0], device=device)
        result = y.index_select(0, some)
        together.select(some).add(1, x.index_select(0, some), result)
        whole = y.clone()
        together.add(1, x, whole)
        assert torch.equal(result, whole.index_select(0, some))


def test_a_pass_without_adapters_is_none(device: torch.device) -> None:
    adapter = make_weights([4], 8, [8], torch.float32, device)
    assert gather_lora([adapter], [-1, -1]) is None
    assert gather_lora([], []) is None
    assert isinstance(gathered([adapter], [-1, 0], "reference"), TorchLoraRows)
    assert len(adapter.sites[1]) <= MAX_PARTS
    with pytest.raises(ValueError, match="without any product"):
        LoraWeights([[], []], digest="")
