"""POST /v1/responses: the request.

As strict as chat's: every field is honoured, ignored because nothing follows from it here, or
refused by name. docs/responses.md has the table.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from outrider.gateway.contract.schema.common import (
    MAX_REQUEST_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    WHOLE,
    CacheBreakpoint,
    CacheOptions,
    EndUser,
    Harmless,
    Ignored,
    Label,
    ListOf,
    LogitBias,
    ModelName,
    Off,
    OptionalModelName,
    OutriderOptions,
    Penalty,
    PositiveCount,
    RequestModel,
    StopString,
    TokenId,
)
from outrider.gateway.contract.schema.kinds import AUTO
from outrider.gateway.contract.schema.structured import JsonObjectFormat, TextFormat
from outrider.gateway.contract.schema.template_variables import TemplateVariables
from outrider.gateway.contract.schema.tools import MAX_TOOLS, FunctionName
from outrider.gateway.http.apis.foreign import Foreign, kind_among
from outrider.gateway.http.apis.responses.fields import (
    ItemStatus,
    NotInBackground,
    NotKnown,
    Stateless,
    UpstreamOnly,
)
from outrider.gateway.http.apis.responses.tools import ResponseTool

MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64

Phase = Literal["commentary", "final_answer"]
SummaryKind = Literal["auto", "concise", "detailed"]
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class InputText(RequestModel):
    """A piece of what is said to the model. Images, audio and files are not supported."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class OutputText(RequestModel):
    """A piece of an earlier answer. Annotations and log-probabilities are not read."""

    type: Literal["output_text"]
    text: str
    annotations: ListOf[JsonValue] | None = None
    logprobs: ListOf[JsonValue] | None = None


class RefusalText(RequestModel):
    """An earlier answer in which the model refused; read as its text."""

    type: Literal["refusal"]
    refusal: str


InputParts = Annotated[ListOf[InputText], Field(min_length=1)]
AnswerPart = Annotated[InputText | OutputText | RefusalText, Field(discriminator="type")]


class MessageItem(RequestModel):
    """A message that instructs or asks."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer"]
    content: str | InputParts
    id: Label | None = None
    status: ItemStatus | None = None
    phase: Phase | None = None


class AnswerItem(RequestModel):
    """A message of an earlier answer, as this API returned it or as the client says it was."""

    type: Literal["message"] = "message"
    role: Literal["assistant"]
    content: str | ListOf[AnswerPart]
    id: Label | None = None
    status: ItemStatus | None = None
    phase: Phase | None = None


class DirectCaller(RequestModel):
    """The model itself made the call."""

    type: Literal["direct"]


class FunctionCallItem(RequestModel):
    """A call in an earlier answer. `arguments` is a JSON object as text; empty for none."""

    type: Literal["function_call"]
    call_id: Label
    name: FunctionName
    arguments: str
    id: Label | None = None
    status: ItemStatus | None = None
    caller: DirectCaller | None = None
    namespace: FunctionName | None = None
    async_: Annotated[Off, Field(alias="async")] = None


class CustomCallItem(RequestModel):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: Label
    name: FunctionName
    input: str
    id: Label | None = None
    status: ItemStatus | None = None
    caller: DirectCaller | None = None
    namespace: FunctionName | None = None
    async_: Annotated[Off, Field(alias="async")] = None


class FunctionOutputItem(RequestModel):
    """Result of a call. Its call comes before it."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Label
    output: str | InputParts
    id: Label | None = None
    status: ItemStatus | None = None
    name: Label | None = None
    caller: DirectCaller | None = None
    namespace: FunctionName | None = None


class SummaryText(RequestModel):
    """A summary of what the model thought; this gateway's are the thoughts themselves."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(RequestModel):
    """The model's thinking."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(RequestModel):
    """Thinking in an earlier answer. What is encrypted cannot be read, and is passed over."""

    type: Literal["reasoning"]
    summary: ListOf[SummaryText] | None = None
    content: ListOf[ReasoningText] | None = None
    encrypted_content: str | None = None
    id: Label | None = None
    status: ItemStatus | None = None


class ReferenceItem(RequestModel):
    """An item of a stored response, which stands in its place."""

    type: Literal["item_reference"]
    id: Label


_KINDS: Final = (
    *("message", "function_call", "function_call_output", "custom_tool_call"),
    *("custom_tool_call_output", "reasoning", "item_reference"),
)


