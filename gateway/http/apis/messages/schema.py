"""POST /v1/messages: the request.

Fields are strict, as all of ours are. What is accepted and changes nothing is typed `Ignored`;
docs/messages.md says which and why. Tools that run on Anthropic's servers, and what they did for
earlier answers, are left out.
"""

from typing import Annotated, Final, Literal

from pydantic import Field, JsonValue, Tag

from outrider.gateway.contract.schema.common import (
    MAX_STOPS,
    WHOLE,
    EndUser,
    Harmless,
    Ignored,
    Label,
    ListOf,
    ModelName,
    OutriderOptions,
    RequestModel,
    StopString,
)
from outrider.gateway.contract.schema.kinds import AUTO
from outrider.gateway.contract.schema.tools import MAX_TOOLS, FunctionName
from outrider.gateway.http.apis.foreign import Foreign, by_kind

MAX_MESSAGES = 100_000

Direct = Annotated[JsonValue, Harmless((None, ["direct"]))]
Object = dict[str, JsonValue]


class TextBlock(RequestModel):
    """Text. Empty ones are left out."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class Base64Source(RequestModel):
    """A file, in the request itself."""

    type: Literal["base64"]
    media_type: Label
    data: str


class UrlSource(RequestModel):
    """A file that the answering server fetches."""

    type: Literal["url"]
    url: str


class ImageBlock(RequestModel):
    """An image, for upstream tiers that take images."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: Ignored = None
    transformations: Ignored = None


class TextSource(RequestModel):
    """A document that is plain text."""

    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class DocumentBlock(RequestModel):
    """Plain text, or a PDF for upstream tiers that take files."""

    type: Literal["document"]
    source: Annotated[TextSource | Base64Source, Field(discriminator="type")]
    title: Label | None = None
    context: str | None = None
    cache_control: Ignored = None
    citations: Ignored = None


class ThinkingBlock(RequestModel):
    """Thinking of an earlier answer, with the signature of the server that wrote it."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(RequestModel):
    """Encrypted thinking that a server does not show."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(RequestModel):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: Label
    name: FunctionName
    input: Object
    cache_control: Ignored = None
    caller: Ignored = None
    toolset_name: Ignored = None


class ToolResultBlock(RequestModel):
    """Result of a tool call. The model is told if it is an error."""

    type: Literal["tool_result"]
    tool_use_id: Label
    content: (
        str
        | ListOf[Annotated[TextBlock | ImageBlock | DocumentBlock, Field(discriminator="type")]]
        | None
    ) = None
    is_error: bool | None = None
    cache_control: Ignored = None
    toolset_name: Ignored = None


FromUser = Annotated[
    TextBlock | ImageBlock | DocumentBlock | ToolResultBlock, Field(discriminator="type")
]
_ANSWER_KINDS: Final = ("text", "thinking", "redacted_thinking", "tool_use")
FromAssistant = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Foreign,
    by_kind(*_ANSWER_KINDS),
]


class UserMessage(RequestModel):
    """A question, or what tools gave."""

    role: Literal["user"]
    content: str | ListOf[FromUser]


class AssistantMessageParam(RequestModel):
    """An earlier answer; as the last message, the beginning of the one that is wanted."""

    role: Literal["assistant"]
    content: str | ListOf[FromAssistant]


class SystemMessage(RequestModel):
    """An instruction in the midst of a conversation."""

    role: Literal["system"]
    content: str | ListOf[TextBlock]


MessageParam = Annotated[
    UserMessage | AssistantMessageParam | SystemMessage, Field(discriminator="role")
]


class ClientTool(RequestModel):
    """A function that the client runs."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: Object
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None
    defer_loading: Ignored = None
    allowed_callers: Direct = None


ToolParam = Annotated[
    Annotated[ClientTool, Tag("custom")] | Foreign,
    by_kind("custom", absent="custom"),
]
"""A client's function, or a tool that runs on Anthropic's servers, which is left out."""


class AutoChoice(RequestModel):
    """Call or answer."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(RequestModel):
    """Call something."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(RequestModel):
    """Call this tool."""

    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


class NoChoice(RequestModel):
    """Call nothing."""

    type: Literal["none"]


ToolChoiceParam = Annotated[
    AutoChoice | AnyChoice | NamedChoice | NoChoice, Field(discriminator="type")
]


class EnabledThinking(RequestModel):
    """Think first, for at most the budget's tokens."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = None
    display: Literal["summarized", "omitted"] | None = None


class AdaptiveThinking(RequestModel):
    """Think as long as it takes."""

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class NoThinking(RequestModel):
    """Answer at once."""

    type: Literal["disabled"]


ThinkingConfigParam = Annotated[
    EnabledThinking | AdaptiveThinking | NoThinking, Field(discriminator="type")
]


class Metadata(RequestModel):
    """About the request. `user_id` becomes OpenAI's `user`."""

    user_id: EndUser | None = None


class OutputFormat(RequestModel):
    """The answer conforms to a JSON schema."""

    type: Literal["json_schema"]
    schema_: Annotated[Object, Field(alias="schema")]


class OutputConfig(RequestModel):
    """Form of the answer."""

    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        Field(description="Accepted, and changes nothing."),
    ] = None
    format: OutputFormat | None = None


class PromptFields(RequestModel):
    """Fields that make up the prompt, in messages and in count_tokens."""

    model: ModelName = AUTO
    messages: Annotated[ListOf[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | ListOf[TextBlock] | None = None
    tools: Annotated[ListOf[ToolParam], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingConfigParam | None = None
    output_config: OutputConfig | None = None

    cache_control: Ignored = None
    context_management: Ignored = None
    user_profile_id: Ignored = None
    speed: Ignored = None
    mcp_servers: Ignored = None

    @property
    def unused_fields(self) -> tuple[str, ...]:
        """The fields that were given and mean services which are not here."""
        names = ("mcp_servers", "container", "context_management")
        return tuple(name for name in names if getattr(self, name, None))

    @property
    def client_tools(self) -> list[ClientTool]:
        """The functions that the client runs."""
        return [tool for tool in self.tools or () if isinstance(tool, ClientTool)]

    @property
    def foreign(self) -> dict[str, str]:
        """Paths of tools and blocks of other servers, and their types; they are left out."""
        found = {
            f"tools.{index}.type": str(tool["type"])
            for index, tool in enumerate(self.tools or ())
            if not isinstance(tool, ClientTool)
        }
        for index, message in enumerate(self.messages):
            if isinstance(message, AssistantMessageParam) and not isinstance(message.content, str):
                found |= {
                    f"messages.{index}.content.{place}.type": str(block["type"])
                    for place, block in enumerate(message.content)
                    if isinstance(block, dict)
                }
        return found


class CountTokensRequest(PromptFields):
    """A prompt to count."""


class MessagesRequest(PromptFields):
    """A conversation to continue."""

    max_tokens: Annotated[
        Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE],
        Field(description="The answer ends earlier if the context has no room for more."),
    ]
    stop_sequences: Annotated[ListOf[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    outrider: OutriderOptions | None = None

    diagnostics: Ignored = None
    inference_geo: Ignored = None
    container: Ignored = None
