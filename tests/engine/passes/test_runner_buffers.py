"""Passes through step buffers and recorded passes compute what plain passes compute."""

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine.model.decoder import DecoderModel
from outrider.engine.passes.runner import ModelRunner, PassOutput
from outrider.kernels.triton_support import KernelChoice, triton, use_kernels
from tests.engine.passes.twins import (
    Piece,
    Twin,
    device_rows,
    make_twin,
    make_twins,
    poison,
    random_pass,
)
from tests.engines import PAIR_FOLDER, tiny_pair

# A plain model, one with a window, one with layers of both kinds.
ARCHITECTURES = ("llama3", "mistral", "qwen2-mixed-windows")


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """With Triton; numpy tells of numbers in padding rows that mean nothing."""
    needs = pytest.mark.skipif(triton is None, reason="there is no triton for this system")
    marked: Callable[..., None] = needs(pytest.mark.filterwarnings("ignore::RuntimeWarning")(test))
    return marked


@cache
def model_of(architecture: str) -> DecoderModel:
    if architecture in ("shipped", "deterministic"):
        return DecoderModel.load(
            str(PAIR_FOLDER / "small"),
            dtype="float32",
            deterministic=architecture == "deterministic",
        )
    return tiny_pair(architecture, num_layers=2).small


@cache
def lasting_twins(architecture: str, max_rows: int) -> tuple[Twin, Twin]:
    """Recording takes longer than what is tested."""
    return make_twins(model_of(architecture), max_rows=max_rows)


def twins_of(architecture: str, max_rows: int) -> tuple[Twin, Twin]:
    """With empty caches."""
    twins = lasting_twins(architecture, max_rows)
    for twin in twins:
        twin.reset()
    return twins


def assert_same_cache(plain: ModelRunner, staged: ModelRunner) -> None:
    """Nothing is written beside the rows' own slots."""
    torch.testing.assert_close(
        staged.kv_cache.groups[0].tensor, plain.kv_cache.groups[0].tensor, rtol=0, atol=2e-4
    )


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-4)


def run_both(
    plain: Twin, staged: Twin, pieces: list[Piece], choice: KernelChoice
) -> tuple[PassOutput, PassOutput]:
    with use_kernels("reference"):
        expected = plain.run(pieces)
    poison(staged.runner)
    with use_kernels(choice):
        found = staged.run(pieces)
    assert_close(found.logits, expected.logits)
    assert_close(found.hidden, expected.hidden)
    assert_same_cache(plain.runner, staged.runner)
    plain.advance(pieces)
    staged.advance(pieces)
    return expected, found


SIZES = st.lists(st.integers(1, 14), min_size=1, max_size=5)


@pytest.mark.slow_cases
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@settings(max_examples=10)
@given(first=SIZES, second=SIZES, num_trees=st.integers(0, 3), seed=st.integers(0, 999))
def test_passes_through_buffers_equal_plain_ones(
    architecture: str, first: list[int], second: list[int], num_trees: int, seed: int
) -> None:
    """Prompts, then a mix of rows and trees behind them; recorded or not, as their sizes fall."""
    model = model_of(architecture)
    rng = random.Random(seed)
    plain, staged = twins_of(architecture, 24)
    for sizes, trees in [(first, 0), (second, min(num_trees, len(second))), ([1] * len(second), 0)]:
        pieces = random_pass(rng, vocab_size=model.config.vocab_size, sizes=sizes, num_trees=trees)
        run_both(plain, staged, pieces, "reference")


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("architecture", "is_recorded"),
    [
        ("llama3", False),
        ("mistral", True),
        ("qwen2-mixed-windows", False),
        ("shipped", True),
        ("deterministic", True),
    ],
)
def test_staged_triton_passes_equal_plain_ones(architecture: str, is_recorded: bool) -> None:
    model = model_of(architecture)
    rng = random.Random(architecture)
    plain, staged = twins_of(architecture, 24 if is_recorded else 2)
    vocab_size = model.config.vocab_size
    prompts = random_pass(rng, vocab_size=vocab_size, sizes=[9, 4, 14], num_trees=0)
    run_both(plain, staged, prompts, "reference")
    mixed = random_pass(rng, vocab_size=vocab_size, sizes=[2, 1, 5], num_trees=1)
    run_both(plain, staged, mixed, "triton")


