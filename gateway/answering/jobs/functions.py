"""The deprecated `functions` of a chat as its tools: one call in an answer, and ids made up."""

from collections.abc import Sequence
from typing import Any, Final

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import (
    AssistantMessage,
    ChatRequest,
    FunctionMessage,
    Message,
    ToolMessage,
)
from outrider.gateway.contract.schema.tools import (
    FunctionReference,
    NamedToolChoice,
    Tool,
    ToolCallParam,
)

_CALL_ID: Final = "call_function"


def with_tools(request: ChatRequest) -> ChatRequest:
    """Return a request that uses functions in the words of tools. Raises BadRequestError."""
    changes: dict[str, Any] = dict.fromkeys(("functions", "function_call"))
    changes["messages"] = _messages(request.messages)
    if request.functions:
        for param in ("tools", "tool_choice"):
            if getattr(request, param):
                raise BadRequestError(
                    f"{param}: not supported together with functions.", param=param
                )
        changes["tools"] = [Tool(type="function", function=each) for each in request.functions]
        changes["parallel_tool_calls"] = False
    choice = request.function_call
    if isinstance(choice, FunctionReference):
        if not request.functions:
            raise BadRequestError("function_call: functions is missing.", param="function_call")
        if choice.name not in {each.name for each in request.functions}:
            raise BadRequestError(
                f"function_call.name: {choice.name!r} is none of functions.",
                param="function_call.name",
            )
        changes["tool_choice"] = NamedToolChoice(type="function", function=choice)
    elif request.functions:
        changes["tool_choice"] = choice
    return request.model_copy(update=changes)


def _messages(messages: Sequence[Message]) -> list[Message]:
    """Return them with calls of tools; a result belongs to the call before it."""
    changed: list[Message] = []
    for index, message in enumerate(messages):
        if isinstance(message, FunctionMessage):
            changed.append(
                ToolMessage(
                    role="tool",
                    content=message.content or "",
                    tool_call_id=f"{_CALL_ID}_{index - 1}",
                    name=message.name,
                )
            )
        elif isinstance(message, AssistantMessage) and message.function_call is not None:
            call = ToolCallParam(
                id=f"{_CALL_ID}_{index}", type="function", function=message.function_call
            )
            changed.append(
                message.model_copy(
                    update={
                        "tool_calls": [*(message.tool_calls or ()), call],
                        "function_call": None,
                    }
                )
            )
        else:
            changed.append(message)
    return changed
