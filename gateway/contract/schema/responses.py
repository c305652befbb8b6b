"""Answers of chat and completions, and of the gateway about itself, as they are sent.

Chunks of a stream are written by hand for speed (gateway/answering/streaming/sse.py); tests hold
them against these Structs, which allow no field that is not declared.
"""

from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, GetPydanticSchema, JsonValue

from outrider.engine.trace import NodeSource, TokenOrigin
from outrider.gateway.contract.answers.responder import HandOffKind
from outrider.gateway.contract.schema.kinds import UsageSource
from outrider.gateway.contract.schema.receipts import Receipt
from outrider.gateway.contract.schema.structs import CompleteModel, ResponseModel, says
from outrider.verifier.params import Tier

PredictedQuality = Annotated[
    float | None,
    says("The router's prediction, from the prompt, that the small model's answer is good enough."),
]
Confidence = Annotated[
    float | None, says("The prediction from the answer itself that it is good enough.")
]
HeldTokens = Annotated[int, says("Tokens that waited for the decision about the answer.")]
TtftSeconds = Annotated[float | None, says("Seconds until the first token.")]
HandOff = Annotated[HandOffKind | None, says("Why another tier than the first answers.")]
Degraded = Annotated[bool, says("An upstream tier should have answered and could not.")]
NoReceipt = Annotated[str | None, says("Why there is none, where the request asked for one.")]
Arm = Annotated[str | None, says("The experiments' arms of the request, null for none.")]
ReportedServiceTier = Literal["default", "flex", "priority"]


class CachedTokens(CompleteModel):
    """The cached tokens of a prompt, by where they were."""

    device: Annotated[int, says("In the memory of the model's device.")]
    disk: Annotated[int, says("In the folder of keys and values (engine.kv_folder).")]
    peer: Annotated[int, says("In another engine, which sent them for this request.")]


class OutriderReport(ResponseModel):
    """Report about how the request was served; sums over the choices.

    Tiers and reason are null where the key or the alias does not reveal them.
    """

    tier: Annotated[Tier | None, says("It gave the answer.")]
    reason: Annotated[str | None, says("Why this tier gave the answer.")]
    route_tier: Annotated[str | None, says("The request began on this tier.")]
    escalated: Annotated[bool, says("The large tier replaced or continued the answer.")]
    quality: PredictedQuality
    confidence: Confidence
    held_tokens: HeldTokens
    reused_tokens: Annotated[int, says("Tokens given up that the large model produced too.")]
    discarded_tokens: Annotated[int, says("The other tokens that were given up.")]
    drafted_tokens: Annotated[int, says("Tokens that a drafter guessed.")]
    accepted_tokens: Annotated[int, says("Guesses that the tier's model accepted.")]
    unratified_tokens: Annotated[
        int, says("A speculative cascade's that the large model alone would not have chosen.")
    ]
    mean_emitted_tokens: Annotated[float, says("Tokens per pass of the tier's model.")]
    cached_tokens_by_level: CachedTokens
    ttft_s: TtftSeconds
    queue_s: Annotated[float | None, says("Seconds in the queue.")]
    seed: Annotated[int | None, says("Reproduces a sampled answer; null for greedy ones.")]
    hand_off: HandOff
    degraded: Degraded
    arm: Arm
    receipt: Annotated[Receipt | None, says("Where the request asked for one.")] = None
    no_receipt: NoReceipt = None