def _kind_of(value: Any) -> str | None:
    """Return the kind of an item; None for an unsupported one. A message's type is optional."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type", "message")
    if kind == "message" and value.get("role") == "assistant":
        return "answer"
    return kind_among(_KINDS, kind)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[AnswerItem, Tag("answer")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[FunctionOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ReferenceItem, Tag("item_reference")]
    | Foreign,
    Discriminator(
        _kind_of,
        custom_error_type="unsupported_item",
        custom_error_message="the `type` of an item must be one of " + ", ".join(_KINDS),
    ),
]


class FunctionChoice(RequestModel):
    """Call this function, or this custom tool."""

    type: Literal["function", "custom"]
    name: FunctionName


class AllowedTools(RequestModel):
    """Call these functions only; the model does not see the others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[ListOf[FunctionChoice], Field(min_length=1, max_length=MAX_TOOLS)]


ResponseToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[FunctionChoice | AllowedTools, Field(discriminator="type")]
)


class SchemaFormat(RequestModel):
    """JSON that conforms to a schema, which is enforced, whatever `strict` says."""

    type: Literal["json_schema"]
    name: Label
    schema_: Annotated[dict[str, JsonValue], Field(alias="schema")]
    description: Annotated[str | None, Field(max_length=4096)] = None
    strict: bool | None = None


class TextConfig(RequestModel):
    """Form of the answer's text."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: UpstreamOnly = None


class ReasoningConfig(RequestModel):
    """Options of the model's thinking. The summary is always the full text."""

    effort: UpstreamOnly = None
    summary: SummaryKind | None = None
    generate_summary: SummaryKind | None = None
    context: Annotated[JsonValue, Harmless((None, "auto"))] = None
    mode: Annotated[JsonValue, Harmless((None, "standard"))] = None


class ResponseCacheOptions(CacheOptions):
    """Ignored like chat's."""

    prewarm: Off = None
    comparison_response_id: Stateless = None


class ResponseStreamOptions(RequestModel):
    """Options of the stream."""

    include_obfuscation: Ignored = None


Input = str | Annotated[ListOf[Item], Field(min_length=1)]


class ResponsesFields(RequestModel):
    """What a response is made of, beside the model and the input."""

    instructions: Annotated[
        str | None, Field(description="A system message in front of the input.")
    ] = None
    max_output_tokens: Annotated[
        PositiveCount | None, Field(description="Of the answer and of the thinking before it.")
    ] = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[ListOf[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[
        PositiveCount | None,
        Field(description="Bounds calls of server-side tools; there are none."),
    ] = None
    include: ListOf[Includable] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARS)], JsonValue],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    service_tier: Literal["auto", "default", "priority", "flex"] | None = None
    user: EndUser | None = None
    safety_identifier: EndUser | None = None
    client_metadata: Ignored = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    prompt_cache_options: ResponseCacheOptions | None = None
    outrider: OutriderOptions | None = None

    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE] | None = None
    stop: StopString | Annotated[ListOf[StopString], Field(max_length=MAX_STOPS)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    logit_bias: LogitBias | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = None
    stop_token_ids: (
        Annotated[ListOf[TokenId], Field(max_length=MAX_REQUEST_STOP_TOKEN_IDS)] | None
    ) = None
    ignore_eos: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    store: Annotated[
        bool | None,
        Field(description="Absent: as true. Nothing is stored without responses.store = true."),
    ] = None
    previous_response_id: Annotated[
        Label | None,
        Field(description="A stored response, whose conversation goes in front of the input."),
    ] = None
    conversation: Stateless = None
    background: NotInBackground = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        Field(description="What is too long is refused, not shortened."),
    ] = None
    prompt: NotKnown = None
    context_management: Ignored = None
    moderation: Ignored = None
    image: NotKnown = None
    access_programs: NotKnown = None

    @property
    def unused_fields(self) -> tuple[str, ...]:
        """The fields that were given and mean services which are not here."""
        names = ("context_management", "moderation")
        unused = tuple(name for name in names if getattr(self, name))
        return (*unused, "truncation") if self.truncation == "auto" else unused

    @property
    def end_user(self) -> str | None:
        """The end user, to whom a stored response is bound."""
        return self.safety_identifier or self.user

    @property
    def is_private(self) -> bool:
        """True if the request itself says that it is private."""
        return self.outrider is not None and self.outrider.privacy == "private"

    @property
    def wants_logprobs(self) -> bool:
        """True if the text's tokens come with their log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


class ResponsesRequest(ResponsesFields):
    """A request for a response."""

    model: ModelName = AUTO
    input: Input


class InputTokensRequest(ResponsesFields):
    """A response's input, to be counted."""

    model: OptionalModelName = None
    input: Annotated[Input | None, Field(description="Absent: an empty text.")] = None
    personality: Ignored = None
