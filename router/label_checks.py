"""Are labels what they say? Signs of swapped or poisoned ones, which no training can mend.

Two things cannot be by chance: that the large model is right less often than the small one, and
that the small model is right less often where it is surer of its own words. Both are tested against
chance at three standard errors, so that a small file is not refused for a few odd rows.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.router.dataset import LabelledPrompts
from outrider.router.features import FloatRows

_MAX_Z: Final = 3.0
_SURPRISE_QUANTILE: Final = 0.05  # as the watch without a router scores an answer


def label_complaints(data: LabelledPrompts) -> list[str]:
    """Return what is wrong with the labels, one sentence each; none where nothing is."""
    return [text for text in (_small_beats_large(data), _runs_against(data)) if text is not None]


def _small_beats_large(data: LabelledPrompts) -> str | None:
    if data.strong is None:
        return None
    added = data.strong - data.weak
    if not _is_below(added):
        return None
    return (
        f"the small model beats the large one ({data.weak.mean():.3f} of its answers are right, "
        f"{data.strong.mean():.3f} of the large one's): are weak and strong swapped?"
    )


def _runs_against(data: LabelledPrompts) -> str | None:
    if data.logprobs is None:
        return None
    surest = np.array([_confidence(logprobs) for logprobs in data.logprobs])
    is_right = data.weak >= 0.5
    num_right, num_wrong = int(is_right.sum()), int((~is_right).sum())
    if not num_right or not num_wrong:
        return None
    area = _area(surest, is_right)
    # The deviation of a random order's area (Mann and Whitney, 1947).
    deviation = np.sqrt((num_right + num_wrong + 1) / (12.0 * num_right * num_wrong))
    if (area - 0.5) / deviation > -_MAX_Z:
        return None
    return (
        "the small model's confidence runs against weak_correct: it was surer of its wrong answers "
        f"than of its right ones in {1.0 - area:.0%} of all pairs; are the labels inverted?"
    )


def _is_below(values: FloatRows) -> bool:
    """Return whether the mean is below 0 by more than chance."""
    error = values.std() / len(values) ** 0.5
    return bool(values.mean() < -_MAX_Z * error) and len(values) > 1


def _confidence(logprobs: FloatRows) -> float:
    return float(np.quantile(logprobs, _SURPRISE_QUANTILE)) if len(logprobs) else 0.0


def _area(scores: FloatRows, is_right: NDArray[np.bool_]) -> float:
    """Return the share of pairs (right, wrong) with the higher score at the right one."""
    values, ranks = np.unique(scores, return_inverse=True)
    right = np.bincount(ranks[is_right], minlength=len(values))
    wrong = np.bincount(ranks[~is_right], minlength=len(values))
    below = np.cumsum(wrong) - wrong
    return float((right * (below + 0.5 * wrong)).sum() / (right.sum() * wrong.sum()))
