from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.kv.write_kv import quantise_fp8, write_kv
from outrider.kernels.triton_support import KernelChoice, use_kernels
from tests.sizes import compiled_sizes

BLOCK_SIZE = 5
NUM_BLOCKS = 7
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE

KINDS = st.sampled_from(["reference", "triton"])
SLOTS = st.lists(st.integers(0, NUM_SLOTS - 1), max_size=20, unique=True)


def make_rows(count: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values, strided as parts of a fused projection are."""
    projection = torch.randn(count, 2 * heads + 1, head_dim).to(dtype)
    return projection[:, 1 : heads + 1], projection[:, heads + 1 :]


def with_gaps(slots: list[int], data: st.DataObject) -> Tensor:
    """The slots with -1 for rows that have none, here and there."""
    places = data.draw(st.lists(st.integers(0, len(slots)), max_size=3))
    for place in places:
        slots = [*slots[:place], -1, *slots[place:]]
    return torch.tensor(slots, dtype=torch.int64)


@settings(max_examples=60)
@given(
    kind=KINDS,
    slots=SLOTS,
    heads=compiled_sizes(range(1, 12), [3, 11]),
    head_dim=compiled_sizes(range(1, 10), [7]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    data=st.data(),
)
def test_rows_land_in_their_slots_and_nowhere_else(
    device: torch.device,
    kind: KernelChoice,
    slots: list[int],
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    mapping = with_gaps(slots, data)
    caches = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, heads, head_dim), 77.0, dtype=dtype)
    key, value = make_rows(len(mapping), heads, head_dim, dtype)
    expected = caches.clone()
    for row, slot in enumerate(mapping.tolist()):
        if slot >= 0:
            expected[0, slot // BLOCK_SIZE, slot % BLOCK_SIZE] = key[row]
            expected[1, slot // BLOCK_SIZE, slot % BLOCK_SIZE] = value[row]
    written = caches.to(device)
    with use_kernels(kind):
        write_kv(key.to(device), value.to(device), written[0], written[1], mapping.to(device))
    assert torch.equal(written.cpu(), expected)


@pytest.mark.parametrize("slot", [8, -2])
def test_a_slot_outside_the_cache_is_an_error(slot: int) -> None:
    caches = torch.zeros(2, 2, 4, 1, 2)
    row = torch.ones(1, 1, 2)
    with pytest.raises(IndexError):
        write_kv(row, row, caches[0], caches[1], torch.tensor([slot]))


def test_a_kernel_writes_nothing_outside_the_cache(device: torch.device) -> None:
    memory = torch.zeros(4, 2, 4, 1, 2, device=device)
    row = torch.ones(4, 1, 2, device=device)
    slots = torch.tensor([8, -2, 9, -8], device=device)
    with use_kernels("triton"):
        write_kv(row, row, memory[1], memory[2], slots)
    assert not memory.any()


def nearest_fp8(exact: Fraction) -> float:
    """By the definition of e4m3: the nearest of all its values, of two as near the even one."""
    codes = torch.arange(127, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).double().tolist()
    distances = [abs(Fraction(value) - abs(exact)) for value in values]
    best = min(distances)
    nearest = [code for code, distance in enumerate(distances) if distance == best]
    code = next((code for code in nearest if code % 2 == 0), nearest[0])
    return -values[code] if exact < 0 else values[code]


@given(
    head=st.lists(st.floats(-500, 500, width=16, allow_subnormal=False), min_size=1, max_size=6),
    power=st.integers(-20, 5),
)
def test_quantised_heads_are_the_nearest_values(head: list[float], power: int) -> None:
    values = torch.tensor(head) * 2.0**power
    fp8, scale = quantise_fp8(values)
    largest = values.abs().max().item()
    assert scale.item() == pytest.approx(largest / 448 if largest else 1.0, rel=1e-6)
    for value, quantised in zip(values.tolist(), fp8.float().tolist(), strict=True):
        quotient = torch.tensor(value) / scale  # float32, as it is rounded
        assert quantised == nearest_fp8(Fraction(quotient.item()))


@pytest.mark.slow
@settings(max_examples=25)
@given(
    kind=KINDS,
    slots=SLOTS,
    heads=compiled_sizes(range(1, 10), [9]),
    head_dim=compiled_sizes([1, 7, 16, 64], [7, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    power=st.integers(-12, 6),
    data=st.data(),
)
def test_an_fp8_cache_gets_bits_and_scales(  # noqa: PLR0913
    device: torch.device,
    kind: KernelChoice,
    slots: list[int],
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    power: int,
    data: st.DataObject,
) -> None:
    mapping = with_gaps(slots, data)
    key, value = make_rows(len(mapping), heads, head_dim, dtype)
    # heads of all sizes: tiny beside large elements, zeros, and a head of zeros alone
    key, value = key * 2.0**power, value * torch.logspace(-6, 4, head_dim).to(dtype)
    value[:, 0] = 0
    caches = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, heads, head_dim), 0x55, dtype=torch.uint8)
    scales = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, heads), -3.0)
    expected, expected_scales = caches.clone(), scales.clone()
    for side, rows in enumerate((key, value)):
        fp8, scale = quantise_fp8(rows)
        for row, slot in enumerate(mapping.tolist()):
            if slot >= 0:
                place = side, slot // BLOCK_SIZE, slot % BLOCK_SIZE
                expected[place] = fp8[row].view(torch.uint8)
                expected_scales[place] = scale[row]
    written, written_scales = caches.to(device), scales.to(device)
    k_cache, v_cache = written.view(torch.float8_e4m3fn)
    with use_kernels(kind):
        write_kv(
            key.to(device),
            value.to(device),
            k_cache,
            v_cache,
            mapping.to(device),
            written_scales[0],
            written_scales[1],
        )
    assert torch.equal(written_scales.cpu(), expected_scales)
    assert torch.equal(written.cpu(), expected)


def test_every_rounding_of_fp8(device: torch.device) -> None:
    """All float16 values up to 448, in heads that begin with a 448, which makes their scale 1."""
    values = torch.arange(0, 0x5F01, dtype=torch.int16).view(torch.float16)
    values = torch.cat((values, -values)).float()  # up to 448
    heads = torch.nn.functional.pad(values, (0, -len(values) % 1023)).view(-1, 1023)
    row = torch.nn.functional.pad(heads, (1, 0), value=448.0)[None].to(device)  # [1, heads, 1024]
    caches = torch.zeros(2, 1, 1, *row.shape[1:], dtype=torch.float8_e4m3fn, device=device)
    scales = torch.zeros(2, 1, 1, row.shape[1], device=device)
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    with use_kernels("triton"):
        write_kv(row, row, caches[0], caches[1], slot, scales[0], scales[1])
    assert (scales == 1).all()
    expected = row.to(torch.float8_e4m3fn).view(torch.uint8)
    for cache in caches.view(torch.uint8):
        assert torch.equal(cache.view(row.shape), expected)


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1])  # the CPU's, a GPU's, a negative one
def test_nan_stays_nan(device: torch.device, kind: KernelChoice, bits: int) -> None:
    row = torch.tensor([[[1.0, 0.0, -2.0, 0.5]]])
    row.view(torch.int32)[..., 1] = bits
    row = row.to(device)
    caches = torch.zeros(2, 1, 1, 1, 4, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.ones(2, 1, 1, 1, device=device)
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    with use_kernels(kind):
        write_kv(row, row, caches[0], caches[1], slot, scales[0], scales[1])
    for cache in caches.float().view(2, 4).cpu():
        assert cache[1].isnan()


def test_an_almost_empty_head_becomes_zeros(device: torch.device) -> None:
    row = torch.tensor([[[1e-38, -1e-40, 0.0]]], device=device)
    for kind in ("reference", "triton"):
        caches = torch.ones(2, 1, 1, 1, 3, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.zeros(2, 1, 1, 1, device=device)
        slot = torch.zeros(1, dtype=torch.int64, device=device)
        with use_kernels(kind):
            write_kv(row, row, caches[0], caches[1], slot, scales[0], scales[1])
        assert (caches.float() == 0).all()
        assert (scales == 1).all()
