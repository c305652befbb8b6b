"""Settings of the choice between the small and the large model, and the prices of their tokens."""

from typing import Annotated

from pydantic import Field, model_validator

from outrider.gateway.settings.sections import Price, Section, Share
from outrider.router.words import Prefer, WatchMode


class TierPriceSettings(Section):
    """Prices of a tier's tokens, in USD per million."""

    prompt: Price = 0.0
    """Price of prompt tokens."""
    cached_prompt: Price | None = None
    """Price of prompt tokens found in the prefix cache; unset: as `prompt`."""
    completion: Price = 0.0
    """Price of completion tokens."""

    @property
    def cached(self) -> float:
        """Price of cached prompt tokens, whether it is set or not."""
        return self.prompt if self.cached_prompt is None else self.cached_prompt


class PriceSettings(Section):
    """Prices of tokens, for targets, limits and sticky conversations. All 0: unknown."""

    small: TierPriceSettings = Field(default_factory=TierPriceSettings)
    large: TierPriceSettings = Field(default_factory=TierPriceSettings)

    @property
    def is_known(self) -> bool:
        """True if at least one price is set."""
        return any(
            price for tier in (self.small, self.large) for price in (tier.prompt, tier.completion)
        )


class RoutingSettings(Section):
    """Choice between the small and the large model for `auto`. The router is models.router."""

    strong_share: Share | None = None
    """Target: share of the answers that the large model gives. Set at most one target; without one
    the router's own threshold holds."""
    quality: Share | None = None
    """Target: accuracy to keep, as a share of the large model's accuracy. Without a router: the
    share of the small model's first tokens that the large one must agree with."""
    max_cost_usd: Annotated[float, Field(gt=0)] | None = None
    """Target: mean cost of a request; needs routing.prices."""
    threshold: Share | None = None
    """For experts: lowest predicted quality at which the small model's answer is kept."""
    band_low: Share | None = None
    """For experts: below this quality the large model answers at once; unset: as calibrated."""
    band_high: Share | None = None
    """From this quality on the small model answers without being checked; unset: as calibrated."""
    cascade: WatchMode = "auto"
    """Let the small model begin an answer that is then checked; auto: as the router was calibrated,
    without one as long as some answers are kept; always: for every request."""
    hold_back_tokens: int = Field(default=16, ge=1, le=512)
    """Tokens held back at most, until a checked answer is kept or handed to the large model."""
    hold_back_ms: Annotated[float, Field(gt=0)] = 250.0
    """Time that tokens are held back at most, from the first token on."""
    judge_whole: bool = True
    """Check answers that are not streamed only when they are complete: slower, more accurate."""
    mid_stream: bool = False
    """Let the large model continue text that was already sent, when the small model's answer is
    rejected."""
    prefer: Prefer | None = None
    """For requests and keys that do not say it: latency (the model that is expected to answer
    first), price (the cheapest that keeps `quality`), quality (the large model unless the router is
    sure); unset: as calibrated."""
    sticky: bool = True
    """Prefer the model whose prefix cache holds the conversation."""
    max_busy_factor: Annotated[float, Field(ge=1, le=100)] = 4.0
    """Most that a queue of the large model multiplies the gain by that a router requires of it: its
    measured wait counts like the longer time of its answers. 1: a queue changes nothing."""
    explore_share: Annotated[float, Field(ge=0, le=0.1)] = 0.015
    """Where no router decides: share of the small model's kept answers that the large model judges
    as well, so that the threshold is learnt from all kinds of answers."""
    abstain: bool = True
    """Do not let the router decide on prompts that are unlike those it was trained on: the small
    model begins, and its first tokens decide."""
    autopilot: bool = False
    """Keep the large model's share of the answers when the prompts change."""
    force_router: bool = False
    """Use a router that was trained for another pair of models."""
    prices: PriceSettings = Field(default_factory=PriceSettings)

    @model_validator(mode="after")
    def _fits_together(self) -> "RoutingSettings":
        targets = ("strong_share", "quality", "max_cost_usd", "threshold")
        named = [name for name in targets if getattr(self, name) is not None]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} exclude each other; set one of them")
        if self.max_cost_usd is not None and not self.prices.is_known:
            raise ValueError(
                "max_cost_usd needs the prices of both tiers; set them in routing.prices.small and "
                "routing.prices.large"
            )
        low, high = self.band_low, self.band_high
        if low is not None and high is not None and low > high:
            raise ValueError(f"band_low={low:g} is above band_high={high:g}")
        by_hand = (self.threshold, low, high)
        if self.autopilot and any(value is not None for value in by_hand):
            raise ValueError(
                "autopilot turns threshold and band itself; set strong_share instead of them"
            )
        return self
