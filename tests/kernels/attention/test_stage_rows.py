"""Device rows join a pass's inputs: the kernel does what the reference says, and no more."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.attention.stage_rows import (
    PassInputs,
    TreeRows,
    stage_rows,
    stage_rows_reference,
    tree_paths,
    tree_paths_reference,
)
from outrider.kernels.triton_support import triton, use_kernels

pytestmark = pytest.mark.skipif(triton is None, reason="there is no triton for this system")

POISON = -77
BLOCK_SIZE = 4


def random_words(count: int, num_words: int, generator: torch.Generator) -> torch.Tensor:
    """Random masks, of which the top bit of a word (a negative number) is set now and then."""
    bits = torch.rand((count, num_words * 64), generator=generator) < 0.15
    return (bits.view(count, num_words, 64).long() << torch.arange(64)).sum(-1)


def random_rows(
    counts: list[int], padding: list[int], num_words: int, seed: int
) -> tuple[TreeRows, list[list[int]]]:
    """Rows of sequences with gaps between them, and a block table for each."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, size: int) -> torch.Tensor:
        return torch.randint(0, high, (size,), generator=generator)

    starts, sequence_index, row = [], [], 0
    for sequence, (count, gap) in enumerate(zip(counts, padding, strict=True)):
        starts.append(row)
        sequence_index += [sequence] * (count + gap)
        row += count + gap
    tree_starts = integers(30, len(counts))
    index = torch.tensor(sequence_index, dtype=torch.int64)
    logical = tree_starts[index] + integers(40, row)
    logical[torch.rand(row, generator=generator) < 0.2] = -1
    for sequence, count in enumerate(counts):
        logical[starts[sequence] + count : starts[sequence] + count + padding[sequence]] = -1
    tables = [
        torch.randperm(500, generator=generator)[: 70 // BLOCK_SIZE + 1].tolist() for _ in counts
    ]
    rows = TreeRows(
        token_ids=torch.where(logical < 0, 10**12, integers(1000, row)),  # garbage in padding
        positions=torch.where(logical < 0, -5, integers(90, row)),
        logical_slots=logical,
        sequence_index=index,
        ancestor_words=random_words(row, num_words, generator),
        row_starts=torch.tensor(starts, dtype=torch.int32),
        num_rows=torch.tensor(counts, dtype=torch.int32),
        tree_starts=tree_starts.int(),
        kv_lens=integers(90, len(counts)).int(),
    )
    return rows, tables


def poisoned_inputs(num_rows: int, tables: list[list[int]], *, has_full: bool) -> PassInputs:
    """Inputs with room for more than the rows, all poison but the block tables."""
    num_rows, batch = num_rows + 5, len(tables) + 3

    def poison(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, POISON, dtype=dtype)

    words = poison(num_rows, 4, dtype=torch.int64)
    starts = [0]
    for table in tables:
        starts.append(starts[-1] + len(table))
    return PassInputs(
        token_ids=poison(num_rows, dtype=torch.int64),
        positions=poison(num_rows, dtype=torch.int64),
        slots=poison(num_rows, dtype=torch.int64),
        ancestor_words=words,
        full_words=poison(num_rows, 4, dtype=torch.int64) if has_full else words,
        row_begins=poison(num_rows),
        row_ends=poison(num_rows),
        row_tree_starts=poison(num_rows),
        row_starts=poison(batch),
        num_rows=poison(batch),
        kv_lens=poison(batch),
        first_keys=poison(batch),
        tree_starts=poison(batch),
        block_indptr=torch.tensor(starts + [0] * (batch - len(starts)), dtype=torch.int32),
        block_ids=torch.tensor([block for table in tables for block in table], dtype=torch.int32),
    )


def moved(thing: object, device: torch.device) -> object:
    """The same dataclass on a device; tensors that are one stay one."""
    copies = {
        id(getattr(thing, f.name)): getattr(thing, f.name).clone().to(device) for f in fields(thing)
    }
    return replace(thing, **{f.name: copies[id(getattr(thing, f.name))] for f in fields(thing)})  # type: ignore


@pytest.mark.slow
@settings(max_examples=25)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    num_words=st.integers(1, 4),
    window=st.sampled_from([None, 1, 3, 20, 300]),
    seed=st.integers(0, 1000),
)
def test_rows_of_the_device_join_the_inputs(
    counts: list[int], num_words: int, window: int | None, seed: int, device: torch.device
) -> None:
    padding = [(seed + index) % 3 for index in range(len(counts))]
    rows, tables = random_rows(counts, padding, num_words, seed)
    trims = window is not None and window < 256
    expected = poisoned_inputs(len(rows.token_ids), tables, has_full=trims)
    found = moved(expected, device)
    assert isinstance(found, PassInputs)
    stage_rows_reference(rows, expected, block_size=BLOCK_SIZE, window=window)
    with use_kernels("triton"):
        stage_rows(moved(rows, device), found, block_size=BLOCK_SIZE, window=window)  # type: ignore
    for part in fields(PassInputs):
        right, ours = getattr(expected, part.name), getattr(found, part.name).cpu()
        if part.name in ("row_starts", "num_rows"):
            assert (right[: len(counts)] != POISON).all()
        assert torch.equal(right, ours), part.name


