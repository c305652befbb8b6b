"""Responses of the gateway: the shapes of /openapi.json.

Responses are written by hand for speed (gateway/answering/streaming/sse.py); tests hold them
against these models, which allow no field that is not declared.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from outrider.engine.trace import NodeSource, TokenOrigin
from outrider.gateway.contract.answers.responder import HandOffKind
from outrider.gateway.contract.schema.kinds import ModelCapability, ServerKind, UsageSource
from outrider.verifier.params import Tier


class ResponseModel(BaseModel):
    """Base of everything the gateway sends."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class OutriderReport(ResponseModel):
    """Report about how the request was served. Seconds; sums over the choices.

    Tiers, reason and cost are null where the key or the alias does not reveal them.

    `tier` gave the answer and `reason` says why; the request began on `route_tier`, and `escalated`
    is true if the large tier replaced or continued its answer. `quality` is the router's
    prediction,
    from the prompt, that the small model's answer is good enough, `confidence` the prediction from
    the answer itself; null if there is none. `held_tokens` waited for that decision. Of the tokens
    that were given up, `reused_tokens` were produced by the large model too; `discarded_tokens` are
    the rest. `mean_emitted_tokens` is tokens per pass of the tier's model; `seed` reproduces a
    sampled answer and is null for greedy ones. `unratified_tokens` are those of a speculative
    cascade
    that the large model alone would not have chosen. `hand_off`: why another tier than the first
    answers; `degraded`: an upstream tier should have answered and could not. `arm`: the
    experiments'
    arms that the request was assigned to, null for none.
    """

    tier: Tier | None
    reason: str | None
    route_tier: str | None
    escalated: bool
    quality: float | None
    confidence: float | None
    held_tokens: int
    reused_tokens: int
    discarded_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    unratified_tokens: int
    mean_emitted_tokens: float
    ttft_s: float | None
    queue_s: float | None
    seed: int | None
    hand_off: HandOffKind | None
    degraded: bool
    arm: str | None


class UpstreamReport(ResponseModel):
    """Report about a request that an upstream tier served; the rest is the server's answer.

    `tier`, `reason`, `route_tier`, `escalated`, `hand_off`, `quality`, `confidence`, `arm` and the
    tokens held and discarded are as in `OutriderReport`. `attempts` were made; `hedged`: a second
    one ran beside the first; `continuations`: how often another replica continued a broken answer.
    `usage_source` is the counter of the tokens, `usage_corrected` says that the server's count
    differed. `cost_usd` at the operator's prices; null without prices or known tokens.
    """

    tier: str | None
    reason: str | None
    route_tier: str | None
    escalated: bool
    hand_off: HandOffKind | None
    degraded: bool
    quality: float | None
    confidence: float | None
    held_tokens: int
    discarded_tokens: int
    ttft_s: float | None
    attempts: int
    hedged: bool
    continuations: int
    usage_source: UsageSource
    usage_corrected: bool
    cost_usd: float | None
    arm: str | None


class TraceTree(ResponseModel):
    """The guesses of one step: text, parent (-1: the root), source, and whether accepted."""

    step: int
    nodes: list[tuple[str, int, list[NodeSource], bool]]


class TokenTrace(ResponseModel):
    """With the header `x-outrider-trace: 1`: the chunk's text by token, and which were drafted.

    `origins` and `steps`, one a token: where it came from, and which of the answer's steps emitted
    it. `trees` of the steps that judged guesses, once each.
    """

    tokens: list[tuple[str, bool]]
    origins: list[TokenOrigin] = []
    steps: list[int] = []
    trees: list[TraceTree] = []


class PromptTokensDetails(ResponseModel):
    """`cached_tokens` came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(ResponseModel):
    """`reasoning_tokens` were thinking, not answer.

    `accepted_prediction_tokens` of the request's prediction came out in the answer where they were
    expected; `rejected_prediction_tokens` are the others, which cost nothing and are not counted as
    completion tokens. `discarded_tokens`, not counted either, the small model wrote and the large
    one did not: its answer was given up.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    discarded_tokens: int


