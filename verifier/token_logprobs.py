"""Log-probabilities as they are reported. Without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of one emitted token under the target's raw distribution (temperature 1).

    `top` holds (token id, log-probability), best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
