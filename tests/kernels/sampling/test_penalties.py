"""Penalties on single logits against the formula, one cell after the other."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.sampling.penalties import apply_penalties
from outrider.kernels.triton_support import KernelChoice, triton, use_kernels

pytestmark = pytest.mark.parametrize(
    "choice",
    [
        "reference",
        pytest.param(
            "triton", marks=pytest.mark.skipif(triton is None, reason="there is no triton")
        ),
    ],
)


@contextmanager
def kernels(choice: KernelChoice) -> Iterator[None]:
    """Run these; what is allocated without a value is not a number."""
    torch.use_deterministic_algorithms(choice == "triton")
    try:
        with use_kernels(choice):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


CHANGES = st.tuples(
    st.floats(-8.0, 8.0, width=32) | st.just(float("-inf")), st.sampled_from([1.0, 0.5, 1.3, 10.0])
)


def changed(logit: float, shift: float, factor: float) -> float:
    """The formula in float32."""
    x, f = torch.tensor(logit), torch.tensor(factor)
    return float((x / f if x > 0 else x * f) + torch.tensor(shift))


@pytest.mark.slow_cases
@settings(max_examples=30)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 40)),
    seed=st.integers(0, 2**32),
    changes=st.lists(CHANGES, max_size=30),
    overrides=st.lists(CHANGES, max_size=5),
    scales=st.booleans(),
)
def test_equals_the_formula(
    device: torch.device,
    choice: str,
    shape: tuple[int, int],
    seed: int,
    changes: list[tuple[float, float]],
    overrides: list[tuple[float, float]],
    scales: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(shape, generator=generator)
    logits[0, 0] = float("-inf")
    order = torch.randperm(shape[0] * shape[1], generator=generator)
    changes, overrides = changes[: len(order)], overrides[: len(order)]
    # the overriding cells are the first ones again
    cells = torch.cat((order[: len(changes)], order[: len(overrides)]))
    shifts, factors = torch.tensor([*changes, *overrides]).reshape(-1, 2).T.contiguous()
    expected = logits.clone().view(-1)
    for cell, (shift, factor) in zip(cells.tolist(), [*changes, *overrides], strict=True):
        expected[cell] = changed(float(logits.view(-1)[cell]), shift, factor if scales else 1.0)
    logits, cells, shifts, factors = (x.to(device) for x in (logits, cells, shifts, factors))
    with kernels(choice):
        apply_penalties(
            logits, cells, shifts, factors if scales else None, num_overrides=len(overrides)
        )
    torch.testing.assert_close(logits.view(-1).cpu(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("scales", [False, True])
def test_no_cells_no_change(device: torch.device, choice: str, scales: bool) -> None:
    logits = torch.randn(3, 7, device=device)
    before = logits.clone()
    empty = torch.zeros(0, device=device)
    with kernels(choice):
        apply_penalties(logits, empty.to(torch.int64), empty, empty if scales else None)
    assert torch.equal(logits, before)


def test_a_row_does_not_depend_on_the_others(device: torch.device, choice: str) -> None:
    """Bit for bit, also where another row brings factors or overrides along."""
    logits = torch.randn(4, 900, device=device)
    own = torch.randperm(900, device=device)[:300]
    shifts = torch.randn(300, device=device)
    alone = logits[2:3].clone()
    with kernels(choice):
        apply_penalties(alone, own, shifts)
    for num_overrides in (0, 7):
        other = 900 * 3 + torch.arange(num_overrides, device=device)
        together = logits.clone()
        cells = torch.cat((900 * 2 + own, 900 * 3 + torch.arange(500, device=device), other))
        factors = torch.ones(len(cells), device=device)
        factors[300:] = 1.7
        both = torch.cat((shifts, torch.randn(500 + num_overrides, device=device)))
        with kernels(choice):
            apply_penalties(together, cells, both, factors, num_overrides=num_overrides)
        assert torch.equal(together[2], alone[0])
        assert torch.equal(together[:2], logits[:2])
        assert not torch.equal(together[3], logits[3])
