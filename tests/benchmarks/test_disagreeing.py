"""Noise that makes a drafter disagree, and the counts that say how often it does."""

import torch

from benchmarks.shared.disagreeing import agreement_counts, noisy_weights
from benchmarks.shared.harness import DEMO_PAIR
from outrider.draft.training.pair_evaluation import Model

WEIGHTS = {
    "matrix.weight": torch.linspace(-2, 2, 64, dtype=torch.float32).view(8, 8),
    "norm.weight": torch.ones(8),
}


def test_noise_is_the_same_at_every_level_but_for_its_size_and_leaves_norms_alone() -> None:
    small, large = (noisy_weights(WEIGHTS, level, seed=3) for level in (0.25, 0.5))
    moved = small["matrix.weight"] - WEIGHTS["matrix.weight"]
    assert moved.abs().max() > 0.1
    torch.testing.assert_close(large["matrix.weight"] - WEIGHTS["matrix.weight"], 2 * moved)
    assert torch.equal(large["norm.weight"], WEIGHTS["norm.weight"])


def test_another_seed_is_another_drafter() -> None:
    first, second = (noisy_weights(WEIGHTS, 0.25, seed=seed) for seed in (0, 1))
    assert not torch.equal(first["matrix.weight"], second["matrix.weight"])


def test_counts_see_the_first_choice_the_best_four_and_only_the_answer() -> None:
    model = Model.load(DEMO_PAIR / "small", torch.device("cpu"))
    prompt = [1, 50, 60, 70]
    with torch.inference_mode():
        ranked = (
            model.network(input_ids=torch.tensor([prompt])).logits[0, -1].argsort(descending=True)
        )
    texts = [(4, [*prompt, int(ranked[rank])]) for rank in (0, 2, 9)]
    assert agreement_counts(model, texts) == (1, 2, 3)
