"""Costs of requests, and of leaving the tier that has a conversation in its prefix cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from outrider.verifier.params import Tier

_PRICE_UNIT: Final = 1e-6  # prices are for a million tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """USD per million tokens of one tier. `cached_prompt`: of those found in the prefix cache."""

    prompt: float
    cached_prompt: float
    completion: float

    def cost_usd(
        self,
        *,
        num_prompt_tokens: float,
        num_completion_tokens: float,
        num_cached_tokens: float = 0.0,
    ) -> float:
        """USD of one request; `num_cached_tokens` are part of the prompt's."""
        prompt = self.prompt * (num_prompt_tokens - num_cached_tokens)
        cached = self.cached_prompt * num_cached_tokens
        return _PRICE_UNIT * (prompt + cached + self.completion * num_completion_tokens)


def prices_by_size(num_parameters: Mapping[Tier, int]) -> dict[Tier, TokenPrices]:
    """Relative prices where none are set: a token costs its passes, a cached one nothing."""
    return {
        tier: TokenPrices(prompt=float(count), cached_prompt=0.0, completion=float(count))
        for tier, count in num_parameters.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSize:
    """Tokens of a request that goes on with a conversation; the cached ones are in the prompt."""

    num_prompt_tokens: float
    num_cached_tokens: float
    num_completion_tokens: float


def gain_factor(current: Tier, size: ConversationSize, prices: Mapping[Tier, TokenPrices]) -> float:
    """Return the factor on the gain that is required of the large model inside a conversation.

    A gain g is worth the price difference of the tiers. Leaving a tier forfeits its cached prefix,
    which is paid again at the other one. To leave the small tier, the large one must gain
    g * (c_large + c_lost - c_small) / (c_large - c_small). To stay on the large tier, it need gain
    only g * (c_large - c_lost - c_small) / (c_large - c_small), which may be nothing at all. The
    factor is 1 where the large tier is not the dearer one.
    """

    def whole(tier: Tier) -> float:
        return prices[tier].cost_usd(
            num_prompt_tokens=size.num_prompt_tokens,
            num_completion_tokens=size.num_completion_tokens,
        )

    difference = whole("large") - whole("small")
    if difference <= 0.0:
        return 1.0
    kept = prices[current]
    lost = max(kept.prompt - kept.cached_prompt, 0.0) * size.num_cached_tokens * _PRICE_UNIT
    signed = lost if current == "small" else -lost
    return max((difference + signed) / difference, 0.0)


class RunningMean:
    """A mean that follows: a value counts `rate`, those before it decay. Starts at `prior`."""

    def __init__(self, prior: float, rate: float = 0.02) -> None:
        self.value = prior
        self._rate = rate

    def add(self, value: float) -> None:
        """Move towards a new value."""
        self.value += self._rate * (value - self.value)


class TypicalRequest:
    """Typical lengths of prompts and answers in tokens: running means that start from guesses."""

    def __init__(self) -> None:
        self.num_prompt_tokens = RunningMean(200.0)
        self.num_completion_tokens = RunningMean(200.0)

    def likely_tokens(self, limit: int | None) -> int:
        """Return the likely length of an answer of at most `limit` tokens."""
        typical = round(self.num_completion_tokens.value)
        return typical if limit is None else min(limit, typical)

    def cost_usd(self, prices: TokenPrices) -> float:
        """USD of one such request on a tier."""
        return prices.cost_usd(
            num_prompt_tokens=self.num_prompt_tokens.value,
            num_completion_tokens=self.num_completion_tokens.value,
        )
