"""Tiles of experts: the kernel in the interpreter against the reference, and what a tile is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.experts.cut_tiles import ExpertTiles, cut_tiles, cut_tiles_reference
from outrider.kernels.triton_support import record_launches, use_kernels

NAMES = ("order", "expert", "start", "end")


def draw(num_rows: int, num_chosen: int, num_experts: int, seed: int) -> torch.Tensor:
    scores = torch.rand(num_rows, num_experts, generator=torch.Generator().manual_seed(seed))
    scores[:, num_experts // 2] += seed % 2  # one that every row wants
    return scores.topk(num_chosen).indices


def kernels_tiles(
    experts: torch.Tensor, num_experts: int, tile_rows: int, device: torch.device
) -> ExpertTiles:
    """The kernel's tiles, on the host."""
    with use_kernels("triton"):
        tiles = cut_tiles(experts.to(device), num_experts, tile_rows)
    return ExpertTiles(**{name: getattr(tiles, name).cpu() for name in NAMES})


def assert_cuts(tiles: ExpertTiles, experts: torch.Tensor, tile_rows: int) -> None:
    """Every pair is in one tile, of its own expert, with no more rows than a tile has."""
    pairs = experts.reshape(-1)
    found: list[int] = []
    for expert, start, end in zip(tiles.expert, tiles.start, tiles.end, strict=True):
        assert 0 <= end - start <= tile_rows
        own = tiles.order[start:end].tolist()
        assert (pairs[own] == expert).all()
        found += own
    assert sorted(found) == list(range(len(pairs)))


@pytest.mark.slow
@given(
    num_rows=st.sampled_from([0, 1, 7, 40]),
    shape=st.sampled_from([(1, 1), (2, 5), (8, 12)]),
    tile_rows=st.sampled_from([16, 64]),
    seed=st.integers(0, 9),
)
@settings(max_examples=12)
def test_the_kernel_cuts_as_the_reference_does(
    device: torch.device, num_rows: int, shape: tuple[int, int], tile_rows: int, seed: int
) -> None:
    experts = draw(num_rows, *shape, seed)
    expected = cut_tiles_reference(experts, shape[1], tile_rows)
    assert_cuts(expected, experts, tile_rows)
    tiles = kernels_tiles(experts, shape[1], tile_rows, device)
    for name in NAMES:
        left, right = getattr(tiles, name), getattr(expected, name)
        assert left.dtype == right.dtype == torch.int32
        assert torch.equal(left, right), name


@pytest.mark.slow
def test_more_pairs_than_a_program_holds_at_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_COUNTED", 128), ("_SORTED_PAIRS", 16), ("_FILLED_TILES", 2)):
        monkeypatch.setattr(f"outrider.kernels.experts.cut_tiles.{name}", value)
    experts = draw(90, 3, 8, 1)
    tiles = kernels_tiles(experts, 8, 4, device)
    expected = cut_tiles_reference(experts, 8, 4)
    assert all(torch.equal(getattr(tiles, name), getattr(expected, name)) for name in NAMES)


def test_a_choice_is_cut_in_one_launch() -> None:
    with record_launches(90) as launches:
        cut_tiles(draw(64, 8, 128, 0), 128, 16)
    assert len(launches) == 1