@pytest.mark.slow_cases
@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@settings(max_examples=8)
@given(
    sizes=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    num_behind=st.integers(0, 3),
    seed=st.integers(0, 999),
)
def test_rows_of_the_device_equal_the_same_trees_of_the_host(
    architecture: str, is_recorded: bool, sizes: list[int], num_behind: int, seed: int
) -> None:
    check_device_rows(architecture, "reference", is_recorded, sizes, num_behind, seed)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("architecture", "is_recorded"),
    [("llama3", True), ("mistral", False), ("shipped", True), ("deterministic", False)],
)
def test_staged_device_rows_with_triton_equal_plain_ones(
    architecture: str, is_recorded: bool
) -> None:
    check_device_rows(architecture, "triton", is_recorded, [4, 1], 2, seed=11)


def check_device_rows(
    architecture: str,
    choice: KernelChoice,
    is_recorded: bool,
    sizes: list[int],
    num_behind: int,
    seed: int,
) -> None:
    model = model_of(architecture)
    vocab_size = model.config.vocab_size
    rng = random.Random(seed)
    plain, staged = twins_of(architecture, 48 if is_recorded else 2)
    prompts = random_pass(rng, vocab_size=vocab_size, sizes=[9, 1, 12], num_trees=0)
    run_both(plain, staged, prompts, "reference")
    trees = random_pass(rng, vocab_size=vocab_size, sizes=sizes, num_trees=len(sizes))
    tokens = [rng.randrange(vocab_size) for _ in range(num_behind)]
    behind = [Piece(sequence=3, token_ids=tokens, num_logit_rows=1)] if tokens else []
    with use_kernels("reference"):
        expected = plain.run(trees + behind)
    rows, real = device_rows(staged, trees, rng)
    poison(staged.runner)
    with use_kernels(choice):
        found = staged.runner.forward([staged.slice_of(piece) for piece in behind], rows)
    total = rows.total_rows
    assert len(found.logits) == len(found.hidden) == total + len(behind)
    order = [*real, *range(total, total + len(behind))]
    assert_close(found.logits[order], expected.logits)
    assert_close(found.hidden[order], expected.hidden)
    assert_same_cache(plain.runner, staged.runner)


@pytest.mark.parametrize("num_words", [1, 4])
def test_on_the_cpu_rows_of_the_device_become_slices(num_words: int) -> None:
    """Without Triton and without recordings."""
    model = model_of("llama3")
    rng = random.Random(5)
    plain, other = make_twin(model), make_twin(model)
    prompts = random_pass(rng, vocab_size=131, sizes=[9, 1], num_trees=0)
    for twin in (plain, other):
        twin.run(prompts)
        twin.advance(prompts)
    trees = random_pass(rng, vocab_size=131, sizes=[4, 7], num_trees=2)
    behind = [Piece(sequence=2, token_ids=[3, 1, 4], num_logit_rows=2)]
    expected = plain.run(trees + behind)
    rows, real = device_rows(other, trees, rng, num_words=num_words)
    found = other.runner.forward([other.slice_of(piece) for piece in behind], rows)
    total = rows.total_rows
    assert total > 11, "no padding was drawn"
    order = [*real, total, total + 1]
    assert len(found.logits) == len(found.hidden) == total + 2
    assert torch.equal(found.logits[order], expected.logits)
    assert torch.equal(found.hidden[order], expected.hidden)
    assert not found.logits[[row for row in range(total) if row not in real]].any()
    assert_same_cache(plain.runner, other.runner)


@pytest.mark.parametrize("is_staged", [True, False])
def test_padding_alone_does_nothing(is_staged: bool) -> None:
    plain, staged = make_twins(model_of("llama3"))
    rng = random.Random(3)
    twin = staged if is_staged else plain
    rows, _ = device_rows(twin, random_pass(rng, vocab_size=131, sizes=[3, 2], num_trees=2), rng)
    rows.logical_slots.fill_(-1)
    found = twin.runner.forward([], rows)
    nothing = twin.runner.forward([])
    assert found.logits.shape == (rows.total_rows, 131)
    assert nothing.logits.shape == (0, 131)
    assert nothing.hidden.shape == (0, 64)
    assert not twin.runner.kv_cache.groups[0].tensor.any()
