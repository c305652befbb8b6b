"""Orders an alias's models for a request by a router that knows what each is worth for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from outrider.gateway.answering.jobs.tier_choice import requested_constraints
from outrider.gateway.answering.reading.judged_text import goes_on_with_tools, judged_text
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.common import OutriderOptions
from outrider.gateway.contract.schema.kinds import Prefer
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.router.policy import RouteConstraintError
from outrider.router.tier_policy import TierPolicy, TierRoute, TierWish

_OPTIONS: Final = "outrider"
USED_OPTIONS: Final = frozenset({"prefer", "min_quality", "threshold"})
"""Options that the order of the models has taken into account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasRouter:
    """The router of one alias."""

    policy: TierPolicy
    prefer: Prefer | None = None
    """What counts first for requests and keys that do not say it."""
    first_token_s: Callable[[], Mapping[str, float]] = field(default=lambda: {})
    """Returns the seconds until each model is expected to begin, where that is known."""

    def route(
        self, document: Mapping[str, Any], defaults: Mapping[str, Any], principal: Principal
    ) -> TierRoute | None:
        """Order the models for a request; None for one that its reader will refuse.

        `defaults`: the alias's fields for clients that leave them out. Raises BadRequestError for
        a quality that cannot be kept.
        """
        options = _options(document, defaults)
        if options is None:
            return None
        if goes_on_with_tools(document):
            return self.policy.dearest("tool loop: {}, the model that made the calls is unknown")
        asked = requested_constraints(options)
        prefer = options.preferred(principal.scopes.prefer, self.prefer)
        wish = TierWish(
            min_quality=asked.min_quality,
            threshold=asked.threshold,
            prefer=prefer,
            first_token_s=self.first_token_s() if prefer == "latency" else {},
        )
        try:
            return self.policy.route(judged_text(document), wish)
        except RouteConstraintError as error:
            raise BadRequestError(
                f"outrider.min_quality: {error}.", param="outrider.min_quality"
            ) from None


def _options(document: Mapping[str, Any], defaults: Mapping[str, Any]) -> OutriderOptions | None:
    """Return what a request asks of us; None where that cannot be read."""
    own = document.get(_OPTIONS)
    if own is not None and not isinstance(own, dict):
        return None
    try:
        return OutriderOptions.model_validate({**defaults.get(_OPTIONS, {}), **(own or {})})
    except ValidationError:
        return None


def without_used(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's document without the options that its order has taken into account."""
    options = document.get(_OPTIONS)
    if not isinstance(options, dict):
        return dict(document)
    left = {name: value for name, value in options.items() if name not in USED_OPTIONS}
    return {**document, _OPTIONS: left}
