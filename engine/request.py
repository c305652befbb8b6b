"""The engine's input: a request with its sampling and speculation parameters."""

import math
from dataclasses import dataclass, field
from typing import Final, Literal

from outrider.verifier.params import (
    CascadeParams,
    Hypothesis,
    SamplingParams,
    Source,
    Tier,
    record,
)

# How urgent a request is to its queue.
HIGH: Final = 1
NORMAL: Final = 0
LOW: Final = -1

GrammarKind = Literal["json", "json_schema", "regex", "choice", "grammar", "parts"]

MAX_GRAMMAR_BYTES = 64 * 2**10
"""Of one schema, expression, grammar or choice."""
MAX_PARTS_BYTES = 512 * 2**10
"""Of an answer's parts, such as many tools."""

MAX_RETENTION_S: Final = 86_400.0

MAX_HYPOTHESES: Final = 8
"""Of how one text was written."""
MAX_PROMPT_LOGPROBS: Final = 2**16
"""Log-probabilities of one prompt's tokens, each with its alternatives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """Per-request control of drafting. None means the engine's own setting."""

    enabled: bool = True
    max_draft_nodes: int | None = None
    max_draft_depth: int | None = None
    sources: tuple[Source, ...] | None = None
    """The sources that may guess."""
    inter_token_s: float | None = None
    """The time between two tokens that this request asks for. One that is behind gets more of a
    step's nodes."""

    @property
    def may_guess(self) -> bool:
        """True unless the request wants no guess at all."""
        return self.enabled and self.max_draft_nodes != 0 and self.sources != ()

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
    """The grammar that an answer must conform to, as text."""

    kind: GrammarKind
    """json: any JSON object. json_schema, regex: as named. choice: a JSON list of strings. grammar:
    in the notation of Lark or of llama.cpp (GBNF). parts: free text with constrained parts, as JSON
    (engine/grammar/grammar_parts.py)."""
    text: str = ""
    """Empty for json."""

    def __post_init__(self) -> None:
        """Raise ValueError for a text over its limit."""
        size_bytes = len(self.text.encode(errors="replace"))
        max_bytes = MAX_PARTS_BYTES if self.kind == "parts" else MAX_GRAMMAR_BYTES
        if size_bytes > max_bytes:
            raise ValueError(f"a grammar of {size_bytes} bytes is over the limit of {max_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyObjective:
    """The latency that a request asks for. Seconds; None where it asks for none."""

    ttft_s: float | None = None
    """From arrival to the first token."""
    inter_token_s: float | None = None
    """The mean between tokens."""
    is_batch: bool = False
    """It is not urgent and fills what others leave."""
    is_yielding: bool = False
    """It is batch, and stands still while any other request is answered."""
    refuses: bool = False
    """If the first token cannot come in time, the request is refused at once."""
    is_assumed: bool = False
    """Taken from a built-in class. It decides the order, and holds no other request back."""

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
class Verification:
    """Asks whether the end of a prompt is what a model would have written behind the rest."""

    num_tokens: int
    """The prompt's last ones, which are judged."""
    hypotheses: tuple[Hypothesis, ...]
    """How they may have been chosen."""

    @property
    def is_of_cascade(self) -> bool:
        """True if a hypothesis needs the small model's distributions too."""
        return any(each.cascade is not None for each in self.hypotheses)

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens={self.num_tokens} must be positive")
        if not 1 <= len(self.hypotheses) <= MAX_HYPOTHESES:
            raise ValueError(
                f"hypotheses has {len(self.hypotheses)} entries, must have 1 to {MAX_HYPOTHESES}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """A LoRA adapter of a tier's model."""

    name: str
    tier: Tier
    folder: str
    """Holds its files."""
    version: str = ""
    """Another version is read anew, also where the folder is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSource:
    """Another engine that has blocks of a request's text, or is computing them."""

    endpoint: str
    """Where it listens."""
    num_tokens: int
    """How much of the text it has, or will have."""
    wait_s: float
    """So long it is worth waiting for, where the engine cannot tell what computing would take."""
    is_only: bool = False
    """Nothing is computed: the request ends when the blocks have come, or do not come."""

    def __post_init__(self) -> None:
        """Raise ValueError for a wait that is none."""
        if not (math.isfinite(self.wait_s) and self.wait_s >= 0):
            raise ValueError(f"wait_s={self.wait_s} must be finite, and 0 or positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A wish to keep a prompt's keys and values, under a name of its tenant."""

    name: str
    ttl_s: float
    """How long, from when they are computed."""

    def __post_init__(self) -> None:
        """Raise ValueError for a time that is none."""
        if not 0.0 < self.ttl_s < math.inf:
            raise ValueError(f"ttl_s={self.ttl_s} must be positive and finite")


@record(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to generate. The n choices of an API request are n engine requests.

    `tenant`, `weight`, `priority` and `objective` decide when the answer starts, never what it is.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    """Ids of the tokenizer of `tier`."""
    tier: Tier
    sampling: SamplingParams
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    group_id: str | None = None
    """Shared by the choices of one API request: the prompt is then computed once."""
    cache_salt: str = ""
    """Separates tenants in the prefix cache and in what is remembered of earlier answers."""
    memory_group: str = ""
    """Separates what is remembered within a tenant. So arms of an experiment do not draft from each
    other's answers."""
    arrival_s: float | None = None
    """`time.monotonic()` at the gateway (one clock per machine)."""
    return_hidden_state: bool = False
    prediction_token_ids: tuple[int, ...] = ()
    """Tokens that the client expects in the answer; a source of guesses."""
    grammar: GrammarSpec | None = None
    cascade: CascadeParams | None = None
    """None is lossless."""
    may_escalate: bool = False
    """This small answer is under watch. Its tokens' rivals are kept for the large tier. Where it
    ends by itself, it is held (`AnswerHeld`) until `keep_on_tier` or `switch_tier`."""
    tenant: str = ""
    """Shares the queue's fairness."""
    weight: float = 1.0
    """The tenant's, against other tenants."""
    priority: int = NORMAL
    """HIGH, NORMAL or LOW."""
    objective: LatencyObjective = NO_OBJECTIVE
    traces: bool = False
    """What is emitted says where it came from (engine/trace.py)."""
    adapters: tuple[AdapterRef, ...] = ()
    """At most one of each tier; the tier's answer is that of its model with the adapter. The small
    model drafts without one."""
    resumed_token_ids: tuple[int, ...] | None = None
    """The answer's beginning, which the client has already, from an engine that ended. It counts as
    emitted: it is prefilled behind the prompt and never judged again. An empty tuple resumes a
    request of which nothing was emitted; None is a new request. A resumed request is not refused
    for want of room or time."""
    retracted_token_ids: tuple[int, ...] = ()
    """What the other tier had answered, in another engine, before the request changed its tier. The
    large tier drafts from it, as from an answer that it retracts itself."""
    source: BlockSource | None = None
    """Where blocks of its text can be had. Without it, or where nothing comes, they are computed.
    """

    verification: Verification | None = None
    """The prompt's end is judged; `sampling` asks for no token then."""

    retention_s: float = 0.0
    """The text is expected to return within so long: its blocks are evicted later than others', as
    far as the tenant's share goes."""
    pin: Pin | None = None
    """Once the prompt is computed, its full blocks are kept. Refused where they do not fit."""

    @property
    def needs_both_models(self) -> bool:
        """True if both models have a part in each token: in a cascade, or in judging one."""
        judged = self.verification is not None and self.verification.is_of_cascade
        return judged or self.cascade is not None

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
        num_logprobs = num_prompt_logprobs(len(self.prompt_token_ids), self.sampling)
        if num_logprobs > MAX_PROMPT_LOGPROBS:
            raise ValueError(
                f"num_prompt_logprobs={self.sampling.num_prompt_logprobs} means {num_logprobs} "
                f"log-probabilities of this prompt, more than {MAX_PROMPT_LOGPROBS}"
            )
        if self.verification is not None:
            self._check_verification(self.verification)
        if len({ref.tier for ref in self.adapters}) < len(self.adapters):
            raise ValueError("adapters has two of one tier")
        if not 0.0 < self.weight < math.inf:
            raise ValueError(f"weight={self.weight} must be positive and finite")
        if self.priority not in (HIGH, NORMAL, LOW):
            raise ValueError(f"priority={self.priority} must be {HIGH}, {NORMAL} or {LOW}")
        if not 0.0 <= self.retention_s <= MAX_RETENTION_S:
            raise ValueError(f"retention_s={self.retention_s} must be in [0, {MAX_RETENTION_S}]")
        if self.arrival_s is not None and not math.isfinite(self.arrival_s):
            raise ValueError(f"arrival_s={self.arrival_s} must be None or finite")

    def _check_verification(self, verification: Verification) -> None:
        """Raise ValueError for a request that does more than judging."""
        if verification.num_tokens >= len(self.prompt_token_ids):
            raise ValueError("verification needs a token in front of those that it judges")
        has_more = self.sampling.max_tokens or self.sampling.num_prompt_logprobs is not None
        if has_more or self.may_escalate or self.cascade or self.resumed_token_ids:
            raise ValueError("verification stands alone: max_tokens must be 0, and nothing scored")


def num_prompt_logprobs(num_prompt_tokens: int, sampling: SamplingParams) -> int:
    """Count the log-probabilities of a prompt that are asked for, the alternatives among them."""
    num_top = sampling.num_prompt_logprobs
    return 0 if num_top is None else num_prompt_tokens * (num_top + 1)
