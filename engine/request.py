"""What goes into the engine: one request, its sampling and speculation parameters."""

from dataclasses import dataclass, field
from typing import Literal, get_args

Tier = Literal["small", "large"]
TIERS: tuple[Tier, ...] = get_args(Tier)

# Noise moves the argmax only between logits less than 26 temperatures apart; far below this one,
# logits / temperature overflow float32 and any token could win.
_GREEDY_BELOW = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a token is chosen from the target's distribution.

    `temperature` 0 (or below 1e-6) is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed`
    (64 bits) and `choice_index` (which of the request's n choices this is) key the Gumbel noise, so
    the same seed gives the same text. `num_logprobs`: None for none, else how many alternatives are
    reported beside the emitted token.
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

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        checks = (
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "in [0, 100]"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("seed", self.seed, 0 <= self.seed < 2**64, "in [0, 2**64)"),
            ("choice_index", self.choice_index, self.choice_index >= 0, "0 or more"),
        )
        for name, value, ok, allowed in checks:
            if not ok:
                raise ValueError(f"{name}={value} must be {allowed}")
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= 20:
            raise ValueError(f"num_logprobs={self.num_logprobs} must be None or in [0, 20]")

    @property
    def is_greedy(self) -> bool:
        """Whether the noise is switched off."""
        return self.temperature < _GREEDY_BELOW


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """Per-request control of drafting. None means the engine's own setting."""

    enabled: bool = True
    max_draft_nodes: int | None = None
    max_draft_depth: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        for name in ("max_draft_nodes", "max_draft_depth"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 255:
                raise ValueError(f"{name}={value} must be None or in [0, 255]")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to generate. The n choices of an API request are n engine requests.

    `prompt_token_ids` belong to the tokenizer of `tier`. `group_id`, if given, is shared by the
    choices of one API request: the prompt is then computed once. `cache_salt` separates tenants
    in the prefix cache. `arrival_s` is `time.monotonic()` at the gateway (one clock per machine).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    tier: Tier
    sampling: SamplingParams
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    group_id: str | None = None
    cache_salt: str = ""
    arrival_s: float | None = None
    return_hidden_state: bool = False
