"""Settings of what images and sounds cost at an upstream tier, and of the most that one takes."""

from outrider.gateway.schema.kinds import PassedUnit
from outrider.gateway.settings.sections import Count, NotNegative, Price, Section, TierPriceSettings


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
