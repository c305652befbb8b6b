import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import outrider.kernels.kv.compact_kv as module
from outrider.kernels.kv.compact_kv import compact_kv
from outrider.kernels.triton_support import KernelChoice, record_launches, use_kernels

BLOCK_SIZE = 4
NUM_SLOTS = 20

KINDS = st.sampled_from(["auto", "reference", "triton"])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn])


def make_cache(layers: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    shape = (layers, 2, NUM_SLOTS // BLOCK_SIZE, BLOCK_SIZE, heads, head_dim)
    return torch.randn(shape).to(dtype)


def moved(cache: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    """Return what it should become, one slot after the other."""
    before = cache.clone()
    result = cache.clone()
    for source, destination in pairs:
        if source >= 0:
            result[:, :, destination // BLOCK_SIZE, destination % BLOCK_SIZE] = before[
                :, :, source // BLOCK_SIZE, source % BLOCK_SIZE
            ]
    return result


def check(
    cache: Tensor, pairs: list[tuple[int, int]], kind: KernelChoice, device: torch.device
) -> None:
    scales = torch.randn(cache.shape[:-1]) if cache.dtype == torch.float8_e4m3fn else None
    expected = moved(cache, pairs).float()
    expected_scales = None if scales is None else moved(scales, pairs)
    slots = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    cache, slots = cache.to(device), slots.to(device)
    scales = None if scales is None else scales.to(device)
    with use_kernels(kind):
        compact_kv(cache, slots[:, 0].contiguous(), slots[:, 1].contiguous(), scales)
    assert torch.equal(cache.float().cpu(), expected)
    if scales is not None:
        assert torch.equal(scales.cpu(), expected_scales)  # type: ignore[arg-type]


@settings(max_examples=60)
@given(
    kind=KINDS,
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 2, 3, 8, 40]),
    dtype=DTYPES,
    dst=st.lists(st.integers(0, NUM_SLOTS - 1), max_size=NUM_SLOTS, unique=True),
    data=st.data(),
)
def test_moves_as_if_all_were_read_first(  # noqa: PLR0913
    device: torch.device,
    kind: str,
    layers: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    dst: list[int],
    data: st.DataObject,
) -> None:
    """Chains, cycles, copies of one slot, moves to itself; pairs of -1 in between."""
    src = data.draw(st.lists(st.integers(-1, NUM_SLOTS - 1), min_size=len(dst), max_size=len(dst)))
    pairs = [
        (source, destination if source >= 0 else -1)
        for source, destination in zip(src, dst, strict=True)
    ]
    check(make_cache(layers, heads, head_dim, dtype), pairs, kind, device)


@pytest.mark.parametrize("kind", ["auto", "reference", "triton"])
def test_a_pair_without_a_source_leaves_its_destination(device: torch.device, kind: str) -> None:
    check(make_cache(1, 1, 8, torch.float32), [(-1, 3), (5, 4), (-1, 0)], kind, device)


@pytest.mark.parametrize("num_moves", [15, 16, 17, 64, 65, 256, 257, 1024])
def test_cycles_of_any_length(device: torch.device, num_moves: int) -> None:
    """Every program tile, and rows of more than a tile."""
    head_dim = {16: 300, 64: 100, 256: 40}.get(num_moves, 10)
    cache = torch.randn(1, 2, num_moves, 1, 1, head_dim, device=device)
    dst = torch.randperm(num_moves, device=device)
    src = dst.roll(1)
    expected = cache.clone()
    expected[:, :, dst] = cache[:, :, src]
    with use_kernels("triton"):
        compact_kv(cache, src, dst)
    assert torch.equal(cache, expected)


@pytest.mark.slow
def test_very_many_moves_go_through_a_buffer(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the buffer holds two planes of six, and rows are more than a tile."""
    monkeypatch.setattr(module, "_MAX_MOVES_AT_ONCE", 15)
    monkeypatch.setattr(module, "_MAX_COPY_WORDS", 4)
    cache = torch.randn(3, 2, 4, 5, 2, 9, device=device)
    monkeypatch.setattr(module, "_MAX_BUFFER_BYTES", 2 * 17 * 2 * 9 * 4)
    dst = torch.randperm(20, device=device)[:17]
    src = dst.roll(1)
    src[3] = -1
    before = cache.clone().view(6, 20, -1)
    expected = before.clone()
    kept = src >= 0
    expected[:, dst[kept]] = before[:, src[kept]]
    with use_kernels("triton"):
        compact_kv(cache, src, dst)
    assert torch.equal(cache.view(6, 20, -1), expected)


def test_one_launch_for_all_layers() -> None:
    cache = torch.empty(36, 2, 8, 16, 8, 128, dtype=torch.bfloat16)
    slots = torch.arange(32)
    with record_launches(90) as launches:
        compact_kv(cache, slots, slots + 1)
    assert len(launches) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_slot_outside_the_cache_is_an_error(dtype: torch.dtype) -> None:
    cache = torch.zeros(1, 2, 2, 4, 1, 2).to(dtype)
    for src, dst in ((8, 0), (0, 8), (-2, 0), (0, -1)):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|DATA bounds|range)"):
            compact_kv(cache, torch.tensor([src]), torch.tensor([dst]))
