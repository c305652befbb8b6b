"""Labels of more than two tiers: one column a model, what each costs, and tiers without labels.

A column holds 0 or 1, or a score in [0, 1]; `MODEL|total_cost` what the answer cost (RouterBench's
files have both). A tier without a column has no labels. Its chances are then its neighbours':
the mean of their logits between two labelled tiers, a stated accuracy by the nearest cheaper
tier's, and without either the dearest counts as never wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from outrider.router.estimates import LinearStage, bounded_logit, sigmoid
from outrider.router.features import FloatRows
from outrider.router.ladder import MAX_TIERS, Ladder, LadderRows

COST_COLUMN: Final = "{}|total_cost"
_NEVER_WRONG: Final = 40.0  # a logit whose probability is 1
_BISECTIONS: Final = 60
_WIDEST_SHIFT: Final = 40.0


class TierLabelsError(ValueError):
    """The tiers cannot be put in an order or be learnt. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTerms:
    """What is stated of a tier beside its labels."""

    name: str
    cost: float | None = None
    """Of a request; None: the mean of its column of costs."""
    usual_cost: float | None = None
    """The same where there is no such column."""
    accuracy: float | None = None
    """Counts if the tier has no labels."""


def terms_of(ladder: Ladder) -> list[TierTerms]:
    """Return what a router's tiers are, for newer labels of them."""
    parts = zip(ladder.names, ladder.costs, ladder.accuracies, strict=True)
    return [TierTerms(name=name, cost=cost, accuracy=accuracy) for name, cost, accuracy in parts]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TierLabels:
    """Tiers by rising cost, and their labels."""

    names: tuple[str, ...]
    costs: tuple[float, ...]
    """The mean cost of a request."""
    scores: Mapping[str, FloatRows]
    """In [0, 1], of the tiers that have labels, [num_prompts]."""
    usd: Mapping[str, FloatRows]
    """The cost of each answer, of the tiers that have a column for it, [num_prompts]."""
    accuracies: Mapping[str, float]
    """Stated for tiers without labels."""

    @property
    def labelled(self) -> list[FloatRows]:
        """The scores that there are, by rising cost."""
        return [self.scores[name] for name in self.names if name in self.scores]

    @property
    def unlabelled(self) -> tuple[str, ...]:
        """The tiers without labels."""
        return tuple(name for name in self.names if name not in self.scores)

    def _ladder(self, chances: FloatRows) -> Ladder:
        means = [
            float(self.scores.get(name, own).mean())
            for name, own in zip(self.names, chances, strict=True)
        ]
        return Ladder(
            names=self.names,
            costs=self.costs,
            accuracies=tuple(means),
            unlabelled=self.unlabelled,
        )

    def without(self, name: str) -> "TierLabels":
        """Return the same without a tier."""
        kept = [place for place, other in enumerate(self.names) if other != name]
        return replace(
            self,
            names=tuple(self.names[place] for place in kept),
            costs=tuple(self.costs[place] for place in kept),
            scores={other: scores for other, scores in self.scores.items() if other != name},
        )

    def rows(self, chances: FloatRows, ladder: Ladder | None = None) -> LadderRows:
        """Return the prompts as the tiers are expected to answer them, and did.

        `chances`: [num_tiers, num_prompts]. `ladder`: the router's; None: that of these labels.
        """
        ladder = ladder or self._ladder(chances)
        scores = [
            self.scores.get(name, own) for name, own in zip(ladder.names, chances, strict=True)
        ]
        usd = [
            self.usd.get(name, np.full(chances.shape[1], cost))
            for name, cost in zip(ladder.names, ladder.costs, strict=True)
        ]
        return LadderRows(
            ladder=ladder, chances=chances, scores=np.stack(scores), usd=np.stack(usd)
        )


