"""Fields that chat and completion requests share, and `OutriderOptions`.

Requests are strict: no coercion ("1" is not 1), no NaN, no unknown field. Optional OpenAI fields
may be null. What OpenAI has and we have not yet is declared with `Harmless`: the values that mean
"off" pass, anything else is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    JsonValue,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError, core_schema

from outrider.engine.request import MAX_HYPOTHESES
from outrider.gateway.contract.schema.kinds import AUTO, Policy, Prefer
from outrider.verifier.params import MAX_STOP_TOKEN_IDS, CascadeRule, Source

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_LABEL_CHARS = 512
MAX_END_USER_CHARS = 256
MAX_BIASES = 1024
MAX_REQUEST_STOP_TOKEN_IDS = 16
MAX_DEADLINE_MS = 86_400_000
MAX_METADATA = 16


_Item = TypeVar("_Item")
ListOf = Annotated[list[_Item], Field(fail_fast=True)]
"""A list of which only the first wrong item is complained of: one may send a million of them."""


class RequestModel(BaseModel):
    """Base of everything a client sends."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


def without_defaults(schema: dict[str, Any]) -> None:
    """Remove defaults from the schema of an update: absent fields stay as they are."""
    for described in schema["properties"].values():
        described.pop("default", None)


def _same(value: JsonValue, allowed: JsonValue) -> bool:
    """Equality of JSON values: true is not 1, but 0 is 0.0."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


@dataclass(frozen=True, slots=True)
class Harmless:
    """Annotation of a field whose feature is not built: only `values`, which mean "off", pass.

    `why` is the reason given for any other value.
    """

    values: tuple[JsonValue, ...] = (None,)
    why: str = "this value is not supported yet"

    def passes(self, value: JsonValue) -> bool:
        """Return whether this value means "off"."""
        return any(_same(value, allowed) for allowed in self.values)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Refuse every other value with the field's name."""

        def check(value: JsonValue) -> JsonValue:
            if self.passes(value):
                return value
            raise PydanticCustomError("unsupported_value", "{why}", {"why": self.why})

        return core_schema.no_info_plain_validator_function(check)

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        """List the values that pass, so that the OpenAPI document tells the truth."""
        return {"enum": list(self.values), "description": f"{self.why[0].upper()}{self.why[1:]}."}


NotBuilt = Annotated[JsonValue, Harmless()]
EmptyList = Annotated[JsonValue, Harmless((None, []))]
One = Annotated[JsonValue, Harmless((None, 1))]
Off = Annotated[JsonValue, Harmless((None, False))]
Ignored = Annotated[JsonValue, Field(description="Accepted, and changes nothing.")]


