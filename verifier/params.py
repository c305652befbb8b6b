"""A request's parameters that decide its tokens: sampling, tier, cascade. Without torch."""

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Literal, get_args

__all__ = ["record"]  # for type checkers, which see an import

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen: bool, **options):
        """Make a dataclass that is frozen for type checkers alone.

        A frozen one sets each field through a call of 1,100 instructions, a plain one takes 30; and
        each token of each request makes some.
        """
        return dataclass(unsafe_hash=frozen, **options)


Tier = Literal["small", "large"]
TIERS: tuple[Tier, ...] = get_args(Tier)

# Where a guess came from: the small model, earlier text that repeats, text that the client or
# another tier predicted, a grammar that allows nothing else, or a head that reads the large model.
Source = Literal["model", "suffix", "prediction", "grammar", "head"]
SOURCES: tuple[Source, ...] = get_args(Source)

CascadeRule = Literal["opt", "token_specific"]

MAX_LOGIT_BIASES: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 256
# More ways than any tokenizer has to write one mark.
_MAX_SPELLINGS: Final = 64

# What 32 bits hold: kernels and float32 columns take these numbers as they are.
_MOST_COUNT: Final = 2**31 - 1
# More than any two logits differ, and far from float32's end.
_MOST_BIAS: Final = 1e6

_LEAST: Final = math.ulp(0.0)
"""The least number above 0."""

# The fields of SamplingParams with bounds of their own, each allowed value between both included.
_BOUNDS: Final = (
    ("max_tokens", 0, _MOST_COUNT, f"in [0, {_MOST_COUNT}]"),
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
_bounded_values: Final = attrgetter(*(name for name, *_ in _BOUNDS))

# Noise moves the argmax only between logits less than 26 temperatures apart; far below this one,
# logits / temperature overflow float32 and any token could win.
_GREEDY_BELOW = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """The most tokens that an answer may think, and the marks around its thinking.

    A mark may be several tokens, and have several spellings: tokens may hold more than the mark.
    """

    max_tokens: int
    """Between the marks; then the closing mark is all that is possible."""
    opens: tuple[tuple[int, ...], ...]
    """An answer that begins with one of these thinks. Empty: the prompt ends inside thinking."""
    closes: tuple[tuple[int, ...], ...]
    """Each of these ends the thinking. The first is written where the budget ends, or the one that
    the thinking has begun already."""

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        if not 0 <= self.max_tokens <= _MOST_COUNT:
            raise ValueError(f"max_tokens={self.max_tokens} must be in [0, {_MOST_COUNT}]")
        if not self.closes:
            raise ValueError("closes must name a mark")
        for name, spellings in (("opens", self.opens), ("closes", self.closes)):
            if len(spellings) > _MAX_SPELLINGS or not all(spellings):
                raise ValueError(f"{name} must have at most {_MAX_SPELLINGS} marks, none empty")
            if not all(0 <= token <= _MOST_COUNT for mark in spellings for token in mark):
                raise ValueError(f"token ids of {name} must be in [0, {_MOST_COUNT}]")


@record(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters that choose a token from the target's distribution.

    The penalties and biases change the logits before the temperature does, in the order of
    verifier/logit_rules.py.
    """

    max_tokens: int
    """0: the prompt is computed, and no token is chosen."""
    temperature: float = 0.0
    """0, or below 1e-6, is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    """1 is off."""
    min_p: float = 0.0
    """0 is off."""
    seed: int = 0
    """64 bits. It keys the Gumbel noise, so the same seed gives the same text."""
    choice_index: int = 0
    """Which of the request's n choices this is; it keys the noise, too."""
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    """Alternatives reported beside each emitted token. None: no log-probabilities."""
    num_prompt_logprobs: int | None = None
    """Alternatives reported beside each token of the prompt. None: no log-probabilities of it."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that occurs in the answer (OpenAI)."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the token occurs in the answer (OpenAI)."""
    repetition_penalty: float = 1.0
    """For tokens of the prompt or the answer: a positive logit is divided by it, another one
    multiplied (Keskar et al., "CTRL", 2019)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) pairs; the bias is added."""
    min_tokens: int = 0
    """Until the answer has this many tokens, no stop token is possible."""
    thinking: ThinkingBudget | None = None
    """None: it thinks as long as it does."""

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        for value, (name, low, high, allowed) in zip(_bounded_values(self), _BOUNDS, strict=True):
            if not low <= value <= high:
                raise ValueError(f"{name}={value} must be {allowed}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} must be in [0, max_tokens={self.max_tokens}]"
            )
        for name, count in (
            ("num_logprobs", self.num_logprobs),
            ("num_prompt_logprobs", self.num_prompt_logprobs),
        ):
            if count is not None and not 0 <= count <= 20:
                raise ValueError(f"{name}={count} must be None or in [0, 20]")
        if self.stop_token_ids or self.logit_bias:
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
    """A speculative cascade: how far the small model's tokens may stand (verifier/cascade.py)."""

    alpha: float
    """0 trusts the large model most; what it means is the rule's business."""
    rule: CascadeRule = "opt"

    def __post_init__(self) -> None:
        """Raise ValueError for an alpha outside [0, 1]."""
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"alpha={self.alpha} must be in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """How the tokens of a text may have been chosen."""

    sampling: SamplingParams
    noise_tier: Tier
    """The tier whose stream of noise they were drawn with."""
    cascade: CascadeParams | None = None
    """None: by the judging model alone."""
