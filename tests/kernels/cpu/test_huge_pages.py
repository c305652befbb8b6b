import gc
from pathlib import Path

import pytest

from outrider.kernels.cpu import huge_pages
from outrider.kernels.cpu.huge_pages import HugePageMemory

pytestmark = pytest.mark.skipif(
    not huge_pages._IS_SUPPORTED, reason="this system has no huge pages to ask for"
)
MIB = 1 << 20


def test_pieces_are_aligned_and_do_not_overlap() -> None:
    memory = HugePageMemory()
    pieces = [memory.take(size) for size in (1, 100, 3 * MIB, 64, 20 * MIB, 15 * MIB, 15 * MIB)]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert [len(piece) for piece in pieces] == [
        1, 100, 3 * MIB, 64, 20 * MIB, 15 * MIB, 15 * MIB,
    ]  # fmt: skip
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        assert (piece == number).all()


def test_small_pieces_share_huge_pages() -> None:
    memory = HugePageMemory()
    first, second = memory.take(3 * MIB), memory.take(3 * MIB)
    assert first.data_ptr() % (2 * MIB) == 0
    assert second.data_ptr() == first.data_ptr() + 3 * MIB


@pytest.mark.slow
def test_memory_is_given_back_with_its_last_piece() -> None:
    def mapped_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4096

    before = mapped_bytes()
    piece = HugePageMemory().take(512 * MIB)
    assert mapped_bytes() - before > 500 * MIB
    del piece
    gc.collect()
    assert mapped_bytes() - before < 100 * MIB