def by_cost(
    terms: Sequence[TierTerms], scores: Mapping[str, FloatRows], usd: Mapping[str, FloatRows]
) -> TierLabels:
    """Return the tiers in the order of their costs; raises TierLabelsError."""
    if not 2 <= len({one.name for one in terms}) == len(terms) <= MAX_TIERS:
        raise TierLabelsError(f"give 2 to {MAX_TIERS} different tiers")
    costs: dict[str, float] = {}
    for one in terms:
        measured = float(usd[one.name].mean()) if one.name in usd else one.usual_cost
        cost = measured if one.cost is None else one.cost
        if cost is None:
            raise TierLabelsError(
                f"what does {one.name} cost? Give {one.name}=COST, a column "
                f"{COST_COLUMN.format(one.name)} or tiers.{one.name}.price in the settings"
            )
        costs[one.name] = cost
    names = sorted(costs, key=costs.__getitem__)
    for cheaper, dearer in pairwise(names):
        if costs[cheaper] == costs[dearer]:
            raise TierLabelsError(f"{cheaper} and {dearer} cost the same; name the better one only")
    labelled = [name for name in names if name in scores]
    if not labelled:
        raise TierLabelsError(f"none of {', '.join(names)} has a column of labels")
    stated = {one.name: one.accuracy for one in terms if one.accuracy is not None}
    if names[0] not in scores and names[0] not in stated:
        raise TierLabelsError(
            f"{names[0]} is the cheapest tier and has no labels: state its accuracy"
        )
    return TierLabels(
        names=tuple(names),
        costs=tuple(costs[name] for name in names),
        scores={name: scores[name] for name in labelled},
        usd=usd,
        accuracies=stated,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """All tiers' logits, as those of the labelled ones give them."""

    mix: FloatRows
    """[num_tiers, num_labelled]."""
    shift: FloatRows
    """[num_tiers]."""
    is_own: tuple[bool, ...]
    """Whether each tier has a head of its own."""

    def chances(self, labelled: FloatRows) -> FloatRows:
        """Return all tiers' chances from the labelled ones', both [tiers, num_prompts]."""
        logits = np.vectorize(bounded_logit, otypes=[np.float64])(labelled)
        others = np.vectorize(sigmoid, otypes=[np.float64])(self.mix @ logits + self.shift[:, None])
        places = iter(labelled)
        return np.stack(
            [next(places) if is_own else others[tier] for tier, is_own in enumerate(self.is_own)]
        )

    def layer(self, labelled: LinearStage) -> LinearStage:
        """Return the layer of all tiers."""
        return LinearStage(
            weight=self.mix @ labelled.weight, bias=self.mix @ labelled.bias + self.shift
        )


def completed(tiers: TierLabels, held_out: FloatRows) -> Completion:
    """Find the chances of the tiers without labels.

    `held_out`: those of the others, [num_labelled, num_prompts].
    """
    places = {name: place for place, name in enumerate(n for n in tiers.names if n in tiers.scores)}
    mix, shift = np.zeros((len(tiers.names), len(places))), np.zeros(len(tiers.names))
    for tier, name in enumerate(tiers.names):
        below = [places[other] for other in tiers.names[: tier + 1] if other in places]
        above = [places[other] for other in tiers.names[tier:] if other in places]
        stated = tiers.accuracies.get(name)
        if name in places:
            mix[tier, places[name]] = 1.0
        elif stated is not None:
            nearest = below[-1] if below else above[0]
            mix[tier, nearest] = 1.0
            shift[tier] = _shift_to(stated, held_out[nearest])
        elif above:
            mix[tier, [below[-1], above[0]]] = 0.5
        else:
            shift[tier] = _NEVER_WRONG
    is_own = tuple(name in places for name in tiers.names)
    return Completion(mix=mix, shift=shift, is_own=is_own)


def _shift_to(accuracy: float, chances: FloatRows) -> float:
    """Return what to add to the chances' logits to make their mean the accuracy."""
    logits = np.vectorize(bounded_logit, otypes=[np.float64])(chances)
    low, high = -_WIDEST_SHIFT, _WIDEST_SHIFT
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        mean = float((1.0 / (1.0 + np.exp(-(logits + middle)))).mean())
        low, high = (middle, high) if mean < accuracy else (low, middle)
    return low
