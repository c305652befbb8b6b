"""POST /v1/chat/completions: the request."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from outrider.gateway.contract.schema.common import (
    MAX_TOP_LOGPROBS,
    WHOLE,
    CacheBreakpoint,
    CacheOptions,
    Harmless,
    Ignored,
    Label,
    ListOf,
    NotBuilt,
    RequestModel,
    TokenLimit,
)
from outrider.gateway.contract.schema.structured import StructuredFields
from outrider.gateway.contract.schema.template_variables import TemplateVariables
from outrider.gateway.contract.schema.tools import (
    MAX_TOOLS,
    FunctionCallParam,
    FunctionDefinition,
    FunctionReference,
    Tool,
    ToolCallParam,
    ToolChoice,
)

TextModality = Annotated[JsonValue, Harmless((None, ["text"]))]


class TextPart(RequestModel):
    """A piece of a message. Images, audio and files are not supported."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None
    cache_control: Ignored = None


Parts = Annotated[ListOf[TextPart], Field(min_length=1)]


def join_parts(content: str | list[TextPart] | None) -> str:
    """One string; parts are joined by newlines, as other servers do."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class Prediction(RequestModel):
    """Expected answer. The answer comes sooner where the expectation is right."""

    type: Literal["content"]
    content: str | Parts

    @property
    def text(self) -> str:
        """The expected answer; empty for none."""
        return join_parts(self.content)


class InputMessage(RequestModel):
    """A message that instructs or asks."""

    role: Literal["system", "developer", "user"]
    content: str | Parts
    name: Label | None = None
    cache_control: Ignored = None


class AssistantMessage(RequestModel):
    """An earlier answer, as this API or another one returned it.

    Servers call the thinking `reasoning_content` or `reasoning`; of both, the first counts.
    """

    role: Literal["assistant"]
    content: str | ListOf[TextPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: Ignored = None
    name: Label | None = None
    cache_control: Ignored = None
    refusal: NotBuilt = None
    annotations: Ignored = None
    audio: NotBuilt = None
    tool_calls: ListOf[ToolCallParam] | None = None
    function_call: Annotated[
        FunctionCallParam | None, Field(description="Deprecated: a call of `functions`.")
    ] = None

    @property
    def thoughts(self) -> str | None:
        """What the model thought before it answered."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content


class ToolMessage(RequestModel):
    """Result of a tool call. `tool_call_id` is the call's."""

    role: Literal["tool"]
    content: str | Parts
    tool_call_id: Label
    name: Label | None = None
    cache_control: Ignored = None


class FunctionMessage(RequestModel):
    """Result of a call of `functions`, which are deprecated."""

    role: Literal["function"]
    content: str | None
    name: Label


Message = Annotated[
    InputMessage | AssistantMessage | ToolMessage | FunctionMessage, Field(discriminator="role")
]


class ChatRequest(StructuredFields):
    """A conversation to continue."""

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[
        TokenLimit, Field(description="The newer name of max_tokens; it wins.")
    ] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None,
        Field(description="Used when `logprobs` is true; else ignored, and named as such."),
    ] = None
    prediction: Prediction | None = None
    chat_template_kwargs: Annotated[
        TemplateVariables | None,
        Field(description="Variables for the model's chat template, e.g. enable_thinking."),
    ] = None
    continue_final_message: Annotated[
        bool | None,
        Field(
            description=(
                "vLLM's field; true: the answer continues the last message, which is the "
                "assistant's."
            )
        ),
    ] = None
    add_generation_prompt: Annotated[
        bool | None,
        Field(
            description="vLLM's field; whether the template opens an answer. Absent: unless "
            "continue_final_message is true."
        ),
    ] = None
    tools: Annotated[ListOf[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        ToolChoice | None, Field(description="Absent: auto where there are tools.")
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="false: at most one call in an answer.")
    ] = None

    prompt_cache_options: CacheOptions | None = None

    functions: Annotated[
        Annotated[ListOf[FunctionDefinition], Field(max_length=MAX_TOOLS)] | None,
        Field(description="Deprecated: tools, of which an answer calls one at most."),
    ] = None
    function_call: Annotated[
        Literal["none", "auto"] | FunctionReference | None,
        Field(description="Deprecated: tool_choice of `functions`."),
    ] = None
    modalities: TextModality = None
    audio: NotBuilt = None
    reasoning_effort: Annotated[
        JsonValue,
        Field(
            description="none, minimal, low, medium, high, xhigh or max: how long a model may "
            "think. Any other value is ignored, and named as such."
        ),
    ] = None
    thinking_token_budget: Annotated[
        Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE] | None,
        Field(description="vLLM's field: the most tokens of thinking; -1: no limit."),
    ] = None
    verbosity: NotBuilt = None
    web_search_options: Ignored = None
    moderation: Ignored = None
    anthropic_billing: Annotated[
        JsonValue, Field(description="A line for Anthropic's own servers; no other gets it.")
    ] = None

    @property
    def idle_fields(self) -> tuple[str, ...]:
        """The fields that were given and do nothing here, or nothing without another one."""
        services = ("web_search_options", "moderation")
        idle = [name for name in services if getattr(self, name) is not None]
        with_logprobs = ("top_logprobs", "return_tokens_as_token_ids")
        idle += [name for name in with_logprobs if getattr(self, name) and not self.logprobs]
        return (*super().idle_fields, *idle)

    @property
    def top_count(self) -> int | None:
        """The number of alternatives for each token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limits_thinking(self) -> bool:
        """True if a field may say how long a model thinks."""
        fields = (self.reasoning_effort, self.thinking_token_budget, self.chat_template_kwargs)
        return fields != (None, None, None)

    @property
    def own_thinking_budget(self) -> int | None:
        """The most tokens of thinking by `thinking_token_budget`; None for no limit."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    @property
    def template_thinking_budget(self) -> int | None:
        """The same by the template's variable `thinking_budget`, as /v1/messages gives it."""
        budget = (self.chat_template_kwargs or {}).get("thinking_budget")
        if not isinstance(budget, int) or isinstance(budget, bool):
            return None
        return budget if 0 <= budget < 2**31 else None

    @property
    def token_limit(self) -> int | None:
        """The most tokens a choice may have; None for the server's default."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def uses_functions(self) -> bool:
        """True if it, or its messages, have the fields that tools have replaced."""
        if self.functions or self.function_call is not None:
            return True
        return any(
            message.role == "function"
            or (message.role == "assistant" and message.function_call is not None)
            for message in self.messages
        )

    @property
    def names_tools(self) -> bool:
        """True if a field about tools is set."""
        return bool(self.tools) or self.tool_choice is not None

    @property
    def last_user_text(self) -> str:
        """Text of the last user message, or of the last message if there is none."""
        for message in reversed(self.messages):
            if message.role == "user":
                return join_parts(message.content)
        return join_parts(self.messages[-1].content)
