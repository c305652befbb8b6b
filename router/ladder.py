"""Tiers by rising cost, and the choice of one of them by its gain for what it costs more.

A dearer tier is taken where it is likelier to be right by enough for the price: a threshold of
1 - p asks for the gain p of each smallest step of cost between two tiers. Among two tiers that is
the comparison of 1 minus the gain with the threshold.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.router.features import FloatRows

MAX_TIERS: Final = 16
_MAX_NAME_CHARS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Tiers by rising cost; a router's file names them."""

    names: tuple[str, ...]
    costs: tuple[float, ...]
    """The mean cost of a request on each tier, in one unit."""
    accuracies: tuple[float, ...]
    """Each tier's mean score of the training prompts; estimated where it had no labels."""
    unlabelled: tuple[str, ...]
    """Tiers whose chances come from their neighbours or a stated accuracy."""

    def __post_init__(self) -> None:
        """Raise ValueError for what no tiers can be."""
        if not 2 <= len(self.names) <= MAX_TIERS or len(set(self.names)) < len(self.names):
            raise ValueError(f"{list(self.names)} are not 2 to {MAX_TIERS} different tiers")
        for name in self.names:
            if not name.isprintable() or not 0 < len(name) <= _MAX_NAME_CHARS:
                raise ValueError(f"{name[:_MAX_NAME_CHARS]!r} is no name of a tier")
        if not len(self.names) == len(self.costs) == len(self.accuracies):
            raise ValueError("tiers need a cost and an accuracy each")
        if not np.isfinite(self.costs).all() or self.costs[0] < 0.0:
            raise ValueError(f"costs {list(self.costs)} must be 0 or more")
        if any(cheaper >= dearer for cheaper, dearer in pairwise(self.costs)):
            raise ValueError(f"costs {list(self.costs)} must rise")
        if not all(0.0 <= accuracy <= 1.0 for accuracy in self.accuracies):
            raise ValueError(f"accuracies {list(self.accuracies)} must be in [0, 1]")
        if not set(self.unlabelled) < set(self.names):
            raise ValueError(f"unlabelled {list(self.unlabelled)} must be some of the tiers")

    @property
    def step(self) -> float:
        """The smallest difference of cost between two tiers: for it a gain counts in full."""
        return min(dearer - cheaper for cheaper, dearer in pairwise(self.costs))

    @property
    def cost_shares(self) -> list[float]:
        """How far each tier's cost is from the cheapest one's to the dearest one's."""
        first, last = self.costs[0], self.costs[-1]
        return [(cost - first) / (last - first) for cost in self.costs]

    def choose(
        self, chances: Sequence[float], threshold: float, among: Collection[int] | None = None
    ) -> int:
        """Return the place of the tier that is worth most; of equals, of the cheapest.

        `chances`: of being right, by tier. `among`: the places of the tiers that may answer.
        """
        left = range(len(self.names)) if among is None else sorted(among)
        step = self.step
        place = left[0]
        for dearer in left[1:]:
            gain = chances[dearer] - chances[place]
            extra = (self.costs[dearer] - self.costs[place]) / step
            if min(1.0, 1.0 - gain / extra) < threshold:
                place = dearer
        return place

    def quality(self, chances: Sequence[float]) -> float:
        """Return the predicted quality of the cheapest tier: thresholds above it leave that tier.

        It is 1 if no dearer tier adds anything.
        """
        step, (first, *others) = self.step, chances
        extras = ((cost - self.costs[0]) / step for cost in self.costs[1:])
        gains = (chance - first for chance in others)
        return min(1.0, *(1.0 - gain / extra for gain, extra in zip(gains, extras, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LadderRows:
    """Labelled prompts as a ladder's tiers are expected to answer them, and did."""

    ladder: Ladder
    chances: FloatRows
    """[num_tiers, num_prompts]."""
    scores: FloatRows
    """In [0, 1], [num_tiers, num_prompts]; the chances of a tier without labels."""
    usd: FloatRows
    """The cost of each answer, [num_tiers, num_prompts]."""

    def __post_init__(self) -> None:
        """Raise ValueError for arrays of other shapes."""
        shape = (len(self.ladder.names), self.chances.shape[-1])
        for name in ("chances", "scores", "usd"):
            values = getattr(self, name)
            if values.shape != shape or not np.isfinite(values).all():
                raise ValueError(f"{name} has shape {list(values.shape)}, not {list(shape)}")

    @property
    def _costs(self) -> FloatRows:
        return np.array(self.ladder.costs)

    def chosen(self, threshold: float) -> NDArray[np.intp]:
        """Return the place of each prompt's tier: [num_prompts], as `Ladder.choose` does."""
        prompts, costs, step = np.arange(self.chances.shape[1]), self._costs, self.ladder.step
        places = np.zeros(len(prompts), dtype=np.intp)
        for dearer in range(1, len(costs)):
            gain = self.chances[dearer] - self.chances[places, prompts]
            extra = (costs[dearer] - costs[places]) / step
            is_worth_it = np.minimum(1.0, 1.0 - gain / extra) < threshold
            places = np.where(is_worth_it, dearer, places)
        return places

    def answered(self, values: FloatRows, threshold: float) -> FloatRows:
        """Return the entries of [num_tiers, num_prompts] for the chosen tiers: [num_prompts]."""
        found: FloatRows = values[self.chosen(threshold), np.arange(values.shape[1])]
        return found

    def cost_shares(self, threshold: float) -> FloatRows:
        """Return how far each prompt's cost is from the cheapest tier's to the dearest's."""
        shares: FloatRows = np.array(self.ladder.cost_shares)[self.chosen(threshold)]
        return shares

    def qualities(self) -> FloatRows:
        """Return 1 - gain of the cheapest tier's answers for the cost, as StageRows has them."""
        pairs = ((0, place) for place in range(1, len(self.chances)))
        lowest: FloatRows = self._pairs(pairs).min(axis=0)
        return lowest

    def cuts(self) -> FloatRows:
        """Return every quality at which a prompt may change its tier, in [0, 1]."""
        pairs = combinations(range(len(self.chances)), 2)
        cuts: FloatRows = np.clip(self._pairs(pairs), 0.0, 1.0).ravel()
        return cuts

    def _pairs(self, pairs: Iterable[tuple[int, int]]) -> FloatRows:
        """Return 1 - gain for the cost, of the dearer tier over the cheaper.

        [num_pairs, num_prompts].
        """
        costs, step = self._costs, self.ladder.step
        return np.stack(
            [
                1.0
                - (self.chances[dearer] - self.chances[cheaper])
                / ((costs[dearer] - costs[cheaper]) / step)
                for cheaper, dearer in pairs
            ]
        )
