"""The engine's input: a request with its sampling and speculation parameters."""

import math
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

Tier = Literal["small", "large"]
TIERS: tuple[Tier, ...] = get_args(Tier)

# Where a guess came from: the small model, earlier text that repeats, text that the client or
# another tier predicted, a grammar that allows nothing else, or a head that reads the large model.
Source = Literal["model", "suffix", "prediction", "grammar", "head"]
SOURCES: tuple[Source, ...] = get_args(Source)

# How urgent a request is to its queue.
HIGH: Final = 1
NORMAL: Final = 0
LOW: Final = -1

GrammarKind = Literal["json", "json_schema", "regex", "choice", "grammar", "parts"]
CascadeRule = Literal["opt", "token_specific"]

MAX_GRAMMAR_BYTES = 64 * 2**10
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

    The logits are changed before the temperature, in this order (engine/sequences/logit_rules.py):
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
class SpeculationParams:
    """Per-request control of drafting. None means the engine's own setting.

    `sources`: where guesses may come from. `inter_token_s`: the time between two tokens that this
    request asks for; one that is behind gets more of a step's nodes.
    """

    enabled: bool = True
    max_draft_nodes: int | None = None
    max_draft_depth: int | None = None
    sources: tuple[Source, ...] | None = None
    inter_token_s: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        for name in ("max_draft_nodes", "max_draft_depth"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 255:
                raise ValueError(f"{name}={value} must be None or in [0, 255]")
        if self.inter_token_s is not None and not self.inter_token_s > 0:
            raise ValueError(f"inter_token_s={self.inter_token_s} must be None or positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """The grammar that an answer must conform to, as text.

    json: any JSON object (`text` is empty). json_schema: a JSON schema. regex. choice: a JSON list
    of strings. grammar: in the notation of Lark or of llama.cpp (GBNF). parts: free text with
    constrained parts, as JSON (engine/grammar/parts.py).
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for a text over `MAX_GRAMMAR_BYTES`."""
        size_bytes = len(self.text.encode(errors="replace"))
        if size_bytes > MAX_GRAMMAR_BYTES:
            raise ValueError(
                f"a grammar of {size_bytes} bytes is over the limit of {MAX_GRAMMAR_BYTES}"
            )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyObjective:
    """The latency that a request asks for. Seconds; None where it asks for none.

    `ttft_s`: from arrival to the first token. `inter_token_s`: the mean between tokens. is_batch:
    it is not urgent and fills what others leave. refuses: where the first token cannot come
    in time, the request is refused at once instead of being answered late. is_assumed: taken
    from a built-in class; it decides the order, and holds no other request back.
    """

    ttft_s: float | None = None
    inter_token_s: float | None = None
    is_batch: bool = False
    refuses: bool = False
    is_assumed: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        for name in ("ttft_s", "inter_token_s"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ValueError(f"{name}={value} must be None, or positive and finite")

    @property
    def is_stated(self) -> bool:
        """True if there is any wish at all."""
        return self.is_batch or self.ttft_s is not None or self.inter_token_s is not None


NO_OBJECTIVE: Final = LatencyObjective()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """A LoRA adapter of a tier's model: its name, and the folder that holds its files.

    `version`: another one is read anew, also where the folder is the same.
    """

    name: str
    tier: Tier
    folder: str
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to generate. The n choices of an API request are n engine requests.

    `prompt_token_ids` belong to the tokenizer of `tier`. `group_id`, if given, is shared by the
    choices of one API request: the prompt is then computed once. `cache_salt` separates tenants
    in the prefix cache and in what is remembered of earlier answers; `memory_group` separates that
    memory within a tenant, so that arms of an experiment do not draft from each other's answers.
    `arrival_s` is
    `time.monotonic()` at the gateway (one clock per machine). `prediction_token_ids`: what the
    client expects the answer to be like; a source of guesses. `cascade`: None is lossless.
    `may_escalate`: this small answer is under watch. Its tokens' rivals are kept for the large
    tier, and where it ends by itself it is held (`AnswerHeld`) until `settle` or `switch_tier`.
    `tenant` shares the queue's fairness, by `weight` against others; `priority` is HIGH, NORMAL or
    LOW. They and the `objective` decide when the answer starts, never what it is. `traces`: what is
    emitted says where it came from (engine/trace.py). `adapters`: at most one of each tier; the
    tier's answer is that of its model with the adapter. The small model drafts without one.

    `retracted_token_ids`: what the other tier had answered, in another engine, before the request
    changed its tier: the large tier drafts from it, as from an answer that it retracts itself.
    `resumed_token_ids`: the client has this beginning of the answer already, from an engine that
    ended. They count as emitted: they are prefilled behind the prompt and never judged again, and
    the answer goes on with the next token, as it would have done. An empty tuple resumes a request
    of which nothing was emitted; None is a new request. A resumed one is not refused for want of
    room or time.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    tier: Tier
    sampling: SamplingParams
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    group_id: str | None = None
    cache_salt: str = ""
    memory_group: str = ""
    arrival_s: float | None = None
    return_hidden_state: bool = False
    prediction_token_ids: tuple[int, ...] = ()
    grammar: GrammarSpec | None = None
    cascade: CascadeParams | None = None
    may_escalate: bool = False
    tenant: str = ""
    weight: float = 1.0
    priority: int = NORMAL
    objective: LatencyObjective = NO_OBJECTIVE
    traces: bool = False
    adapters: tuple[AdapterRef, ...] = ()
    resumed_token_ids: tuple[int, ...] | None = None
    retracted_token_ids: tuple[int, ...] = ()

    def adapter(self, tier: Tier) -> AdapterRef | None:
        """Return the adapter of a tier's answer; None for the model as it is."""
        return next((ref for ref in self.adapters if ref.tier == tier), None)

    def __post_init__(self) -> None:
        """Raise ValueError for a field that no engine could use."""
        num_resumed = len(self.resumed_token_ids or ())
        if num_resumed > self.sampling.max_tokens:
            raise ValueError(
                f"resumed_token_ids has {num_resumed} tokens, more than max_tokens="
                f"{self.sampling.max_tokens}"
            )
        if len({ref.tier for ref in self.adapters}) < len(self.adapters):
            raise ValueError("adapters has two of one tier")
        if not 0.0 < self.weight < math.inf:
            raise ValueError(f"weight={self.weight} must be positive and finite")
        if self.priority not in (HIGH, NORMAL, LOW):
            raise ValueError(f"priority={self.priority} must be {HIGH}, {NORMAL} or {LOW}")
        if self.arrival_s is not None and not math.isfinite(self.arrival_s):
            raise ValueError(f"arrival_s={self.arrival_s} must be None or finite")
