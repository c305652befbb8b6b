"""Chooses among tiers by rising cost: what they are worth for a prompt, what the request asks for.

The tier whose chance of being right is worth its price comes first, by the router's setting or the
one that a request's `min_quality` needs. The others follow as they would be chosen without those
before them, so that a tier that is down, full or too dear is replaced by the next best.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from outrider.router.assurance import LiveAssurance
from outrider.router.calibration import ALWAYS_LARGE
from outrider.router.dial import Dial
from outrider.router.files import CONFIG_NAME, RouterFileError
from outrider.router.ladder import Ladder
from outrider.router.policy import RouteConstraintError, own_setting
from outrider.router.preference import SURE_QUALITY
from outrider.router.scorer import RouterScorer
from outrider.router.words import Prefer

_UNLIKE: Final = "prompt unlike the router's training, "


@dataclass(frozen=True, slots=True, kw_only=True)
class TierWish:
    """What a request asks of its tier."""

    min_quality: float | None = None
    """The accuracy to keep, as a share of the dearest tier's, in [0, 1]."""
    threshold: float | None = None
    """Replaces the router's own."""
    prefer: Prefer | None = None
    first_token_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds until a tier is expected to begin, of the tiers for which that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRoute:
    """The tiers that may answer a request, and why in this order."""

    order: tuple[str, ...]
    """The first one is chosen; each next one answers if those before it cannot."""
    reason: str
    """One line, fit for a header where the names are."""
    chances: Mapping[str, float]
    """Each tier's probability of being right, by rising cost; empty where none was predicted."""
    quality: float | None
    """Predicted quality of the cheapest tier; None where nothing was predicted."""
    threshold: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPolicy:
    """A router's estimates for its tiers, compared with its setting."""

    scorer: RouterScorer
    ladder: Ladder
    abstains: bool = True
    """Prompts unlike the router's training are judged by the tiers' accuracies alone."""
    min_quality: float | None = None
    """For requests that prefer time or price and name no quality; None: any."""

    @classmethod
    def load(cls, folder: Path, **options: Any) -> Self:
        """Read a router. Raises RouterFileError for one of a small and a large tier.

        `options`: the further fields.
        """
        try:
            return cls.of(RouterScorer.load(folder), **options)
        except ValueError as error:
            if isinstance(error, RouterFileError):
                raise
            raise RouterFileError(folder / CONFIG_NAME, str(error)) from error

    @classmethod
    def of(cls, scorer: RouterScorer, **options: Any) -> Self:
        """Return the policy of a router. Raises ValueError for one of a small and a large tier."""
        if scorer.tiers is None:
            raise ValueError("knows a small and a large tier only; set it as models.router")
        return cls(scorer=scorer, ladder=scorer.tiers, **options)

    def route(self, text: str, wish: TierWish) -> TierRoute:
        """Decide for one prompt. Raises RouteConstraintError."""
        ladder = self.ladder
        estimate = (
            self.scorer.estimate_familiar(text) if self.abstains else self.scorer.estimate(text)
        )
        chances = ladder.accuracies if estimate is None else estimate.heads
        least = self._least(wish)
        threshold = self._threshold(wish, least, is_familiar=estimate is not None)
        order = self._order(chances, threshold)
        if least is not None:  # cheaper tiers than the chosen one do not keep it
            kept = sorted(place for place in order if place >= order[0])
            order = self._preferred(kept, wish)
            if wish.min_quality is None:
                order += range(kept[0])[::-1]
        elif wish.prefer is not None:
            order = self._preferred(sorted(order), wish)
        return TierRoute(
            order=tuple(ladder.names[place] for place in order),
            reason=self._reason(order[0], chances, wish, "" if estimate else _UNLIKE),
            chances=dict(zip(ladder.names, chances, strict=True)),
            quality=ladder.quality(chances),
            threshold=threshold,
        )

    def dearest(self, reason: str) -> TierRoute:
        """Return the tiers by falling cost, for a reason with {} in the place of the first one."""
        ladder = self.ladder
        return TierRoute(
            order=ladder.names[::-1],
            reason=f"router: {reason.format(ladder.names[-1])}",
            chances={},
            quality=None,
            threshold=None,
        )

    def _least(self, wish: TierWish) -> float | None:
        """Return the quality to keep; None where the router's own setting decides."""
        if wish.prefer == "quality":
            return max(SURE_QUALITY, wish.min_quality or 0.0)
        if wish.prefer is not None and wish.min_quality is None:
            return self.min_quality
        return wish.min_quality

    def _threshold(self, wish: TierWish, least: float | None, *, is_familiar: bool) -> float:
        if least is None:
            return own_setting(self.scorer, wish.threshold).threshold
        if not is_familiar:
            return ALWAYS_LARGE
        if self.scorer.assurances:
            return LiveAssurance(self.scorer.assurances).setting(least, may_watch=False).threshold
        if wish.prefer == "quality":
            return ALWAYS_LARGE  # nothing is sure
        if self.scorer.calibration is None or self.ladder.unlabelled:
            raise RouteConstraintError("the router has tiers without labels, so none is measured")
        return Dial(self.scorer.calibration).at_quality(least).threshold

    def _order(self, chances: Sequence[float], threshold: float) -> list[int]:
        left, order = set(range(len(chances))), list[int]()
        while left:
            order.append(self.ladder.choose(chances, threshold, left))
            left.discard(order[-1])
        return order

    def _preferred(self, by_cost: list[int], wish: TierWish) -> list[int]:
        """Put the quickest first of tiers by rising cost, where that is preferred."""
        if wish.prefer != "latency":
            return by_cost
        names, seconds = self.ladder.names, wish.first_token_s
        return sorted(by_cost, key=lambda place: seconds.get(names[place], math.inf))

    def _reason(self, place: int, chances: Sequence[float], wish: TierWish, unlike: str) -> str:
        name = self.ladder.names[place]
        figures = ", ".join(
            f"{other} {chance:.2f}"
            for other, chance in zip(self.ladder.names, chances, strict=True)
        )
        if wish.prefer is not None:
            what = f"prefers {wish.prefer}, {name}"
        elif wish.min_quality:
            what = f"{name} keeps the quality"
        else:
            what = f"{name} is worth its price"
        return f"router: {unlike}{what} ({figures})"
