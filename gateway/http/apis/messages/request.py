"""Requests of the Messages API as chat completions'."""

from collections.abc import Iterator
from typing import Any, Final

from outrider.gateway.answering.jobs.engine_requests import mark_s
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.http.apis.messages.conversation import translate_conversation
from outrider.gateway.http.apis.messages.schema import (
    AnyChoice,
    AutoChoice,
    ClientTool,
    EnabledThinking,
    MessagesRequest,
    NamedChoice,
    NoThinking,
    PromptFields,
    ToolChoiceParam,
)
from outrider.gateway.upstream.dialects.anthropic_request import BILLING_FIELD, template_variables
from outrider.gateway.upstream.dialects.anthropic_words import TOOL_CHOICES

_CHOICES: Final = {theirs: ours for ours, theirs in TOOL_CHOICES.items()}
_SERVICE_TIERS: Final = {"auto": "auto", "standard_only": "default"}


def chat_prompt_fields(request: PromptFields, *, has_upstream_tiers: bool) -> dict[str, Any]:
    """All that the prompt is made of. Raises BadRequestError."""
    conversation = translate_conversation(
        request.messages, request.system, has_upstream_tiers=has_upstream_tiers
    )
    fields: dict[str, Any] = {"model": request.model, "messages": conversation.messages}
    if conversation.billing and has_upstream_tiers:
        fields[BILLING_FIELD] = conversation.billing
    if tools := [_tool(tool) for tool in request.client_tools]:
        fields["tools"] = tools
    if request.tool_choice is not None:
        fields |= _tool_choice(request.tool_choice, has_tools=bool(tools))
    if conversation.is_open:
        _check_continuable(request, fields)
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.thinking is not None:
        fields["chat_template_kwargs"] = _template_variables(request)
    if request.output_config is not None and request.output_config.format is not None:
        schema = {"name": "answer", "schema": request.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def chat_fields(request: MessagesRequest, *, has_upstream_tiers: bool) -> dict[str, Any]:
    """The whole request. Raises BadRequestError."""
    fields = chat_prompt_fields(request, has_upstream_tiers=has_upstream_tiers)
    fields["max_tokens"] = request.max_tokens
    if request.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if request.stop_sequences:
        fields["stop"] = request.stop_sequences
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    if request.metadata is not None and request.metadata.user_id is not None:
        fields["user"] = request.metadata.user_id
    if request.service_tier is not None:
        fields["service_tier"] = _SERVICE_TIERS[request.service_tier]
    options: dict[str, Any] = {"fit_context": True}
    if retention_s := max(map(mark_s, _marks(request))):
        options["retention_s"] = retention_s
    if request.outrider is not None:
        options |= request.outrider.model_dump(by_alias=True, exclude_unset=True)
    fields["outrider"] = options
    return fields


def _marks(request: MessagesRequest) -> Iterator[object]:
    """Yield each `cache_control`, absent ones too."""
    yield request.cache_control
    for tool in request.client_tools:
        yield tool.cache_control
    for content in (request.system, *(message.content for message in request.messages)):
        for block in () if content is None or isinstance(content, str) else content:
            yield getattr(block, "cache_control", None)


def shows_thinking(request: MessagesRequest) -> bool:
    """Return whether thoughts are shown: only if the request asks for them.

    Clients that have not expect the answer in the first block.
    """
    thinking = request.thinking
    if thinking is None or isinstance(thinking, NoThinking):
        return False
    return thinking.display != "omitted"


def _tool(tool: ClientTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoiceParam, *, has_tools: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if isinstance(choice, NamedChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif has_tools or not isinstance(choice, AutoChoice):
        fields["tool_choice"] = _CHOICES[choice.type]
    if isinstance(choice, AutoChoice | AnyChoice) and choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _check_continuable(request: PromptFields, fields: dict[str, Any]) -> None:
    """Raises BadRequestError where the answer has a form that no beginning fits into."""
    reason = None
    if "tools" in fields and fields.get("tool_choice") != "none":
        reason = "together with tools; set tool_choice to none"
    elif request.output_config is not None and request.output_config.format is not None:
        reason = "together with output_config.format"
    if reason is not None:
        path = f"messages.{len(request.messages) - 1}.role"
        raise BadRequestError(
            f"{path}: the last message is the assistant's, and an answer cannot be continued "
            f"{reason}.",
            param=path,
        )


def _template_variables(request: PromptFields) -> dict[str, Any]:
    thinking = request.thinking
    if isinstance(thinking, EnabledThinking):
        return template_variables(budget_tokens=thinking.budget_tokens)
    return template_variables(is_on=not isinstance(thinking, NoThinking))
