"""Answers of /v1/responses: the shapes of /openapi.json.

They are written by hand (writer.py, output.py); tests hold them against these models, which allow
no field that is not declared, and against the types of OpenAI's own client.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, JsonValue, RootModel

from outrider.gateway.contract.answers.responder import HandOffKind
from outrider.gateway.contract.schema.responses import (
    OutriderReport,
    TokenLogprob,
    TokenTrace,
    UpstreamReport,
)
from outrider.gateway.contract.schema.structs import ResponseModel, says
from outrider.gateway.contract.schema.structured import JsonObjectFormat, TextFormat
from outrider.gateway.http.apis.responses.fields import ItemStatus
from outrider.gateway.http.apis.responses.request import (
    InputTokensRequest,
    ResponsesRequest,
    ResponseToolChoice,
    SchemaFormat,
)
from outrider.gateway.http.apis.tokenize_schema import InputTokens


class SummaryPart(ResponseModel):
    """The model's thinking: the full text, not a summary of it."""

    type: Literal["summary_text"]
    text: str


class OutputTextPart(ResponseModel):
    """Text of the answer."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[JsonValue], Field(max_length=0)]
    logprobs: Annotated[list[TokenLogprob], says("Empty unless they were requested.")]


class OutputRefusalPart(ResponseModel):
    """An upstream tier says that it will not answer."""

    type: Literal["refusal"]
    refusal: str


class ReasoningOutput(ResponseModel):
    """Thinking. Send it back with the next request, as every item of the output."""

    type: Literal["reasoning"]
    id: str
    summary: list[SummaryPart]
    status: ItemStatus


class MessageOutput(ResponseModel):
    """A message; one part is in it as soon as it is complete."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[Annotated[OutputTextPart | OutputRefusalPart, Field(discriminator="type")]]


class CallOutput(ResponseModel, kw_only=True):
    """A function to call."""

    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Annotated[str, says("A JSON object as text; of an incomplete call, a part.")]


class CustomCallOutput(ResponseModel, kw_only=True):
    """A custom tool to call."""

    type: Literal["custom_tool_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    input: Annotated[str, says("The text for the tool; of an incomplete call, a part.")]


OutputItem = Annotated[
    ReasoningOutput | MessageOutput | CallOutput | CustomCallOutput, Field(discriminator="type")
]


class ResponseFailure(ResponseModel):
    """Reason why an answer broke off."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str
    type: str
    param: str | None


class IncompleteDetails(ResponseModel):
    """Reason why an answer is not complete."""

    reason: Literal["max_output_tokens", "content_filter"]


class InputTokensDetails(ResponseModel):
    """Details of a prompt's tokens."""

    cached_tokens: Annotated[int, says("Tokens that came from the prefix cache.")]
    cache_write_tokens: Annotated[Literal[0], says("What is written to the cache is not counted.")]


class OutputTokensDetails(ResponseModel):
    """Details of an answer's tokens."""

    reasoning_tokens: Annotated[int, says("Tokens of thinking, not of the answer.")]


class ResponseUsage(ResponseModel):
    """Tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class RepeatedTool(ResponseModel):
    """A function that the request offered."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, JsonValue] | None
    strict: bool


class RepeatedText(ResponseModel):
    """The request's `text`."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")]
    verbosity: str


class RepeatedReasoning(ResponseModel):
    """The request's `reasoning`."""

    effort: str | None
    summary: str | None


class BrokenOffReport(ResponseModel):
    """Report about an answer that broke off: its delivered part."""

    code: Annotated[str | None, says("The error's own code.")]
    tier: str | None = None
    reason: str | None = None
    hand_off: HandOffKind | None = None
    degraded: bool | None = None
    completion_tokens: int | None = None


class ResponseObject(ResponseModel, kw_only=True):
    """A response."""

    id: Annotated[str, says("With `store` true, this can be asked for again.")]
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    service_tier: str | None
    outrider: OutriderReport | UpstreamReport | BrokenOffReport | None = None

    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: RepeatedReasoning
    safety_identifier: str | None
    store: Annotated[bool, says("Whether it is stored; never where the request was private.")]
    temperature: float
    text: RepeatedText
    tool_choice: ResponseToolChoice
    tools: list[RepeatedTool | dict[str, JsonValue]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class DeletedResponse(ResponseModel):
    """A stored response is forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(ResponseModel):
    """A page of the items that the model read: those of earlier responses, too."""

    object: Literal["list"]
    data: Annotated[list[dict[str, JsonValue]], says("Items of a request, each with an id.")]
    first_id: str | None
    last_id: str | None
    has_more: bool


class _Event(ResponseModel):
    """Base of the events."""

    sequence_number: Annotated[int, says("Counts the stream's events.")]


class ResponseStateEvent(_Event):
    """The response as it is: at the beginning without output, at the end with all of it."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class ItemEvent(_Event):
    """An item begins, or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _ItemText(_Event):
    """Something about the text of an item."""

    item_id: str
    output_index: int


class PartEvent(_ItemText):
    """The part of a message begins, or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: Annotated[OutputTextPart | OutputRefusalPart, Field(discriminator="type")]


class TextDeltaEvent(_ItemText):
    """More of the text."""

    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]
    outrider: TokenTrace | None = None


class TextDoneEvent(_ItemText):
    """All of the text."""

    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class RefusalDeltaEvent(_ItemText):
    """More of a refusal."""

    type: Literal["response.refusal.delta"]
    content_index: int
    delta: str


class RefusalDoneEvent(_ItemText):
    """All of a refusal."""

    type: Literal["response.refusal.done"]
    content_index: int
    refusal: str


class SummaryPartEvent(_ItemText):
    """Thinking begins, or is complete."""

    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    summary_index: int
    part: SummaryPart


class SummaryDeltaEvent(_ItemText):
    """More of the thinking."""

    type: Literal["response.reasoning_summary_text.delta"]
    summary_index: int
    delta: str
    outrider: TokenTrace | None = None


class SummaryDoneEvent(_ItemText):
    """All of the thinking."""

    type: Literal["response.reasoning_summary_text.done"]
    summary_index: int
    text: str


class ArgumentsDeltaEvent(_ItemText):
    """More of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str
    outrider: TokenTrace | None = None


class ArgumentsDoneEvent(_ItemText):
    """All of a call's arguments."""

    type: Literal["response.function_call_arguments.done"]
    arguments: str


class CustomInputDeltaEvent(_ItemText):
    """The text for a custom tool, all at once."""

    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class CustomInputDoneEvent(_ItemText):
    """All of the text for a custom tool."""

    type: Literal["response.custom_tool_call_input.done"]
    input: str


class ResponseEvent(
    RootModel[
        Annotated[
            ResponseStateEvent
            | ItemEvent
            | PartEvent
            | TextDeltaEvent
            | TextDoneEvent
            | RefusalDeltaEvent
            | RefusalDoneEvent
            | SummaryPartEvent
            | SummaryDeltaEvent
            | SummaryDoneEvent
            | ArgumentsDeltaEvent
            | ArgumentsDoneEvent
            | CustomInputDeltaEvent
            | CustomInputDoneEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """One event of a stream; the last one is completed, incomplete or failed."""


RESPONSES_MODELS: Final[tuple[type, ...]] = (
    ResponsesRequest,
    InputTokensRequest,
    InputTokens,
    ResponseObject,
    ResponseEvent,
    DeletedResponse,
    InputItemList,
)
"""Models that the operation refers to."""
