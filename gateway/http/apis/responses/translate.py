"""A request of /v1/responses as a chat request, and what the response repeats of it."""

from collections.abc import Sequence
from typing import Any, Final

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.kinds import AUTO
from outrider.gateway.http.apis.responses.items import given_items, read_messages
from outrider.gateway.http.apis.responses.request import (
    AllowedTools,
    FunctionChoice,
    InputTokensRequest,
    Item,
    ResponsesFields,
    ResponsesRequest,
)
from outrider.gateway.http.apis.responses.tools import OfferedTool

_Document = dict[str, Any]

# They mean the same in chat, and have the same names there.
_SHARED: Final = (
    "temperature",
    "top_p",
    "service_tier",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "outrider",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "chat_template_kwargs",
)
_PLAIN_TEXT: Final = {"type": "text"}
_USUAL_VERBOSITY: Final = "medium"
_MAX_NAMES: Final = 32
_SCHEMA_FIELDS: Final = ("name", "description", "schema", "strict")


def chat_document(
    request: ResponsesRequest | InputTokensRequest,
    document: _Document,
    tools: Sequence[OfferedTool],
    earlier: Sequence[Item] = (),
) -> _Document:
    """The chat request, with the tools that a model may call, and stored items in front.

    Raises BadRequestError, with a field of this API.
    """
    chat: _Document = {
        "model": request.model or AUTO,
        "messages": read_messages(request.instructions, given_items(request.input), earlier),
    }
    chat |= _picked(document, _SHARED)
    if request.max_output_tokens is not None:
        chat["max_completion_tokens"] = request.max_output_tokens
    if request.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if request.wants_logprobs:
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    _add_text(chat, request, document)
    _add_tools(chat, request, tools)
    if request.reasoning is not None and request.reasoning.effort is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    return chat


def repeated_fields(request: ResponsesRequest, document: _Document) -> _Document:
    """The fields of a response that say what was asked for."""
    text = document.get("text") or {}
    reasoning = document.get("reasoning") or {}
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.get("effort"),
            "summary": reasoning.get("summary") or reasoning.get("generate_summary"),
        },
        "safety_identifier": request.safety_identifier,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {
            "format": text.get("format") or _PLAIN_TEXT,
            "verbosity": text.get("verbosity") or _USUAL_VERBOSITY,
        },
        "tool_choice": document.get("tool_choice") or "auto",
        "tools": [_repeated_tool(tool) for tool in document.get("tools") or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


def _repeated_tool(tool: _Document) -> _Document:
    """Arguments conform to the schema always."""
    if tool["type"] != "function":
        return tool
    return {
        "type": "function",
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
        "strict": tool.get("strict") is not False,
    }


def _add_text(chat: _Document, request: ResponsesFields, document: _Document) -> None:
    """`text`: an answer's form, and how much it says."""
    if request.text is None:
        return
    form = document["text"].get("format") or _PLAIN_TEXT
    if form["type"] == "json_schema":
        form = {"type": "json_schema", "json_schema": _picked(form, _SCHEMA_FIELDS)}
    if form["type"] != "text":
        chat["response_format"] = form
    if request.text.verbosity not in (None, _USUAL_VERBOSITY):
        chat["verbosity"] = request.text.verbosity


def _add_tools(chat: _Document, request: ResponsesFields, tools: Sequence[OfferedTool]) -> None:
    """Tools, and which of them may be called. Raises BadRequestError."""
    choice = request.tool_choice
    if isinstance(choice, AllowedTools):
        tools = _allowed(tools, choice)
        chat["tool_choice"] = choice.mode
    elif isinstance(choice, FunctionChoice):
        named = next((t.function["name"] for t in tools if t.name == choice.name), choice.name)
        chat["tool_choice"] = {"type": "function", "function": {"name": named}}
    elif choice == "required" or (tools and choice is not None):
        chat["tool_choice"] = choice
    if not tools:
        return
    chat["tools"] = [{"type": "function", "function": tool.function} for tool in tools]
    if request.parallel_tool_calls is not None:
        chat["parallel_tool_calls"] = request.parallel_tool_calls


def _allowed(tools: Sequence[OfferedTool], choice: AllowedTools) -> list[OfferedTool]:
    known = {tool.name for tool in tools}
    for index, reference in enumerate(choice.tools):
        if reference.name not in known:
            path = f"tool_choice.tools.{index}.name"
            available = ", ".join(sorted(known)[:_MAX_NAMES])
            raise BadRequestError(
                f"{path}: unknown tool {reference.name!r}; available: {available}.", param=path
            )
    names = {reference.name for reference in choice.tools}
    return [tool for tool in tools if tool.name in names]


def _picked(document: _Document, names: Sequence[str]) -> _Document:
    """Return the given fields that are set; null counts as unset."""
    return {name: value for name in names if (value := document.get(name)) is not None}