def test_the_reference_says_what_is_meant() -> None:
    rows = TreeRows(
        token_ids=torch.tensor([7, 8, 9, 999]),
        positions=torch.tensor([10, 11, 12, 999]),
        logical_slots=torch.tensor([10, 11, 13, -1]),
        sequence_index=torch.tensor([1, 1, 1, 0]),
        ancestor_words=torch.tensor([[0b1], [0b11], [0b1011], [0b1]]),
        row_starts=torch.tensor([0, 0], dtype=torch.int32),
        num_rows=torch.tensor([0, 3], dtype=torch.int32),
        tree_starts=torch.tensor([3, 10], dtype=torch.int32),
        kv_lens=torch.tensor([4, 14], dtype=torch.int32),
    )
    inputs = poisoned_inputs(4, [[5], [6, 2, 9, 4]], has_full=True)
    stage_rows_reference(rows, inputs, block_size=BLOCK_SIZE, window=2)
    assert inputs.slots[:4].tolist() == [9 * 4 + 2, 9 * 4 + 3, 4 * 4 + 1, -1]
    assert inputs.token_ids[:4].tolist() == [7, 8, 9, 0]
    assert inputs.positions[:4].tolist() == [10, 11, 12, 0]
    assert inputs.row_begins[:3].tolist() == [9, 10, 11]
    assert inputs.row_ends[:3].tolist() == [10, 10, 10]
    assert inputs.ancestor_words[:4, 0].tolist() == [0b1, 0b11, 0b1010, 0]  # a window of 2
    assert inputs.full_words[:4, 0].tolist() == [0b1, 0b11, 0b1011, 0]
    assert inputs.first_keys[:2].tolist() == [2, 9]
    assert inputs.tree_starts[:2].tolist() == [3, 10]
    for part in fields(PassInputs):
        rest = getattr(inputs, part.name)
        if part.name not in ("block_indptr", "block_ids"):
            own = 2 if len(rest) == 5 else 4
            assert (rest[own:] == POISON).all(), part.name


@pytest.mark.slow
@settings(max_examples=20)
@given(count=st.integers(0, 12), seed=st.integers(0, 1000))
def test_paths_are_the_set_bits_in_order(count: int, seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)
    words = random_words(count, 4, generator)
    words[: count // 4] = 0
    words[count // 4 : count // 3] = -1  # all 256 nodes
    tree_starts = torch.randint(0, 10**6, (count,), generator=generator, dtype=torch.int32)
    paths = torch.full((count, 256), POISON, dtype=torch.int32, device=device)
    with use_kernels("triton"):
        tree_paths(words.to(device), tree_starts.to(device), paths)
    expected = torch.full_like(paths, POISON, device="cpu")
    tree_paths_reference(words, tree_starts, expected)
    assert torch.equal(paths.cpu(), expected)
    for row in range(count):
        mask = int.from_bytes(words[row].numpy().tobytes(), "little")
        slots = [int(tree_starts[row]) + bit for bit in range(256) if mask >> bit & 1]
        assert expected[row].tolist() == slots + [-1] * (256 - len(slots))
