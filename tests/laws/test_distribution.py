"""Sampled answers follow the target's own distribution: chi-square over sequences of three tokens.

A random model of seven tokens answers thousands of seeds; the first token comes from the prefill,
the three after it are judged in trees that a *different* random model drafts. Their joint
distribution is compared with the exact one, summed over the first token, which transformers'
models and logits processors give.
"""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.laws.chi_square import (
    NARROW,
    Options,
    drafting,
    draw,
    exact_distribution,
    p_value,
    request_with,
)
from tests.laws.lenient import LenientVerifier
from tests.sizes import repeats

ALPHA = 1e-4
NUM_SEEDS = repeats(8000, 4000)

PLAIN: Options = {"temperature": 1.0}
TRUNCATED: Options = {"temperature": 1.2, "top_k": 5, "top_p": 0.9}


@pytest.mark.parametrize(
    "sampling",
    [PLAIN, pytest.param(TRUNCATED, marks=pytest.mark.slow)],
    ids=["plain", "truncated"],
)
def test_drafted_sequences_follow_the_target(sampling: Options) -> None:
    drawn = draw(drafting(), request_with(sampling), NUM_SEEDS)
    assert p_value(drawn, exact_distribution(sampling)) > ALPHA


def test_the_chi_square_test_can_fail() -> None:
    exact = exact_distribution(PLAIN)
    rng = np.random.default_rng(0)

    def p_of(probs: NDArray[np.float64]) -> float:
        drawn = rng.multinomial(NUM_SEEDS, probs.ravel() / probs.sum())
        return p_value(drawn.reshape(exact.shape), exact)

    assert p_of(exact) > ALPHA
    assert p_of(exact_distribution({"temperature": 1.15})) < ALPHA
    independent = np.einsum("i,j,k->ijk", exact.sum((1, 2)), exact.sum((0, 2)), exact.sum((0, 1)))
    assert p_of(independent) < ALPHA  # right at every position, wrong together
    assert p_of(exact.transpose(1, 0, 2)) < ALPHA


@pytest.mark.slow
def test_a_lenient_verifier_is_caught() -> None:
    # Trees of all sources hold nearly every token here, and who favours all favours none.
    engine = drafting(replace(NARROW, sources=("model",)), verifier=LenientVerifier())
    drawn = draw(engine, request_with(PLAIN), NUM_SEEDS)
    assert p_value(drawn, exact_distribution(PLAIN)) < ALPHA
