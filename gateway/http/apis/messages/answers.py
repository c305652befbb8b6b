"""Answers of /v1/messages: the Structs that are sent, and described in /openapi.json.

The deltas of texts are written by hand for speed (gateway/http/apis/messages/writer.py).
"""

from typing import Annotated, Final, Literal, get_args

from pydantic import Field, JsonValue

from outrider.gateway.contract.schema.errors import DeliveredReport
from outrider.gateway.contract.schema.responses import WrittenReport
from outrider.gateway.contract.schema.structs import ResponseModel, says
from outrider.gateway.http.apis.messages.schema import CountTokensRequest, MessagesRequest
from outrider.gateway.http.apis.tokenize_schema import TokenCount
from outrider.gateway.upstream.dialects.anthropic_words import ERROR_STATUS, MessageStopReason


class AnswerText(ResponseModel):
    """A piece of the answer."""

    type: Literal["text"]
    text: str


class AnswerThinking(ResponseModel):
    """Thinking that precedes the answer."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str, says("Empty for local models.")]


class AnswerRedactedThinking(ResponseModel):
    """Thinking that an upstream tier does not show."""

    type: Literal["redacted_thinking"]
    data: str


class AnswerToolUse(ResponseModel):
    """A tool that the model wants to be run."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]


AnswerBlock = Annotated[
    AnswerText | AnswerThinking | AnswerRedactedThinking | AnswerToolUse,
    Field(discriminator="type"),
]


class ThinkingTokens(ResponseModel):
    """Details of an answer's tokens."""

    thinking_tokens: Annotated[int, says("Tokens of thinking, not of the answer.")]


class DeltaUsage(ResponseModel):
    """Tokens."""

    input_tokens: Annotated[int, says("Without those that were read from the cache.")]
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageUsage(DeltaUsage):
    """The same, and the request's service tier."""

    service_tier: Annotated[Literal["standard", "priority"], says("How urgent the request was.")]


class MessageAnswer(ResponseModel):
    """The whole answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: MessageStopReason
    stop_sequence: str | None
    usage: MessageUsage
    outrider: WrittenReport = None


class BegunMessage(ResponseModel):
    """A message before its first block."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: Annotated[list[JsonValue], Field(max_length=0)]
    stop_reason: None
    stop_sequence: None
    usage: Annotated[MessageUsage, says("Zeros: the last event but one has the numbers.")]


class MessageStart(ResponseModel):
    """The first event, but for pings."""

    type: Literal["message_start"]
    message: BegunMessage


class BlockStart(ResponseModel):
    """A block begins, empty."""

    type: Literal["content_block_start"]
    index: int
    content_block: AnswerBlock


class TextDelta(ResponseModel):
    """More of a text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(ResponseModel):
    """More of a thought."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(ResponseModel):
    """The signature of a thought."""

    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(ResponseModel):
    """More of a call's input, as JSON."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(ResponseModel):
    """More of the block."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[
        TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta, Field(discriminator="type")
    ]


class BlockStop(ResponseModel):
    """The block is whole."""

    type: Literal["content_block_stop"]
    index: int


class EndDelta(ResponseModel):
    """Reason for the end of the answer."""

    stop_reason: MessageStopReason
    stop_sequence: str | None


class MessageDelta(ResponseModel):
    """All blocks are whole."""

    type: Literal["message_delta"]
    delta: EndDelta
    usage: DeltaUsage
    outrider: WrittenReport = None


class MessageStop(ResponseModel):
    """The last event."""

    type: Literal["message_stop"]


class PingEvent(ResponseModel):
    """A sign of life."""

    type: Literal["ping"]


class MessagesErrorDetail(ResponseModel):
    """Description of an error."""

    type: Annotated[str, Field(json_schema_extra={"enum": list(ERROR_STATUS)})]
    message: str


class MessagesError(ResponseModel):
    """Error response of the Messages API."""

    type: Literal["error"]
    error: MessagesErrorDetail


class MessagesErrorEvent(MessagesError):
    """The last event of a stream that fails midway, with what was delivered of the answer."""

    outrider: DeliveredReport | None = None


MessageEvent = (
    MessageStart
    | BlockStart
    | BlockDelta
    | BlockStop
    | MessageDelta
    | MessageStop
    | PingEvent
    | MessagesErrorEvent
)
MESSAGE_EVENTS: Final[tuple[type, ...]] = get_args(MessageEvent)
MESSAGES_MODELS: Final[tuple[type, ...]] = (
    MessagesRequest,
    CountTokensRequest,
    MessageAnswer,
    MessagesError,
    TokenCount,
    *MESSAGE_EVENTS,
)
