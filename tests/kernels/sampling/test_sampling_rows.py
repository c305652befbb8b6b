"""Rows gathered from a table, and what their packed words mean."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.sampling.sampling_rows import SamplingRows, SamplingTable, field_stride
from outrider.kernels.triton_support import KernelChoice, triton, use_kernels
from outrider.kernels.upload import upload

needs_triton = pytest.mark.skipif(triton is None, reason="there is no triton for this system")


def make_table(num_sequences: int, num_depths: int, device: torch.device) -> SamplingTable:
    generator = torch.Generator().manual_seed(num_sequences)
    keys = torch.randint(
        -(2**31), 2**31, (num_sequences, num_depths, 2), dtype=torch.int64, generator=generator
    )
    parameters = torch.rand(4, num_sequences, generator=generator)
    words = parameters.view(torch.int32)
    words[1] = torch.arange(num_sequences) + 3
    return SamplingTable(
        parameters=words.to(device),
        noise_keys=keys.to(torch.int32).to(device),
        has_sampled=True,
        has_truncation=False,
    )


@pytest.mark.slow_cases
@pytest.mark.parametrize("choice", ["reference", pytest.param("triton", marks=needs_triton)])
@settings(max_examples=20)
@given(
    nodes=st.lists(st.tuples(st.integers(-1, 6), st.integers(-1, 9)), max_size=300),
    num_sequences=st.integers(1, 6),
    num_depths=st.integers(1, 9),
)
def test_rows_are_the_tables(
    device: torch.device,
    choice: KernelChoice,
    nodes: list[tuple[int, int]],
    num_sequences: int,
    num_depths: int,
) -> None:
    table = make_table(num_sequences, num_depths, device)
    index = torch.tensor(nodes, dtype=torch.int64, device=device).reshape(-1, 2)
    torch.use_deterministic_algorithms(True)  # what is allocated is poisoned
    try:
        with use_kernels(choice):
            rows = table.rows(index[:, 0].contiguous(), index[:, 1].contiguous())
    finally:
        torch.use_deterministic_algorithms(False)
    assert rows.num_rows == len(nodes)
    assert rows.has_sampled
    assert not rows.has_truncation
    parameters, keys = table.parameters.cpu(), table.noise_keys.cpu()
    for row, (sequence, depth) in enumerate(nodes):
        sequence = min(max(sequence, 0), num_sequences - 1)
        depth = min(max(depth, 0), num_depths - 1)
        expected = parameters[:, sequence]
        assert rows.temperature[row].cpu() == expected.view(torch.float32)[0]
        assert int(rows.top_k[row]) == sequence + 3
        assert rows.top_p[row].cpu() == expected.view(torch.float32)[2]
        assert rows.min_p[row].cpu() == expected.view(torch.float32)[3]
        assert rows.noise_keys[row].tolist() == keys[sequence, depth].tolist()


@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 16])
def test_fields_are_aligned(num_rows: int) -> None:
    words = torch.arange(6 * field_stride(num_rows), dtype=torch.int32)
    rows = SamplingRows.of_words(words, num_rows, has_sampled=False, has_truncation=False)
    fields = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.noise_keys)
    assert [len(field) for field in fields] == [num_rows] * 5
    assert all(field.is_contiguous() for field in fields)
    offsets = [field.storage_offset() for field in fields]
    assert all(offset % 4 == 0 for offset in offsets)
    assert len(set(offsets)) == 5


def test_upload_keeps_shape_and_type(device: torch.device) -> None:
    for dtype in (torch.int32, torch.int64, torch.float32):
        for shape in ((0,), (3,), (2, 5)):
            values = torch.randn(shape).mul(100).to(dtype)
            there = upload(values.numpy(), device)
            assert there.device.type == device.type
            assert there.dtype == dtype
            assert torch.equal(there.cpu(), values)
