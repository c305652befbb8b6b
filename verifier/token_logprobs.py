"""Log-probabilities as they are reported. Without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of one emitted token, by the target's raw distribution (temperature 1)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs(TokenLogprobs):
    """Those of a prompt's token, given the tokens before it."""

    rank: int
    """Its place among all tokens: 1 is the likeliest."""