class UpstreamReport(ResponseModel):
    """Report about a request that an upstream tier served; the rest is the server's answer.

    Tiers, reason and cost are null where the key or the alias does not reveal them.
    """

    tier: Annotated[str | None, says("It gave the answer.")]
    reason: Annotated[str | None, says("Why this tier gave the answer.")]
    route_tier: Annotated[str | None, says("The request began on this tier.")]
    escalated: Annotated[bool, says("The strong tier replaced or continued the answer.")]
    hand_off: HandOff
    degraded: Degraded
    quality: PredictedQuality
    confidence: Confidence
    held_tokens: HeldTokens
    discarded_tokens: Annotated[int, says("Tokens that were given up.")]
    ttft_s: TtftSeconds
    attempts: Annotated[int, says("Attempts that were made.")]
    hedged: Annotated[bool, says("A second attempt ran beside the first.")]
    continuations: Annotated[int, says("How often another replica continued a broken answer.")]
    usage_source: Annotated[UsageSource, says("What counted the tokens.")]
    usage_corrected: Annotated[bool, says("The server's count differed.")]
    cost_usd: Annotated[
        float | None, says("At the operator's prices; null without prices or known tokens.")
    ]
    arm: Arm
    no_receipt: NoReceipt = None


WrittenReport = Annotated[
    msgspec.Raw | None,
    GetPydanticSchema(lambda _, handler: handler(OutriderReport | UpstreamReport | None)),
]
"""A report as it came with a chat answer."""


class TraceTree(ResponseModel):
    """The guesses of one step."""

    step: int
    nodes: Annotated[
        list[tuple[str, int, list[NodeSource], bool]],
        says("Text, parent (-1: the root), source, and whether accepted."),
    ]


class TokenTrace(ResponseModel):
    """With the header `x-outrider-trace: 1`: where the chunk's tokens came from."""

    tokens: Annotated[
        list[tuple[str, bool]], says("The chunk's text by token, and whether it was drafted.")
    ]
    origins: Annotated[list[TokenOrigin] | None, says("One a token: where it came from.")] = None
    steps: Annotated[
        list[int] | None, says("One a token: which of the answer's steps emitted it.")
    ] = None
    trees: Annotated[
        list[TraceTree] | None, says("Of the steps that judged guesses, once each.")
    ] = None


class PromptTokensDetails(ResponseModel):
    """Details of a prompt's tokens."""

    cached_tokens: Annotated[int, says("Tokens that came from the prefix cache.")]


class CompletionTokensDetails(ResponseModel):
    """Details of an answer's tokens."""

    reasoning_tokens: Annotated[int, says("Tokens of thinking, not of the answer.")]
    accepted_prediction_tokens: Annotated[
        int, says("Tokens of the request's prediction that came out where they were expected.")
    ]
    rejected_prediction_tokens: Annotated[
        int, says("Its other tokens: they cost nothing and are no completion tokens.")
    ]
    discarded_tokens: Annotated[
        int,
        says(
            "Tokens, not counted either, that the small model wrote and the large one did not: "
            "its answer was given up."
        ),
    ]


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
    refusal: None


class PromptLogprob(ResponseModel):
    """A token that stands in the prompt, or could have stood there."""

    logprob: float
    rank: Annotated[int, says("Its place among all tokens: 1 is the likeliest.")]
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None] | None,
    says(
        "vLLM's field: one entry a token of the prompt, by token id; null for the first, which "
        "stands behind nothing."
    ),
]
PromptTokenIds = Annotated[list[int] | None, says("vLLM's field: the prompt's tokens.")]
TokenIds = Annotated[list[int] | None, says("vLLM's field: the answer's tokens.")]
SystemFingerprint = Annotated[
    str | None,
    says("Changes with the model and its arithmetic: equal ones give equal seeds equal texts."),
]


class DifferenceReport(ResponseModel):
    """A token that the model would not have written."""

    index: Annotated[int, says("Its place in the answer.")]
    token_id: int
    token: str
    chosen_id: Annotated[int, says("The model's own; -1 where its numbers are not finite.")]
    chosen: str
    gap: Annotated[float, says("How much higher the model's own scores, at most 10.")]


class JudgementReport(ResponseModel):
    """How an answer agrees with one hypothesis."""

    num_tokens: int
    num_matching: int
    total_gap: Annotated[float, says("Of all differences.")]
    differences: Annotated[list[DifferenceReport], says("The first ones.")]


