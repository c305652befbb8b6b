"""What decides which tokens an answer has: its sampling, its tier, its cascade. Without torch."""

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

Tier = Literal["small", "large"]
TIERS: tuple[Tier, ...] = get_args(Tier)

# Where a guess came from: the small model, earlier text that repeats, text that the client or
# another tier predicted, a grammar that allows nothing else, or a head that reads the large model.
Source = Literal["model", "suffix", "prediction", "grammar", "head"]
SOURCES: tuple[Source, ...] = get_args(Source)

CascadeRule = Literal["opt", "token_specific"]

MAX_LOGIT_BIASES: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 256

# What 32 bits hold: kernels and float32 columns take these numbers as they are.
_MOST_COUNT: Final = 2**31 - 1
# More than any two logits differ, and far from float32's end.
_MOST_BIAS: Final = 1e6

_LEAST: Final = math.ulp(0.0)
"""The least number above 0."""

# The fields of SamplingParams with bounds of their own, each allowed value between both included.
_BOUNDS: Final = (
    ("max_tokens", 1, _MOST_COUNT, f"in [1, {_MOST_COUNT}]"),
    ("temperature", 0.0, 100.0, "in [0, 100]"),
    ("top_k", 0, _MOST_COUNT, f"in [0 (off), {_MOST_COUNT}]"),
    ("top_p", _LEAST, 1.0, "in (0, 1]"),
    ("min_p", 0.0, 1.0, "in [0, 1]"),
    ("seed", 0, 2**64 - 1, "in [0, 2**64)"),
    ("choice_index", 0, _MOST_COUNT, f"in [0, {_MOST_COUNT}]"),
    ("presence_penalty", -2.0, 2.0, "in [-2, 2]"),
    ("frequency_penalty", -2.0, 2.0, "in [-2, 2]"),
    ("repetition_penalty", _LEAST, 10.0, "in (0, 10]"),
)

# Noise moves the argmax only between logits less than 26 temperatures apart; far below this one,
# logits / temperature overflow float32 and any token could win.
_GREEDY_BELOW = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters that choose a token from the target's distribution.

    `temperature` 0 (or below 1e-6) is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed`
    (64 bits) and `choice_index` (which of the request's n choices this is) key the Gumbel noise, so
    the same seed gives the same text. `num_logprobs`: None for none, else how many alternatives are
    reported beside the emitted token.

    The logits are changed before the temperature, in this order (verifier/logit_rules.py):
    those of tokens in the prompt or the answer are divided by `repetition_penalty` where positive,
    else multiplied (Keskar et al., "CTRL", 2019); `frequency_penalty` times a token's count in the
    answer and `presence_penalty` where it occurs are subtracted (OpenAI); `logit_bias` (token id,
    bias) is added; before `min_tokens` tokens no stop token is possible.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice_index: int = 0
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        for name, low, high, allowed in _BOUNDS:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}={value} must be {allowed}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} must be in [0, max_tokens={self.max_tokens}]"
            )
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= 20:
            raise ValueError(f"num_logprobs={self.num_logprobs} must be None or in [0, 20]")
        self._check_tokens()

    def _check_tokens(self) -> None:
        """Raise ValueError for token ids that would reach into another row, or too many of them."""
        for name, token_ids, most in (
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            ("logit_bias", [token_id for token_id, _ in self.logit_bias], MAX_LOGIT_BIASES),
        ):
            if len(token_ids) > most:
                raise ValueError(f"{name} has {len(token_ids)} token ids, at most {most} are taken")
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= _MOST_COUNT:
                raise ValueError(f"token ids of {name} must be in [0, {_MOST_COUNT}]")
        for token_id, bias in self.logit_bias:
            if not abs(bias) <= _MOST_BIAS:
                raise ValueError(
                    f"logit_bias of token {token_id} is {bias}, must be in "
                    f"[{-_MOST_BIAS:g}, {_MOST_BIAS:g}]"
                )

    @property
    def is_greedy(self) -> bool:
        """True if the noise is switched off."""
        return self.temperature < _GREEDY_BELOW


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeParams:
    """A speculative cascade: how far the small model's own tokens may stand (verifier/cascade.py).

    `alpha` 0 trusts the large model most; what it means is the rule's business.
    """

    alpha: float
    rule: CascadeRule = "opt"

    def __post_init__(self) -> None:
        """Raise ValueError for an alpha outside [0, 1]."""
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"alpha={self.alpha} must be in [0, 1]")
