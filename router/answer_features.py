"""Features of the log-probabilities of an answer, or of its beginning: one small vector.

Quantiles rather than a mean, which is biased by length: one unsure token among a hundred sure ones
is the place where answers go wrong (Gupta et al., "Language Model Cascades: Token-level uncertainty
and beyond", ICLR 2024). They are taken of the *surprise*, the square root of the negative
log-probability, which separates 0.9 from 0.99 as well as 0.01 from 0.1.

Training and serving call the same functions. A call takes some tens of microseconds.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from outrider.router.features import FloatRows

ANSWER_FEATURE_VERSION: Final = 1
_QUANTILES: Final = np.array([0.0, 0.05, 0.1, 0.25, 0.5])
# Of so many of the least likely tokens the surprises are added up, in units that keep it small.
_NUM_WORST: Final = (2, 4, 8, 16)
# Negative log-probabilities of tokens with the chances 0.9, 0.7, 0.5, 0.25 and 0.05.
_LEVELS: Final = -np.log([0.9, 0.7, 0.5, 0.25, 0.05])
_LENGTHS: Final = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512])
_MAX_SURPRISAL: Final = 25.0

NUM_ANSWER_FEATURES: Final = (
    2 * len(_QUANTILES) + len(_NUM_WORST) + 2 * len(_LEVELS) + len(_LENGTHS) + 2
)


def answer_features(logprobs: Sequence[float] | FloatRows, *, is_whole: bool) -> FloatRows:
    """[NUM_ANSWER_FEATURES] of the log-probabilities [num_tokens] in the order of the answer.

    Any numbers are taken: what is above 0 counts as 0, what is below -25 or NaN as -25. Of no
    tokens at all everything but `is_whole` is 0.
    """
    result = np.zeros(NUM_ANSWER_FEATURES)
    result[-1] = is_whole
    num_tokens = len(logprobs)
    if not num_tokens:
        return result
    surprisal = -np.nan_to_num(np.asarray(logprobs, dtype=np.float64), nan=-np.inf)
    surprisal = np.clip(surprisal, 0.0, _MAX_SURPRISAL)
    worst_first = np.sort(surprisal)[::-1]
    surprise = np.sqrt(worst_first)
    # Quantiles by linear interpolation between neighbours; np.quantile takes ten times as long.
    place = _QUANTILES * (num_tokens - 1)
    below = place.astype(np.intp)
    above = np.minimum(below + 1, num_tokens - 1)
    quantiles = surprise[below] + (place - below) * (surprise[above] - surprise[below])
    sums = np.cumsum(surprise)
    num_unsure = np.searchsorted(-worst_first, -_LEVELS, side="left")  # surprisal above a level
    parts = (
        quantiles,
        quantiles**2,
        [sums[min(size, num_tokens) - 1] / size for size in _NUM_WORST],
        num_unsure / num_tokens,
        np.log1p(num_unsure),
        num_tokens >= _LENGTHS,
        [np.sqrt(surprisal[0])],
    )
    result[:-1] = np.concatenate(parts)
    return result


def answer_inputs(logits: Sequence[float] | FloatRows, features: FloatRows) -> FloatRows:
    """The input of the answer stage: (1, log length, whole) times (logits before, features).

    So a coefficient may change with the length of what was seen, as it must: the first token says
    little beside the prompt, a whole answer says more. [num_answer_inputs(len(logits))].
    """
    seen = np.concatenate((np.asarray(logits, dtype=np.float64), features))
    num_lengths = features[-2 - len(_LENGTHS) : -2].sum() / len(_LENGTHS)
    return np.concatenate((seen, num_lengths * seen, features[-1] * seen))


def num_answer_inputs(num_heads: int) -> int:
    """Return the length of `answer_inputs`."""
    return 3 * (num_heads + NUM_ANSWER_FEATURES)
