import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.compact_kv import compact_kv


@given(
    layers=st.integers(1, 3),
    dst=st.lists(st.integers(0, 19), max_size=12, unique=True),
    data=st.data(),
)
def test_moves_as_if_all_were_read_first(layers: int, dst: list[int], data: st.DataObject) -> None:
    src = data.draw(st.lists(st.integers(0, 19), min_size=len(dst), max_size=len(dst)))
    cache = torch.randn(layers, 2, 5, 4, 2, 3)
    before = cache.clone()
    expected = cache.clone()
    for source, destination in zip(src, dst, strict=True):
        expected[:, :, destination // 4, destination % 4] = before[:, :, source // 4, source % 4]
    compact_kv(cache, torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64))
    assert torch.equal(cache, expected)
