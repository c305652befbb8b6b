"""Are labels what they say? Signs of swapped or poisoned ones, which no training can mend.

Two things cannot be by chance: that a dearer model is right less often than a cheaper one, and
that the small model is right less often where it is surer of its own words. Both are tested against
chance at three standard errors, so that a small file is not refused for a few odd rows.
"""

from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.router.dataset import LabelledPrompts
from outrider.router.features import FloatRows
from outrider.router.tier_labels import TierLabels

_MAX_Z: Final = 3.0
_SURPRISE_QUANTILE: Final = 0.05  # as the watch without a router scores an answer


def label_complaints(data: LabelledPrompts) -> list[str]:
    """Return what is wrong with the labels, one sentence each; none where nothing is."""
    if data.tiers is not None:
        return [_beats(data.tiers, *pair) for pair in beaten_tiers(data.tiers)]
    return [text for text in (_small_beats_large(data), _runs_against(data)) if text is not None]


def beaten_tiers(tiers: TierLabels) -> list[tuple[str, str]]:
    """Return each tier that is right less often than a cheaper one by more than chance, and that.

    A tier stands once, with the cheapest one that beats it.
    """
    labelled = [name for name in tiers.names if name in tiers.scores]
    beaten: dict[str, str] = {}
    for cheaper, dearer in combinations(labelled, 2):
        if _is_below(tiers.scores[dearer] - tiers.scores[cheaper]):
            beaten.setdefault(dearer, cheaper)
    return list(beaten.items())


def _beats(tiers: TierLabels, dearer: str, cheaper: str) -> str:
    means = [tiers.scores[name].mean() for name in (cheaper, dearer)]
    return (
        f"{cheaper} costs less than {dearer} and beats it ({means[0]:.3f} and {means[1]:.3f} of "
        f"their answers are right): are their columns swapped? Else {dearer} may be worth its "
        "price for some prompts only"
    )


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
