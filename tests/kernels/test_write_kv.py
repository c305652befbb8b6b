import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.write_kv import write_kv


@given(
    slots=st.lists(st.integers(0, 34), max_size=20, unique=True),
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 9),
)
def test_rows_land_in_their_slots_and_nowhere_else(
    slots: list[int], heads: int, head_dim: int
) -> None:
    caches = torch.zeros(2, 7, 5, heads, head_dim)
    rows = torch.randn(len(slots), 2, heads, head_dim)
    key, value = rows.unbind(1)  # strided, as the fused projection's halves are
    write_kv(key, value, caches[0], caches[1], torch.tensor(slots, dtype=torch.int64))
    expected = torch.zeros_like(caches)
    for row, slot in enumerate(slots):
        expected[0, slot // 5, slot % 5] = key[row]
        expected[1, slot // 5, slot % 5] = value[row]
    assert torch.equal(caches, expected)


def test_a_slot_outside_the_cache_is_an_error() -> None:
    caches = torch.zeros(2, 2, 4, 1, 2)
    row = torch.ones(1, 1, 2)
    with pytest.raises(IndexError):
        write_kv(row, row, caches[0], caches[1], torch.tensor([8]))
