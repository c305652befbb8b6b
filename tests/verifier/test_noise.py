"""The noise a sequence sees is a function of its key alone, whatever was asked for before."""

import random

import pytest
import torch

from outrider.kernels.sampling.gumbel_noise import gumbel_noise, row_key
from outrider.verifier.noise import SequenceNoise
from outrider.verifier.params import SamplingParams, Tier

CPU = torch.device("cpu")


def make_noise(
    tier: Tier = "large", *, seed: int = 4, choice_index: int = 0, vocab_size: int = 50
) -> SequenceNoise:
    sampling = SamplingParams(max_tokens=1, temperature=1.0, seed=seed, choice_index=choice_index)
    return SequenceNoise(sampling, tier, vocab_size=vocab_size)


def test_any_order_of_questions_gives_the_same_rows() -> None:
    rng = random.Random(0)
    noise = make_noise()
    everything = make_noise().rows(0, 120, CPU)
    assert everything.shape == (120, 50)
    for _ in range(200):  # forwards, backwards, overlapping, longer than what is kept
        first, count = rng.randrange(100), rng.choice([1, 1, 2, 5, 17, 20])
        assert torch.equal(noise.rows(first, count, CPU), everything[first : first + count])


def test_streams_are_the_documented_ones() -> None:
    for tier, choice_index, stream in (("small", 0, 0), ("large", 0, 1), ("small", 3, 6)):
        row = make_noise(tier, choice_index=choice_index).rows(7, 1, CPU)
        key = torch.tensor([row_key(4, stream, 7)], dtype=torch.int32)
        assert torch.equal(row, gumbel_noise(key, 50))


def test_choices_tiers_and_seeds_draw_apart() -> None:
    rows = [
        make_noise(tier, seed=seed, choice_index=choice).rows(7, 1, CPU)
        for tier in ("small", "large")
        for seed in (4, 5)
        for choice in range(4)
    ]
    for index, row in enumerate(rows):
        assert not any(torch.equal(row, other) for other in rows[:index])


def test_width_does_not_change_the_noise_of_a_token() -> None:
    narrow, wide = make_noise().rows(9, 3, CPU), make_noise(vocab_size=90).rows(9, 3, CPU)
    assert torch.equal(narrow, wide[:, :50])


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_seeds_of_64_bits_are_fine(seed: int) -> None:
    assert make_noise(seed=seed).rows(0, 1, CPU).isfinite().all()
