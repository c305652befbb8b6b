"""A state folded from a state and rows is the recurrence's, and rows behind it go on from it."""

import pytest
import torch

from outrider.kernels.triton_support import KernelChoice, use_kernels
from tests.kernels.recurrent.growing_texts import Cached, Heads, random_inputs, recurrence


@pytest.mark.slow_cases
@pytest.mark.parametrize("choice", ["reference", "triton"])
@pytest.mark.parametrize("boundary", [1, 16, 19])
def test_rows_behind_a_fold_go_on(
    device: torch.device, choice: KernelChoice, boundary: int
) -> None:
    heads = Heads(num_groups=2, ratio=2, key_dim=24, value_dim=40)
    inputs = random_inputs(30, heads, seed=boundary)
    cached = Cached(inputs=inputs, num_rows=30, device=device)
    text = list(range(30))
    with use_kernels(choice):
        cached.run([[text[: row + 1] for row in text[:25]]])
        cached.fold(text[:boundary], text[boundary:25])
        cached.run([[text[: row + 1] for row in text[25:]]], state=1, base=boundary)
    _, state = recurrence(inputs, text[:boundary])
    torch.testing.assert_close(cached.states[1].double().cpu(), state, atol=2e-5, rtol=2e-4)
    right, _ = recurrence(inputs, text)
    torch.testing.assert_close(cached.output[29].double().cpu(), right, atol=2e-5, rtol=2e-4)
    assert not cached.states[0].any()
