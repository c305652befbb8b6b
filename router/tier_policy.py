"""Chooses among tiers by rising cost: what they are worth for a prompt, what the request asks for.

The tier whose chance of being right is worth its price comes first, by the router's setting or the
one that a request's `min_quality` needs. The others follow as they would be chosen without those
before them, so that a tier that is down, full or too dear is replaced by the next best.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

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
    """Each tier's probability of being right, by rising cost."""
    quality: float
    """Predicted quality of the cheapest tier."""
    threshold: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPolicy:
    """A router's estimates for its tiers, compared with its setting."""

    scorer: RouterScorer
    ladder: Ladder
    abstains: bool = True
    """Prompts unlike the router's training are judged by the tiers' accuracies alone."""

    @classmethod
    def load(cls, folder: Path, *, abstains: bool = True) -> Self:
        """Read a router. Raises RouterFileError for one of a small and a large tier."""
        try:
            return cls.of(RouterScorer.load(folder), abstains=abstains)
        except ValueError as error:
            if isinstance(error, RouterFileError):
                raise
            raise RouterFileError(folder / CONFIG_NAME, str(error)) from error

    @classmethod
    def of(cls, scorer: RouterScorer, *, abstains: bool = True) -> Self:
        """Return the policy of a router. Raises ValueError for one of a small and a large tier."""
        if scorer.tiers is None:
            raise ValueError("knows a small and a large tier only; set it as models.router")
        return cls(scorer=scorer, ladder=scorer.tiers, abstains=abstains)

    def route(self, text: str, wish: TierWish) -> TierRoute:
        """Decide for one prompt. Raises RouteConstraintError."""
        ladder = self.ladder
        estimate = (
            self.scorer.estimate_familiar(text) if self.abstains else self.scorer.estimate(text)
        )
        chances = ladder.accuracies if estimate is None else estimate.heads
        least = wish.min_quality
        if wish.prefer == "quality":
            least = max(SURE_QUALITY, least or 0.0)
        threshold = self._threshold(wish, least, is_familiar=estimate is not None)
        order = self._order(chances, threshold)
        if least:  # cheaper tiers than the chosen one do not keep it
            order = sorted(place for place in order if place >= order[0])
        order = self._preferred(order, wish, is_bound=bool(least))
        return TierRoute(
            order=tuple(ladder.names[place] for place in order),
            reason=self._reason(order[0], chances, wish, "" if estimate else _UNLIKE),
            chances=dict(zip(ladder.names, chances, strict=True)),
            quality=ladder.quality(chances),
            threshold=threshold,
        )

    def _threshold(self, wish: TierWish, least: float | None, *, is_familiar: bool) -> float:
        if not least:
            return own_setting(self.scorer, wish.threshold).threshold
        if not is_familiar:
            return ALWAYS_LARGE
        if self.scorer.assurances:
            return LiveAssurance(self.scorer.assurances).setting(least, may_watch=False).threshold
        if wish.min_quality is None:
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

    def _preferred(self, order: list[int], wish: TierWish, *, is_bound: bool) -> list[int]:
        """Put the cheapest or the quickest first, of those that keep the quality asked for."""
        names = self.ladder.names
        keys: dict[Prefer, Callable[[int], float]] = {
            "price": lambda place: place,
            "latency": lambda place: wish.first_token_s.get(names[place], float("inf")),
        }
        if wish.prefer is None or wish.prefer == "quality":
            return order
        if wish.prefer == "price" and is_bound:
            return order  # by rising cost already
        return sorted(order, key=keys[wish.prefer])

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
