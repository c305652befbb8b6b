"""An estimate of both tiers' chances to be right, and the linear layer that every stage ends in."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.router.features import FloatRows
from outrider.router.worth import ExpectedTokens

# Probabilities nearer to 0 or 1 than these logits are not told apart by the later stages.
MAX_LOGIT: Final = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityEstimate:
    """Probabilities that each tier's answer is right. `large`: None if it was not labelled."""

    small: float
    large: float | None = None
    dearer: tuple[float, ...] = ()
    """The same of the tiers behind the large one, where there are more than two."""
    tokens: ExpectedTokens | None = None
    """Expected tokens of the prompt and its answers, where the router weighs costs."""

    @property
    def gain(self) -> float:
        """Expected gain by the large model, in [-1, 1]; without labels it is always right."""
        return (1.0 if self.large is None else self.large) - self.small

    @property
    def quality(self) -> float:
        """Predicted quality of the small answer, in [0, 1]: 1 if the large model adds nothing."""
        return min(1.0, 1.0 - self.gain)

    @property
    def logits(self) -> list[float]:
        """Return the next stage's inputs, [num_heads], in [-MAX_LOGIT, MAX_LOGIT]."""
        return [bounded_logit(probability) for probability in self.heads]

    @property
    def heads(self) -> list[float]:
        """Return the probabilities that there are, [num_heads]."""
        return [self.small] if self.large is None else [self.small, self.large, *self.dearer]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearStage:
    """A linear layer."""

    weight: FloatRows
    """[num_heads, num_inputs]."""
    bias: FloatRows
    """[num_heads]."""

    def __post_init__(self) -> None:
        """Raise ValueError unless the shapes agree and all values are finite."""
        if self.bias.ndim != 1 or self.weight.ndim != 2 or len(self.weight) != len(self.bias):
            raise ValueError(
                f"bias has shape {list(self.bias.shape)} and weight {list(self.weight.shape)}"
            )
        if not (np.isfinite(self.weight).all() and np.isfinite(self.bias).all()):
            raise ValueError("weights hold values that are not finite")

    @property
    def num_inputs(self) -> int:
        """The number of inputs."""
        return int(self.weight.shape[1])

    def estimate(self, inputs: FloatRows) -> QualityEstimate:
        """Turn inputs [num_inputs] into probabilities."""
        return estimate_of(self.weight @ inputs + self.bias)


def bounded_logit(probability: float) -> float:
    """log(p / (1 - p)), in [-MAX_LOGIT, MAX_LOGIT]."""
    if not 0.0 < probability < 1.0:
        return MAX_LOGIT if probability >= 1.0 else -MAX_LOGIT
    return max(-MAX_LOGIT, min(MAX_LOGIT, math.log(probability) - math.log1p(-probability)))


def estimate_of(logits: FloatRows) -> QualityEstimate:
    """Turn the heads' logits, [num_heads], into probabilities."""
    small, *others = (sigmoid(logit) for logit in logits.tolist())
    if not others:
        return QualityEstimate(small=small)
    return QualityEstimate(small=small, large=others[0], dearer=tuple(others[1:]))


def sigmoid(logit: float) -> float:
    """1 / (1 + exp(-logit))."""
    # Both branches keep the exponent negative: exp never overflows.
    if logit >= 0.0:
        return 1.0 / (1.0 + math.exp(-logit))
    grown = math.exp(logit)
    return grown / (1.0 + grown)
