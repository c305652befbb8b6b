"""What is reported of tokens: log-probabilities, and judgements of a text. Without torch."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """A token of a text that the model would not have written at its place."""

    index: int
    """Its place in the text that is judged."""
    token_id: int
    chosen_id: int
    """What the model chooses there; negative where its numbers are not finite."""
    gap: float
    """How much higher the choice scores, at most `text_judge.MOST_GAP`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How a text agrees with what one hypothesis would have written behind the same words."""

    num_tokens: int = 0
    num_same: int = 0
    """Those that the model chooses too."""
    total_gap: float = 0.0
    """The sum of all differences' gaps."""
    differences: tuple[TokenDifference, ...] = ()
    """The first ones."""
