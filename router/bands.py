"""Bands of text qualities within which the small model begins under watch: how wide they are.

Without costs a band is as narrow as the data allow: outside it the last stage would overrule the
text for fewer than 1 % of all prompts on each side. With costs an answer is begun where its
expected value pays for the tokens that are held, and where the labels show that this is better than
the text alone at the same cost.
"""

import math
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.router.features import FloatRows

# Above every quality, which is clipped at 1: the large model answers all.
ALWAYS_LARGE: Final = 1.01
_MAX_OVERRULED: Final = 0.01  # of all prompts, on each side of the band
_STANDARD_ERRORS: Final = 1.645  # one side of a normal distribution, 95 %


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
    last stage expects, so no label places a band. Labels decide whether there is one: where they do
    not show a gain over the text at the same cost, with 95 % confidence, the text alone decides.
    Implements `Bands`.
    """

    def __init__(
        self,
        text: FloatRows,
        last: FloatRows,
        *,
        gains: FloatRows,
        labels: FloatRows,
        small: FloatRows,
        large: FloatRows,
        begun: FloatRows,
    ) -> None:
        """All [num_prompts]. `text`, `last`: clipped qualities for the cost; `gains`: plain ones.

        `labels`: the large model's score less the small one's. `small`, `large`: costs of whole
        answers, in references; `begun`: of one that is begun and handed over.
        """
        self._cuts = _Cuts(text)
        order = self._cuts.order
        self._last, self._gains, self._labels = last[order], gains[order], labels[order]
        self._small, self._large, self._begun = small[order], large[order], begun[order]

    def around(self, threshold: float) -> tuple[float, float]:
        """The band of the highest expected value, as narrow as such bands are; empty for the text.

        An empty band is a cut at which the text alone costs as much.
        """
        if not 0.0 < threshold < ALWAYS_LARGE:
            end = 0.0 if threshold <= 0.0 else ALWAYS_LARGE
            return end, end
        low, high = self._most_valuable(threshold)
        if low < high:
            low, high = self._if_shown(low, high, threshold)
        return float(self._cuts.values[low]), float(self._cuts.values[high])

    def _most_valuable(self, threshold: float) -> tuple[int, int]:
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
        return high - int(np.argmax(by_large[high::-1])), high

    def _if_shown(self, low: int, high: int, threshold: float) -> tuple[int, int]:
        """Return the band where its gain is shown, else twice the text's cut of the same cost."""
        places = np.arange(len(self._last))
        is_watched = (places >= self._cuts.starts[low]) & (places < self._cuts.starts[high])
        is_large = (places < self._cuts.starts[low]) | (is_watched & (self._last < threshold))
        extra = self._large - self._small
        banded = is_large * (extra + is_watched * self._begun)
        # What the text costs at each cut; a cheaper large answer does not make it fall again.
        costs = np.maximum.accumulate(self._cuts.before(extra))
        above = int(np.clip(np.searchsorted(costs, banded.sum()), 1, len(costs) - 1))
        below = above - 1
        span = costs[above] - costs[below]
        share = float(np.clip((banded.sum() - costs[below]) / span if span > 0.0 else 1.0, 0, 1))
        by_text = (places < self._cuts.starts[below]).astype(np.float64)
        by_text[self._cuts.starts[below] : self._cuts.starts[above]] = share
        # Both cost the same in the mean; a prompt's own costs count at the threshold's rate.
        price = max(1.0 - threshold, 0.0)
        better = (is_large - by_text) * self._labels - price * (banded - by_text * extra)
        error = float(better.std()) / math.sqrt(len(better))
        if float(better.mean()) > _STANDARD_ERRORS * error:
            return low, high
        cut = above if share == 1.0 else below
        return cut, cut