Judgements = Annotated[
    list[JudgementReport] | None, says("Of the answer in `outrider.judge`, by hypothesis.")
]
CompletionFinishReason = Literal["stop", "length"]
ChatFinishReason = CompletionFinishReason | Literal["tool_calls", "function_call"]


class FunctionCall(ResponseModel):
    """Function to call."""

    name: str
    arguments: Annotated[str, says("A JSON object as text; it may be cut by the length limit.")]


StopReason = Annotated[
    str | None, says("vLLM's field: the stop string of the request that ended the answer.")
]


class ToolCall(ResponseModel):
    """A function that the model wants to be called."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(ResponseModel):
    """The answer."""

    role: Literal["assistant"]
    content: Annotated[str | None, says("Null where the answer is nothing but calls.")]
    refusal: None
    reasoning_content: str | None = None
    reasoning: Annotated[str | None, says("By the setting `reasoning_field`.")] = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None


class ChatChoice(ResponseModel):
    """One of the n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason = None
    token_ids: TokenIds = None
    judgements: Judgements = None


class ChatCompletion(ResponseModel):
    """The whole answer to a chat request."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    outrider: OutriderReport
    service_tier: ReportedServiceTier | None = None
    system_fingerprint: SystemFingerprint = None
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: PromptTokenIds = None


class FunctionCallDelta(ResponseModel, kw_only=True):
    """The name comes first, then the arguments piece by piece."""

    name: str | None = None
    arguments: str


class ToolCallDelta(ResponseModel, kw_only=True):
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
    reasoning: Annotated[str | None, says("By the setting `reasoning_field`.")] = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionCallDelta | None = None


class ChatChunkChoice(ResponseModel):
    """The choice that a chunk belongs to."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: StopReason = None
    token_ids: TokenIds = None


class ChatCompletionChunk(ResponseModel):
    """One event of a chat stream; the last one before [DONE] carries the report."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    outrider: OutriderReport | TokenTrace | None = None
    service_tier: ReportedServiceTier | None = None
    system_fingerprint: SystemFingerprint = None
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: PromptTokenIds = None


class CompletionLogprobs(ResponseModel):
    """Parallel lists, one entry a token; null for an echoed prompt's first one."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    """One of the continuations."""

    index: Annotated[int, says("Counts choices within prompts.")]
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionFinishReason | None
    stop_reason: StopReason = None
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: PromptTokenIds = None
    token_ids: TokenIds = None
    judgements: Judgements = None


class Completion(ResponseModel):
    """The continuation(s); also one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    outrider: OutriderReport | TokenTrace | None = None
    service_tier: ReportedServiceTier | None = None
    system_fingerprint: SystemFingerprint = None


class UpstreamCompletion(BaseModel):
    """The whole answer of an upstream tier: its server's own response, with the report put in."""

    model_config = ConfigDict(extra="allow")

    outrider: UpstreamReport


class UpstreamChunk(BaseModel):
    """One event of an upstream tier: its server's own; one of the last carries the report."""

    model_config = ConfigDict(extra="allow")

    choices: list[JsonValue]
    outrider: UpstreamReport | None = None


class Health(ResponseModel):
    """The process is alive."""

    status: Literal["ok"]


class Version(ResponseModel):
    """Release of the gateway."""

    version: str


class ServerLoad(ResponseModel):
    """Load, as vLLM reports it."""

    server_load: Annotated[int, says("Requests that wait or are being answered.")]


class ReplicaCount(ResponseModel):
    """Processes or engine replicas."""

    up: Annotated[int, says("How many of them serve.")]
    of: Annotated[int, says("How many there are.")]


class Readiness(ResponseModel):
    """Readiness for requests."""

    ready: Literal[True]
    workers: Annotated[ReplicaCount | None, says("Of a gateway with several processes.")] = None
    replicas: Annotated[ReplicaCount | None, says("Of a gateway with several engines.")] = None
