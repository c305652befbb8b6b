"""Routes requests that prefer an early first token, a low price or a right answer."""

from dataclasses import dataclass, replace
from typing import Final

from outrider.router.policy import (
    NO_CONSTRAINTS,
    Route,
    RouteConstraints,
    RoutePolicy,
)
from outrider.router.words import Prefer

SURE_QUALITY: Final = 0.99
"""What the small model must be assured to keep of the large one's accuracy, for requests that
prefer quality."""
_BEST: Final[dict[Prefer, str]] = {
    "latency": "is expected to answer first",
    "price": "costs least",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferringPolicy:
    """Decides by a request's preference where it has one, else as `policy` does."""

    policy: RoutePolicy
    min_quality: float | None = None
    """For requests that prefer time or price and name no quality; None: any."""
    is_assured: bool = False
    """The policy keeps a `min_quality` with a stated probability, so that it can be sure."""

    def route(self, text: str, constraints: RouteConstraints = NO_CONSTRAINTS) -> Route:
        """Decide for one prompt. Raises RouteConstraintError."""
        wish = constraints.preference
        if wish is None:
            return self.policy.route(text, constraints)
        constraints = replace(constraints, preference=None)
        if wish.by == "quality":
            return self._surest(text, constraints)
        least = self.min_quality if constraints.min_quality is None else constraints.min_quality
        if wish.best == "large" or not least:
            what = f"{wish.best} {_BEST[wish.by]}{wish.figures}"
            return Route(tier=wish.best, reason=f"router: prefers {wish.by}, {what}")
        # An answer under watch is held back: too late for those who want its first token.
        may_watch = constraints.may_watch and wish.by != "latency"
        kept = replace(constraints, min_quality=least, may_watch=may_watch)
        return _explained(wish.by, self.policy.route(text, kept))

    def _surest(self, text: str, constraints: RouteConstraints) -> Route:
        """Return the large model, unless the small one is assured to keep nearly its quality."""
        if not self.is_assured:
            reason = "router: prefers quality, nothing assures the small model, large answers"
            return Route(tier="large", reason=reason)
        least = max(SURE_QUALITY, constraints.min_quality or 0.0)
        return _explained(
            "quality", self.policy.route(text, replace(constraints, min_quality=least))
        )


def _explained(by: Prefer, route: Route) -> Route:
    return replace(route, reason=f"router: prefers {by}, {route.reason.removeprefix('router: ')}")