class Usage(ResponseModel):
    """Tokens; a prompt with n choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(ResponseModel):
    """A token that could have stood here."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """An emitted token, under the model's own distribution (temperature 1)."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """Log-probabilities of the answer's tokens, without thinking."""

    content: list[TokenLogprob]
    refusal: None = None


CompletionFinishReason = Literal["stop", "length"]
ChatFinishReason = CompletionFinishReason | Literal["tool_calls"]


class FunctionCall(ResponseModel):
    """Function to call. `arguments` is a JSON object as text; it may be cut by the length limit."""

    name: str
    arguments: str


StopReason = Annotated[
    str | None,
    Field(description="vLLM's field: the stop string of the request that ended the answer."),
]


class ToolCall(ResponseModel):
    """A function that the model wants to be called."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(ResponseModel):
    """The answer. `content` is null where it is nothing but calls."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(ResponseModel):
    """One of the n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason = None


class ChatCompletion(ResponseModel):
    """The whole answer to a chat request."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    outrider: OutriderReport
    service_tier: Literal["default", "flex", "priority"] | None = None


class FunctionCallDelta(ResponseModel):
    """The name comes first, then the arguments piece by piece."""

    name: str | None = None
    arguments: str


class ToolCallDelta(ResponseModel):
    """Part of the call with this index; the first one has id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class ChatDelta(ResponseModel):
    """Fields that a chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ResponseModel):
    """The choice that a chunk belongs to."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: StopReason = None


class ChatCompletionChunk(ResponseModel):
    """One event of a chat stream; the last one before [DONE] carries the report."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    outrider: OutriderReport | TokenTrace | None = None
    service_tier: Literal["default", "flex", "priority"] | None = None


class CompletionLogprobs(ResponseModel):
    """Parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    """One of the continuations; `index` counts choices within prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionFinishReason | None
    stop_reason: StopReason = None


class Completion(ResponseModel):
    """The continuation(s); also one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    outrider: OutriderReport | TokenTrace | None = None
    service_tier: Literal["default", "flex", "priority"] | None = None


class UpstreamCompletion(BaseModel):
    """The whole answer of an upstream tier: its server's own response, with the report put in."""

    model_config = ConfigDict(extra="allow")

    outrider: UpstreamReport


class UpstreamChunk(BaseModel):
    """One event of an upstream tier: its server's own; one of the last carries the report."""

    model_config = ConfigDict(extra="allow")

    choices: list[JsonValue]
    outrider: UpstreamReport | None = None


class TokenPricing(ResponseModel):
    """Prices of tokens in USD, as decimal texts.

    `prompt`: of a prompt's token; `input_cache_read`: of one found in the cache; `completion`: of
    an answer's token.
    """

    prompt: str
    input_cache_read: str
    completion: str


class LongPromptPricing(TokenPricing):
    """Prices of all tokens of a request whose prompt has more than `above` tokens."""

    above: int


class Pricing(TokenPricing):
    """Prices of tokens. `long_prompts` is there where a long prompt makes a request dearer."""

    currency: Literal["USD"]
    long_prompts: list[LongPromptPricing] | None = None


class TierCard(ResponseModel):
    """The checkpoint behind a tier. `pricing` is there where the operator has set prices.

    `tool_format`: the text in which the model writes calls of tools.
    """

    tier: Tier
    model_id: str
    max_context: int
    num_parameters: int
    dtype: str
    device: str
    capabilities: list[ModelCapability]
    tool_format: str
    pricing: Pricing | None = None


class UpstreamCard(ResponseModel):
    """A tier that is an upstream server.

    `model_id` is what the server is asked for, null where it names no model; `max_context` is null
    where it is unknown.
    """

    tier: str
    model_id: str | None
    max_context: int | None
    server: ServerKind
    capabilities: list[ModelCapability]
    pricing: Pricing | None = None


class ModelCard(ResponseModel):
    """A name that `model` accepts.

    `tier` is null where several may answer; `max_context` and `pricing` are the largest and the
    dearest then, null where they are unknown.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    tier: str | None
    max_context: int | None
    pricing: Pricing | None
    outrider: Annotated[
        list[TierCard | UpstreamCard],
        Field(description="Which checkpoints may answer, and which upstream servers."),
    ]


class ModelList(ResponseModel):
    """Every name that `model` accepts."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(ResponseModel):
    """The process is alive."""

    status: Literal["ok"]


class ReplicaCount(ResponseModel):
    """Processes or engine replicas: how many of them serve."""

    up: int
    of: int


class Readiness(ResponseModel):
    """Readiness for requests. `workers`: of a gateway with several processes; `replicas`: of one
    with several engines."""

    ready: Literal[True]
    workers: ReplicaCount | None = None
    replicas: ReplicaCount | None = None
