"""What labelled prompts like this one say: kernel ridge regression over stored embeddings.

Every training prompt speaks with a weight that falls with its distance, exp(sharpness * (cosine -
1)), less what its own neighbours say already: a nearest-neighbour vote that does not count a crowd
of like prompts many times. Embeddings are centred first; those of inner layers share a large part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from outrider.router.encoder.bert import Floats32
from outrider.router.features import FloatRows

# Chosen by the error of the held-out gain on the gold half of MMLU's labels (docs/router.md).
SHARPNESS: Final = 6.0
_RIDGE: Final = 2.0
# The weights' equations take the cube of it; a router's file holds an embedding of each.
MAX_ANCHORS: Final = 4096
_LEAST: Final = 0.02  # a share that so few neighbours can vouch for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Neighbours:
    """The training prompts that speak, and their words."""

    centre: Floats32
    """The mean embedding of the training, [dimension]."""
    anchors: Floats32
    """Centred, of norm 1: [num_anchors, dimension]."""
    coefficients: FloatRows
    """[num_anchors, num_heads]."""
    means: FloatRows
    """What is said far from all anchors: [num_heads]."""

    def __post_init__(self) -> None:
        """Raise ValueError for shapes that do not fit and values that are not finite."""
        shapes = (*self.anchors.shape, *self.coefficients.shape)
        expected = (len(self.anchors), len(self.centre), len(self.anchors), len(self.means))
        if shapes != expected or not 0 < len(self.anchors) <= MAX_ANCHORS:
            raise ValueError(f"neighbours have the shapes {shapes}, not {expected}")
        for values in (self.centre, self.anchors, self.coefficients, self.means):
            if not np.isfinite(values).all():
                raise ValueError("neighbours hold values that are not finite")

    @property
    def dimension(self) -> int:
        """The length of the embeddings."""
        return len(self.centre)

    def shares(self, embeddings: Floats32) -> FloatRows:
        """Return how often each tier is right near these [n, dimension]: [n, num_heads]."""
        kernel = _kernel(_directions(embeddings, self.centre), self.anchors)
        shares: FloatRows = np.clip(self.means + kernel @ self.coefficients, _LEAST, 1.0 - _LEAST)
        return shares

    @classmethod
    def of(cls, embeddings: Floats32, scores: Sequence[FloatRows], seed: int) -> Self:
        """Learn from embeddings [n, dimension] and each tier's scores [n].

        Of more than MAX_ANCHORS prompts a random part speaks.
        """
        rows = np.arange(len(embeddings))
        if len(rows) > MAX_ANCHORS:
            rows = np.sort(np.random.default_rng(seed).permutation(rows)[:MAX_ANCHORS])
        centre = embeddings[rows].mean(axis=0)
        anchors = _directions(embeddings[rows], centre)
        labels = np.stack([tier[rows] for tier in scores], axis=1)
        means = labels.mean(axis=0)
        kernel = _kernel(anchors, anchors)
        kernel[np.diag_indices_from(kernel)] += _RIDGE
        return cls(
            centre=centre,
            anchors=anchors,
            coefficients=np.linalg.solve(kernel, labels - means),
            means=means,
        )


def _directions(embeddings: Floats32, centre: Floats32) -> Floats32:
    """[n, dimension], of norm 1; a text at the centre itself keeps 0 and is far from all."""
    centred = embeddings - centre
    norms = np.linalg.norm(centred, axis=-1, keepdims=True)
    return np.asarray(centred / np.maximum(norms, 1e-6), dtype=np.float32)


def _kernel(some: Floats32, others: Floats32) -> FloatRows:
    cosines = (some @ others.T).astype(np.float64)
    kernel: FloatRows = np.exp(SHARPNESS * (cosines - 1.0))
    return kernel
