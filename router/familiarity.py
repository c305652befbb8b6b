"""Is a prompt like those that a router was trained on? A distance to its training features.

A linear model says something about any text, also about one of which it knows no word. The distance
is the share of a prompt's n-grams (by the squares of their values, which sum to one a block) that
no training prompt had. Its limit is that of 99 in 100 training prompts, each against all others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from outrider.router.features import FeatureConfig, SparseVector, prompt_features

_WITHIN: Final = 0.99


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Familiarity:
    """What makes a prompt like those of the training."""

    known: NDArray[np.bool_]
    """The n-gram features that a training prompt had, [num_ngram_features]."""
    limit: float
    """From this distance on, a prompt is unlike the training's."""

    def __post_init__(self) -> None:
        """Raise ValueError for a limit outside [0, 1]."""
        if not 0.0 <= self.limit <= 1.0:
            raise ValueError(f"limit={self.limit} must be in [0, 1]")

    def distance(self, vector: SparseVector) -> float:
        """Return the share of a prompt that no training prompt had; 0 without n-grams."""
        return _share(vector, ~self.known)

    def is_unlike(self, vector: SparseVector) -> bool:
        """Return whether a prompt is unlike those of the training."""
        return self.distance(vector) > self.limit

    @property
    def packed(self) -> NDArray[np.uint64]:
        """Return the known features as bits, [num_ngram_features / 64] rounded up."""
        packed = np.packbits(self.known)
        padded = np.zeros(-(-len(self.known) // 64) * 8, dtype=np.uint8)
        padded[: len(packed)] = packed
        return padded.view("<u8").astype(np.uint64)

    @classmethod
    def unpacked(cls, packed: NDArray[Any], num_features: int, limit: float) -> Self:
        """Return it from its bits. Raises ValueError for bits of another number of features."""
        if packed.dtype != np.uint64 or packed.shape != (-(-num_features // 64),):
            raise ValueError("known_features are not a bit for each n-gram")
        bits = np.unpackbits(packed.astype("<u8").view(np.uint8), count=num_features)
        return cls(known=bits.astype(np.bool_), limit=limit)

    @classmethod
    def of(cls, prompts: Iterable[str], config: FeatureConfig) -> Self:
        """Learn it from the training prompts."""
        vectors = [prompt_features(prompt, config) for prompt in prompts]
        counts = np.zeros(num_ngrams(config), dtype=np.int64)
        for vector in vectors:
            counts[vector.indices[vector.indices < len(counts)]] += 1
        # Without the prompt itself, what it alone had is unknown.
        return cls(known=counts > 0, limit=_limit(vectors, counts < 2))


def num_ngrams(config: FeatureConfig) -> int:
    """Return the number of features that are n-grams; they come first."""
    return config.num_char_features + config.num_word_features


def _limit(vectors: Sequence[SparseVector], is_rare: NDArray[np.bool_]) -> float:
    distances = [_share(vector, is_rare) for vector in vectors]
    return float(np.quantile(distances, _WITHIN)) if distances else 1.0


def _share(vector: SparseVector, is_unknown: NDArray[np.bool_]) -> float:
    is_ngram = vector.indices < len(is_unknown)
    weights = vector.values[is_ngram] ** 2
    total = float(weights.sum())
    return float(weights[is_unknown[vector.indices[is_ngram]]].sum()) / total if total else 0.0
