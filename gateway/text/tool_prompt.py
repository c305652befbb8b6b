"""Tools, calls and results in the form of chat templates; as text for templates without tools."""

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

from gateway.errors.tree import BadRequestError
from gateway.schema.chat import AssistantMessage
from gateway.schema.tools import Tool, ToolCallParam
from gateway.text.tool_formats import HERMES, ToolFormat

TemplateMessage = dict[str, Any]

_INSTRUCTION: Final = """\
You may call these functions:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments, like this:
<tool_call>
{{"name": "function-name", "arguments": {{"argument-name": "value"}}}}
</tool_call>"""
_SHORT_ID: Final = re.compile("[a-zA-Z0-9]{9}")


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """`tools` as templates know it; a function without parameters takes an empty object."""
    empty = {"type": "object", "properties": {}}
    described = []
    for tool in tools:
        function = tool.function
        fields: dict[str, Any] = {"name": function.name}
        if function.description is not None:
            fields["description"] = function.description
        fields["parameters"] = empty if function.parameters is None else function.parameters
        described.append({"type": "function", "function": fields})
    return described


def template_calls(message: AssistantMessage, path: str, form: ToolFormat) -> list[dict[str, Any]]:
    """An earlier answer's calls, with their arguments as objects.

    Raises BadRequestError, with the field below `path`, where arguments are no JSON object.
    """
    return [
        {
            "id": template_call_id(call.id, form),
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": _arguments(call, f"{path}.tool_calls.{index}.function.arguments"),
            },
        }
        for index, call in enumerate(message.tool_calls or [])
    ]


def template_call_id(call_id: str, form: ToolFormat) -> str:
    """Return an id for a template; Mistral's refuse ids that are not nine letters or digits."""
    if form.name != "mistral" or _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _arguments(call: ToolCallParam, param: str) -> dict[str, Any]:
    text = call.function.arguments
    try:
        arguments = json.loads(text, parse_constant=_refuse_constant) if text.strip() else {}
        json.dumps(arguments, ensure_ascii=False).encode()  # half a character has no bytes
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"{param}: not valid JSON: {error}.", param=param) from None
    if not isinstance(arguments, dict):
        raise BadRequestError(f"{param}: not a JSON object.", param=param)
    return arguments


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def write_out(
    conversation: Sequence[TemplateMessage], tools: Sequence[dict[str, Any]]
) -> list[TemplateMessage]:
    """Write tools, calls and results as ordinary messages (hermes).

    Results that stand together are one message, as roles must alternate for many templates.
    """
    written: list[TemplateMessage] = []
    for is_result, group in groupby(conversation, key=lambda message: message["role"] == "tool"):
        if is_result:
            written.append({"role": "user", "content": "\n".join(map(_written_result, group))})
        else:
            written += map(_with_written_calls, group)
    if not tools:
        return written
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instruction = _INSTRUCTION.format(tools=listed)
    if written[0]["role"] == "system":
        system = f"{written[0]['content']}\n\n{instruction}"
        return [{**written[0], "content": system}, *written[1:]]
    return [{"role": "system", "content": instruction}, *written]


def _written_result(message: TemplateMessage) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _with_written_calls(message: TemplateMessage) -> TemplateMessage:
    calls = message.get("tool_calls", [])
    parts = [message["content"]] if message["content"] or not calls else []
    for call in calls:
        written = json.dumps(call["function"], ensure_ascii=False)
        parts.append(f"{HERMES.marker}\n{written}\n{HERMES.end}")
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join(parts)}
