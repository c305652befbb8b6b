"""The mixture that a cascade samples from, by its definition."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.sampling.sample import log_target
from outrider.verifier.params import CascadeParams, SamplingParams

Floats = NDArray[np.float64]


MARGIN = 1e-5  # opt defers only where the large model leads by more (verifier/cascade.py)


def probs_of(logits: Tensor, sampling: SamplingParams) -> tuple[Floats, Floats]:
    """(what is sampled from, the distribution at temperature 1), straight from the definition."""
    plain = logits.double().softmax(-1).numpy()
    if sampling.is_greedy:
        return np.eye(len(plain))[int(logits.argmax())], plain
    scores = log_target(
        logits[None],
        torch.tensor([sampling.temperature]),
        torch.tensor([sampling.top_k]),
        torch.tensor([sampling.top_p]),
        torch.tensor([sampling.min_p]),
    )
    return scores[0].double().softmax(-1).numpy(), plain


def mixture(small: Tensor, large: Tensor, sampling: SamplingParams, own: CascadeParams) -> Floats:
    """pi of one position, token by token."""
    small_probs, small1 = probs_of(small, sampling)
    large_probs, large1 = probs_of(large, sampling)
    if own.rule == "opt":
        distance = sum(max(0.0, s - b) for s, b in zip(small_probs, large_probs, strict=True))
        defers = small1.max() < large1.max() - own.alpha * distance - MARGIN
        return large_probs if defers else small_probs
    rejected = [probability < (1 - own.alpha) * large1.max() for probability in large1]
    mass = sum(s for s, r in zip(small_probs, rejected, strict=True) if r)
    return np.array(
        [s * (not r) + b * mass for s, b, r in zip(small_probs, large_probs, rejected, strict=True)]
    )
