"""The masked chunk form is the recurrence, whatever tree and in whatever pieces."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.triton_support import KernelChoice, use_kernels
from tests.kernels.recurrent.growing_texts import Cached, Heads, random_inputs, recurrence
from tests.sizes import repeats

HEADS = st.builds(
    Heads,
    num_groups=st.sampled_from([1, 2]),
    ratio=st.sampled_from([1, 2, 3]),
    key_dim=st.sampled_from([16, 24]),
    value_dim=st.sampled_from([16, 40]),
)


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    """A chain and a tree behind it, as paths from row 0 to each row."""
    num_chain = draw(st.integers(0, 20))
    paths: list[list[int]] = []
    for row in range(num_chain + draw(st.integers(1, 12))):
        parent = row - 1 if row <= num_chain else draw(st.integers(max(num_chain - 1, 0), row - 1))
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths


def check(
    choice: KernelChoice,
    device: torch.device,
    *,
    heads: Heads,
    paths: list[list[int]],
    cuts: list[int],
    seed: int,
) -> None:
    inputs = random_inputs(len(paths), heads, seed=seed)
    cached = Cached(inputs=inputs, num_rows=len(paths), device=device)
    done = 0
    with use_kernels(choice):
        for count in [*cuts, len(paths)]:
            if piece := paths[done : done + count]:
                cached.run([piece])
            done += count
    output = cached.output.double().cpu()
    for path in paths:
        right, _ = recurrence(inputs, path)
        torch.testing.assert_close(output[path[-1]], right, atol=2e-5, rtol=2e-4)


CASES = {
    "heads": HEADS,
    "paths": trees(),
    "cuts": st.lists(st.integers(1, 9)),
    "seed": st.integers(0, 99),
}


@settings(max_examples=repeats(60, 20))
@given(**CASES)
def test_every_row_is_its_own_paths_recurrence(device: torch.device, **case: Any) -> None:
    check("reference", device, **case)


@pytest.mark.slow
@settings(max_examples=repeats(12, 4))
@given(**CASES)
def test_so_it_is_in_triton(device: torch.device, **case: Any) -> None:
    check("triton", device, **case)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["reference", "triton"])
def test_texts_of_several_lengths_share_a_batch(device: torch.device, choice: KernelChoice) -> None:
    heads = Heads(num_groups=2, ratio=2, key_dim=16, value_dim=24)
    inputs = random_inputs(40, heads, seed=3)
    cached = Cached(inputs=inputs, num_rows=40, device=device)
    texts = [list(range(begin, end)) for begin, end in ((0, 9), (9, 12), (12, 40))]
    with use_kernels(choice):
        for first, last in ((0, 3), (3, 99)):
            rows = [[text[: n + 1] for n in range(len(text))][first:last] for text in texts]
            cached.run([each for each in rows if each])
    output = cached.output.double().cpu()
    for text in texts:
        right, _ = recurrence(inputs, text)
        torch.testing.assert_close(output[text[-1]], right, atol=2e-5, rtol=2e-4)
