"""Sampled answers follow the target's own distribution: chi-square over sequences of three tokens.

A random model of seven tokens answers thousands of seeds; the first token comes from the prefill,
the three after it are judged in trees that a *different* random model drafts. Their joint
distribution is compared with the exact one, summed over the first token, which transformers'
models and logits processors give.
"""

import itertools
from collections.abc import Sequence as SequenceOf

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.draft.config import DraftConfig
from outrider.engine.core import Engine
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.coupled import CoupledVerifier
from outrider.verifier.params import SOURCES, Source
from outrider.verifier.token_tree import TokenTree
from outrider.verifier.verdict import Verdict
from tests.engines import make_engine, make_request, serve
from tests.laws.chi_square import PROMPT, VOCAB_SIZE, p_value, strangers
from tests.sizes import repeats

ALPHA = 1e-4
NUM_SEEDS = repeats(8000, 4000)

Sampling = dict[str, float]
PLAIN: Sampling = {"temperature": 1.0}
TRUNCATED: Sampling = {"temperature": 1.2, "top_k": 5, "top_p": 0.9}


@torch.inference_mode()
def exact_distribution(sampling: Sampling) -> NDArray[np.float64]:
    """P(second, third, fourth token), [7, 7, 7], by enumeration."""
    contexts = list(itertools.product(range(VOCAB_SIZE), repeat=3))
    batch = torch.tensor([[*PROMPT, *context] for context in contexts])
    logits = strangers().large_reference(batch).logits.float()[:, -4:]  # [343, 4, 7]
    steps = LogitsProcessorList([TemperatureLogitsWarper(sampling["temperature"])])
    if "top_k" in sampling:
        steps.append(TopKLogitsWarper(int(sampling["top_k"])))
        steps.append(TopPLogitsWarper(sampling["top_p"]))
    flat = steps(torch.zeros(1, 1, dtype=torch.int64), logits.reshape(-1, VOCAB_SIZE))
    probs = flat.softmax(-1).double().reshape(logits.shape)
    first_three = torch.ones(len(contexts), dtype=torch.float64)
    for position in range(3):
        chosen = batch[:, len(PROMPT) + position]
        first_three *= probs[torch.arange(len(contexts)), position, chosen]
    joint = first_three[:, None] * probs[:, 3]  # [343, 7]
    return joint.reshape((VOCAB_SIZE,) * 4).sum(0).numpy()


def draw(
    sampling: Sampling,
    verifier: CoupledVerifier | None = None,
    sources: tuple[Source, ...] = SOURCES,
) -> tuple[NDArray[np.int64], float]:
    """Counts of (second, third, fourth token), and accepted nodes per seed."""
    engine = make_engine(
        strangers(),
        draft=DraftConfig(max_branching=2, max_frontier=2, max_draft_depth=3, sources=sources),
        verifier=verifier,
        large_blocks=128,
        small_blocks=128,
    )
    return count(engine, sampling, NUM_SEEDS)


def count(engine: Engine, sampling: Sampling, num_seeds: int) -> tuple[NDArray[np.int64], float]:
    """What an engine answers to so many seeds, as `draw` gives it."""
    counts = np.zeros((VOCAB_SIZE,) * 3, dtype=np.int64)
    for start in range(0, num_seeds, 64):
        requests = [
            make_request(str(seed), PROMPT, max_tokens=4, seed=seed, **sampling)
            for seed in range(start, min(start + 64, num_seeds))
        ]
        for answer in serve(engine, requests).values():
            counts[tuple(answer.token_ids[1:])] += 1
    return counts, engine.stats().num_accepted_tokens / num_seeds


@pytest.mark.parametrize(
    "sampling",
    [PLAIN, pytest.param(TRUNCATED, marks=pytest.mark.slow)],
    ids=["plain", "truncated"],
)
def test_drafted_sequences_follow_the_target(sampling: Sampling) -> None:
    drawn, accepted = draw(sampling)
    assert accepted > 0.5  # trees, not plain decoding, made these sequences
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


class LenientVerifier(CoupledVerifier):
    """Accepts drafted tokens a little more often than it should."""

    def verify(
        self, sequences: SequenceOf[Sequence], trees: SequenceOf[TokenTree], logits: Tensor
    ) -> list[Verdict]:
        favoured = logits.clone()
        row = 0
        for tree in trees:
            for node, parent in enumerate(tree.parent_index[1:], start=1):
                favoured[row + parent, tree.token_ids[node]] += 0.5
            row += tree.num_nodes
        return super().verify(sequences, trees, favoured)


@pytest.mark.slow
def test_a_lenient_verifier_is_caught() -> None:
    # Trees of all sources hold nearly every token here, and who favours all favours none.
    drawn, _ = draw(PLAIN, LenientVerifier(), sources=("model",))
    assert p_value(drawn, exact_distribution(PLAIN)) < ALPHA
