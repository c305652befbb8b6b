"""Settings of what tokens, images and sounds cost at an upstream tier, and of the most of them."""

import json
from typing import Annotated, Self

from pydantic import BeforeValidator, model_validator
from pydantic_settings import NoDecode

from outrider.gateway.contract.schema.kinds import PassedUnit
from outrider.gateway.settings.routing import TierPriceSettings
from outrider.gateway.settings.sections import Count, NotNegative, Price, Section


class LongPromptPrice(TierPriceSettings):
    """Prices of all tokens of a request whose prompt is longer than `above`."""

    above: Count
    """Tokens of the longest prompt, cached ones included, that does not have these prices."""


def _tables(value: object) -> object:
    """Read tables in JSON, as flags and variables have them."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError(
            'it is no JSON; write [{"above": 200000, "prompt": 2.5, "completion": 15}]'
        ) from None


LongPromptPrices = Annotated[tuple[LongPromptPrice, ...], NoDecode, BeforeValidator(_tables)]


class UpstreamPriceSettings(TierPriceSettings):
    """Prices of an upstream tier's tokens, in USD per million, and of its images and sounds."""

    image: Price | None = None
    """USD for each image made, in place of its tokens' price; unset: unknown."""
    audio_minute: Price | None = None
    """USD for a minute of sound that is transcribed or translated, in place of its tokens' price;
    unset: unknown."""
    speech: Price | None = None
    """USD for a million bytes of text that is spoken, in place of its tokens' price; unset:
    unknown."""
    long_prompts: LongPromptPrices = ()
    """Prices of requests with long prompts: tables of above, prompt, cached_prompt and completion,
    such as {above = 200000, prompt = 2.5, completion = 15}. If a prompt has more than `above`
    tokens, all tokens of its request have that table's prices. Longer prompts cannot be cheaper."""

    @model_validator(mode="after")
    def _never_falls(self) -> Self:
        """Refuse falling prices: what is reserved for the longest prompt then covers all others."""
        shorter: TierPriceSettings = self
        least = 1
        for longer in self.long_prompts:
            for name, value, bound in (
                ("above", longer.above, least),
                ("prompt", longer.prompt, shorter.prompt),
                ("cached_prompt", longer.cached, shorter.cached),
                ("completion", longer.completion, shorter.completion),
            ):
                if value < bound:
                    raise ValueError(
                        f"long_prompts: {name}={value} of the table with above={longer.above} "
                        f"must be at least {bound}: thresholds rise, and no price falls"
                    )
            shorter, least = longer, longer.above + 1
        return self

    def at(self, num_prompt_tokens: int) -> TierPriceSettings:
        """Return the prices of all tokens of a request with a prompt of this length."""
        longer = (each for each in reversed(self.long_prompts) if num_prompt_tokens > each.above)
        return next(longer, self)

    def of(self, unit: PassedUnit) -> float | None:
        """Return USD for one unit; None where it is not set."""
        match unit:
            case "image":
                return self.image
            case "audio_second":
                return None if self.audio_minute is None else self.audio_minute / 60
            case "speech_byte":
                return None if self.speech is None else self.speech / 1e6


class PassedBounds(Section):
    """The most that a request for an image or a sound takes, which its key's limits must have room
    for."""

    image_tokens: NotNegative | None = None
    """Most tokens of an image, made or given; 0: the server counts none; unset: unknown."""
    audio_seconds: Count | None = None
    """Most seconds of a sound that the server takes; unset: unknown, if audio_bytes_per_second is
    unset too."""
    audio_bytes_per_second: Count | None = None
    """Fewest bytes of a second of sound that clients send, e.g. 4000 for speech in Opus."""
    audio_tokens: NotNegative | None = None
    """Most tokens of a second of sound; 0: the server counts none; unset: unknown."""
