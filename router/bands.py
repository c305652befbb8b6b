"""Bands of text qualities within which the small model begins under watch: how wide they are.

Without costs a band is as narrow as the data allow: outside it the last stage would overrule the
text for fewer than 1 % of all prompts on each side. With costs an answer is begun where its
expected value pays for the tokens that are held.
"""

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.router.features import FloatRows

# Above every quality, which is clipped at 1: the large model answers all.
ALWAYS_LARGE: Final = 1.01
_MAX_OVERRULED: Final = 0.01  # of all prompts, on each side of the band


class Bands(Protocol):
    """Finds the band of a threshold."""

    def around(self, threshold: float) -> tuple[float, float]:
        """(low, high); equal where the text alone decides."""


def cuts_below(values: FloatRows) -> FloatRows:
    """A cut under each of the ascending values, 0 under the first.

    In the middle between neighbours, where qualities that come later are least likely to fall on
    the wrong side.
    """
    middle = values[:-1] + (values[1:] - values[:-1]) / 2
    return np.append(0.0, np.where(middle > values[:-1], middle, values[1:]))


class _Cuts:
    """Prompts by rising text quality and the cuts between groups of equal ones."""

    def __init__(self, text: FloatRows) -> None:
        self.order = np.argsort(text, kind="stable")
        values, starts = np.unique(text[self.order], return_index=True)
        # All prompts from starts[i] on are above the cut.
        self.starts = np.append(starts, len(text))
        self.values = np.append(cuts_below(values), ALWAYS_LARGE)

    def before(self, amounts: FloatRows | NDArray[np.bool_]) -> FloatRows:
        """The sum of ordered amounts below each cut, [num_cuts]."""
        sums: FloatRows = np.append(0.0, np.cumsum(amounts))[self.starts]
        return sums


class OverruledBands:
    """Bands by how seldom they are missed: `text` and `last` are clipped qualities, [num_prompts].

    Implements `Bands`.
    """

    def __init__(self, text: FloatRows, last: FloatRows) -> None:
        self._cuts = _Cuts(text)
        self._last = last[self._cuts.order]

    def around(self, threshold: float) -> tuple[float, float]:
        """(low, high); equal where the text alone decides within the bounds."""
        stands = self._last >= threshold
        num_stand_below = self._cuts.before(stands)
        num_fall_above = (~stands).sum() - self._cuts.before(~stands)
        allowed = _MAX_OVERRULED * len(stands)
        # The highest cut with few enough that would stand below it, the lowest the other way round.
        low = int(np.flatnonzero(num_stand_below < allowed)[-1])
        high = int(np.flatnonzero(num_fall_above < allowed)[0])
        if low > high:
            # Any cut in between serves: the one that is overruled least.
            overruled = (num_stand_below + num_fall_above)[high : low + 1]
            low = high = high + int(np.argmin(overruled))
        return float(self._cuts.values[low]), float(self._cuts.values[high])


class PaidBands:
    """Bands by expected value: gain less cost, at the exchange rate that a threshold stands for.

    A threshold of 1 - p asks for the gain p of each `reference` of cost. Gains are those that the
    last stage expects, so no label decides. Implements `Bands`.
    """

    def __init__(
        self,
        text: FloatRows,
        last: FloatRows,
        *,
        gains: FloatRows,
        small: FloatRows,
        large: FloatRows,
        begun: FloatRows,
        reference: float,
    ) -> None:
        """All [num_prompts]. `text`, `last`: clipped qualities for the cost; `gains`: plain ones.

        `small`, `large`: costs of whole answers; `begun`: of one that is begun and handed over.
        """
        self._cuts = _Cuts(text)
        order = self._cuts.order
        self._last, self._gains = last[order], gains[order]
        self._small, self._large = small[order] / reference, large[order] / reference
        self._begun = begun[order] / reference

    def around(self, threshold: float) -> tuple[float, float]:
        """The band of the highest expected value; as narrow as such bands are."""
        if not 0.0 < threshold < ALWAYS_LARGE:
            end = 0.0 if threshold <= 0.0 else ALWAYS_LARGE
            return end, end
        price = max(1.0 - threshold, 0.0)
        large = self._gains - price * self._large
        small = -price * self._small
        watched = np.where(self._last < threshold, large - price * self._begun, small)
        by_large = self._cuts.before(large - watched)
        saved = small - watched
        by_small = saved.sum() - self._cuts.before(saved)
        # Best of all cuts up to each one, the last among equals; then the first best upper end.
        best = np.maximum.accumulate(by_large)
        high = int(np.argmax(best + by_small))
        low = high - int(np.argmax(by_large[high::-1]))
        return float(self._cuts.values[low]), float(self._cuts.values[high])