def _whole(value: object) -> object:
    """JSON knows no integers: 8.0 is one too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# After the bounds in an Annotated, or pydantic leaves them out of the JSON schema.
WHOLE = BeforeValidator(_whole)
Label = Annotated[str, Field(max_length=MAX_LABEL_CHARS)]
EndUser = Annotated[str, Field(max_length=MAX_END_USER_CHARS)]
OptionalModelName = Annotated[
    str | None, Field(min_length=1, max_length=MAX_LABEL_CHARS, description="Absent: auto.")
]
PositiveCount = Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE]
# llama.cpp's and LM Studio's clients send -1 for no limit.
TokenLimit = Annotated[
    Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE] | None,
    AfterValidator(lambda value: None if value == -1 else value),
]
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
# One spelling for each id, so that no token can have two biases.
TOKEN_ID_PATTERN = "^(0|[1-9][0-9]{0,9})$"
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=TOKEN_ID_PATTERN)], Bias],
    Field(max_length=MAX_BIASES),
    # pydantic says patternProperties, which would let other names pass.
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": TOKEN_ID_PATTERN},
            "additionalProperties": {"type": "number", "minimum": -100.0, "maximum": 100.0},
            "maxProperties": MAX_BIASES,
        }
    ),
]


ModelName = Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)]
Metadata = Annotated[dict[Label, JsonValue], Field(max_length=MAX_METADATA)]
ServiceTierName = Literal["auto", "default", "flex", "priority"]


class StreamOptions(RequestModel):
    """Options of a stream. Ignored, and named as such, when `stream` is false.

    `continuous_usage_stats`: with `include_usage`, every chunk has the usage so far (vLLM's field).
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


class CacheBreakpoint(RequestModel):
    """A position up to which a prompt is to be cached: a hint that it will be wanted again.

    Every prefix is cached here, wherever it ends.
    """

    mode: Literal["explicit"]
    ttl: Label | None = None


class CacheOptions(RequestModel):
    """Options of the prompt cache. `ttl`: a hint that the prompt will be wanted within it."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Label | None = None


class CascadeQuality(RequestModel):
    """A lossy setting: how far the small model's own tokens may stand.

    `cascade` is alpha of the `rule` (default opt); at 1 all tokens are the small model's.
    """

    cascade: Annotated[float, Field(ge=0.0, le=1.0)]
    rule: CascadeRule | None = None


class SloOptions(RequestModel):
    """Latency objectives of a request.

    `class`: one of the server's classes of requests, whose objectives hold where the request sets
    none. `ttft_ms`: from arrival to the first token; a request that cannot meet it any more is
    refused with status 429. `inter_token_ms` is the mean time between two tokens: a request that
    misses it gets a larger share of the drafted tokens of a step.
    """

    class_: Annotated[Label | None, Field(alias="class")] = None
    ttft_ms: Annotated[float, Field(ge=0.01, le=3_600_000)] | None = None
    inter_token_ms: Annotated[float, Field(ge=0.01, le=3_600_000)] | None = None


class HypothesisOptions(RequestModel):
    """How the tokens of an answer may have been chosen; absent: greedily, without a rule."""

    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] = 0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Field(ge=0, le=2**64 - 1), WHOLE] = 0
    choice: Annotated[int, Field(ge=0, lt=MAX_CHOICES), WHOLE] = 0
    tier: Literal["small", "large"] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    logit_bias: LogitBias | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] = 0
    stop_token_ids: Annotated[ListOf[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    quality: Literal["lossless"] | CascadeQuality | None = None


class JudgeOptions(RequestModel):
    """Asks whether an answer is what the model would have written; `max_tokens` must be 0."""

    token_ids: Annotated[ListOf[TokenId], Field(min_length=1)]
    hypotheses: Annotated[ListOf[HypothesisOptions], Field(min_length=1, max_length=MAX_HYPOTHESES)]


class OutriderOptions(RequestModel):
    """The request's `outrider` object: how this request uses the two models."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    speculation: Literal["on", "off"] | None = None
    max_draft_nodes: Annotated[int, Field(ge=0, le=255), WHOLE] | None = None
    """Nodes of the token tree of one step at most, beside its root."""
    max_draft_depth: Annotated[int, Field(ge=0, le=255), WHOLE] | None = None
    """Levels of that tree at most."""
    sources: Annotated[ListOf[Source], Field(max_length=16)] | None = None
    """Where its guesses may come from."""
    slo: SloOptions | None = None
    quality: Literal["lossless"] | CascadeQuality | None = None
    """The large model's own distribution (lossless, the default), or a speculative cascade of both
    models."""
    tier: Label | None = None
    """Takes the choice from the router: a local model or an upstream tier."""
    prefer: Prefer | None = None
    """What counts first where `auto` has a choice: the tier that is expected to answer first, the
    cheapest that keeps `min_quality`, or the large model unless the router is sure."""
    min_quality: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Accuracy that `auto` is to keep, as a share of what the large model alone has."""
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Or: the estimated quality from which on the small model's answer stands."""
    hold_back_tokens: Annotated[int, Field(ge=1, le=512), WHOLE] | None = None
    """How much of an answer under watch is held back at most."""
    hold_back_ms: Annotated[float, Field(ge=0.01, le=3_600_000)] | None = None
    """For how long at most."""
    max_cost_usd: Annotated[float, Field(gt=0.0)] | None = None
    """Bounds what the request may cost at the server's prices: a tier that could cost more does not
    answer."""
    fit_context: bool | None = None
    """Where prompt and max_tokens do not fit the context together, the answer may be as long as the
    context leaves."""
    policy: Policy | None = None
    """What may answer: models of this machine (local), or upstream servers (cloud)."""
    privacy: Literal["private"] | None = None
    """Nothing of a private request leaves this machine."""
    cache: Literal["on", "off"] | None = None
    """An equal request gets the first one's answer; on needs a seed or temperature 0."""
    retention_s: Annotated[float, Field(ge=0.0, le=86_400.0)] | None = None
    """A hint: the prompt will be wanted within so long. Its place in the cache is taken later than
    others', within the tenant's share."""
    deadline_ms: Annotated[float, Field(gt=0.0, le=MAX_DEADLINE_MS)] | None = None
    """Time for the whole answer, from the request's arrival."""
    receipt: bool | None = None
    """The answer has a signed receipt, by which it can be verified later."""
    judge: JudgeOptions | None = None
    """An answer to the prompt that is judged, not written: what /v1/verify asks of a model."""

    def preferred(self, by_key: Prefer | None, usual: Prefer | None) -> Prefer | None:
        """Return what counts first: by the request, else by its key, else as `usual`.

        An alias's word is among the request's options, and an arm's where the request has none.
        None beside a threshold, which is a choice of its own.
        """
        return None if self.threshold is not None else self.prefer or by_key or usual

    @property
    def needs_both_models(self) -> bool:
        """True if both models have a part in each token: in a cascade, or in judging one."""
        judged = () if self.judge is None else self.judge.hypotheses
        qualities = (self.quality, *(each.quality for each in judged))
        return any(isinstance(quality, CascadeQuality) for quality in qualities)

    @property
    def has_extras(self) -> bool:
        """True if more is asked of the tokens than text and log-probabilities of the answer."""
        return bool(self.receipt) or self.judge is not None


class GenerationFields(RequestModel):
    """Sampling, length, streaming and routing: the same in chat and completions."""

    model: ModelName = AUTO
    max_tokens: Annotated[
        TokenLimit,
        Field(
            description="Absent, or -1: what is left of the context, up to the server's default. "
            "0: the prompt is computed, and nothing is written."
        ),
    ] = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[
        Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE] | None,
        Field(description="0 and -1 are off."),
    ] = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE] | None = None
    stop: StopString | Annotated[ListOf[StopString], Field(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    outrider: OutriderOptions | None = None

    user: EndUser | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: Annotated[
        ServiceTierName | None,
        Field(description="Its place in a full queue: priority before default before flex."),
    ] = None
    cache_salt: Annotated[
        Label | None,
        Field(description="Separates its prefix cache from those of the tenant's other salts."),
    ] = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    safety_identifier: EndUser | None = None

    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[
        Annotated[float, Field(gt=0.0, le=10.0)] | None,
        Field(description="Over prompt and answer; 1 is off."),
    ] = None
    logit_bias: Annotated[
        LogitBias | None,
        Field(description="Maps a token id, as a string, to the value added to its logit."),
    ] = None
    min_tokens: Annotated[
        Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None,
        Field(description="An answer has at least this many tokens; at most max_tokens."),
    ] = None
    stop_token_ids: Annotated[
        Annotated[ListOf[TokenId], Field(max_length=MAX_REQUEST_STOP_TOKEN_IDS)] | None,
        Field(description="They end an answer beside the tokenizer's own, and have no text."),
    ] = None
    ignore_eos: Annotated[
        bool | None, Field(description="The tokenizer's own stop tokens do not end an answer.")
    ] = None

    prompt_logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None,
        Field(
            description="vLLM's field; log-probabilities of the prompt's tokens, each with so many "
            "alternatives."
        ),
    ] = None
    return_token_ids: Annotated[
        bool | None,
        Field(description="vLLM's field; true: the answer names the tokens of prompt and choices."),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None,
        Field(
            description="vLLM's field; true: tokens of log-probabilities are named token_id:123. "
            "Used with `logprobs`; else ignored, and named as such."
        ),
    ] = None

    @property
    def has_extras(self) -> bool:
        """True if more is asked of the tokens than text and log-probabilities of the answer."""
        wants_ids = self.return_token_ids or self.return_tokens_as_token_ids
        if wants_ids or self.prompt_logprobs is not None:
            return True
        return self.outrider is not None and self.outrider.has_extras

    @property
    def end_user(self) -> str:
        """The end user, as the request names it; empty where it names none."""
        return self.safety_identifier or self.user or ""

    @property
    def idle_fields(self) -> tuple[str, ...]:
        """The fields that were given and do nothing here, or nothing without another one."""
        idle = ("store",) if self.store else ()
        return (*idle, "stream_options") if self.wants_usage_chunk and not self.stream else idle

    @property
    def wants_usage_chunk(self) -> bool:
        """True if a stream ends with a chunk that carries `usage`."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """True if each chunk carries the usage so far."""
        options = self.stream_options
        return self.wants_usage_chunk and bool(options and options.continuous_usage_stats)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, however they were given; an empty one stops nothing."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in given if stop)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """Return the request with these values of the fields that it does not set."""
        new = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return self.model_copy(update=new) if new else self
