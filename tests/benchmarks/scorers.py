"""A scorer for the routing benchmarks."""

from dataclasses import replace

import numpy as np

from outrider.router.answer_features import num_answer_inputs
from outrider.router.estimates import LinearStage
from outrider.router.features import FeatureConfig
from outrider.router.scorer import RouterScorer

SIZES = FeatureConfig(num_char_features=16, num_word_features=16)


def make_scorer(hidden_size: int | None) -> RouterScorer:
    """A router that says one half of everything, with later stages or without."""
    scorer = RouterScorer(
        features=SIZES, weight=np.zeros((2, SIZES.num_features)), bias=np.zeros(2), threshold=0.5
    )
    if hidden_size is None:
        return scorer
    return replace(
        scorer,
        probe=LinearStage(weight=np.zeros((2, 2 + hidden_size)), bias=np.zeros(2)),
        answer=LinearStage(weight=np.zeros((2, num_answer_inputs(2))), bias=np.zeros(2)),
    )
