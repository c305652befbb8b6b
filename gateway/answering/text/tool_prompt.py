"""Tools, calls and results in the form of chat templates; as text for templates without tools."""

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

from outrider.gateway.answering.text.tool_formats import ANY_ID, ToolFormat
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import AssistantMessage
from outrider.gateway.contract.schema.tools import Tool, ToolCallParam

TemplateMessage = dict[str, Any]

_INSTRUCTION: Final = """\
You may call these functions:
<tools>
{tools}
</tools>
To call one, write its name and arguments like this:
{example}"""
_EXAMPLE: Final = {"name": "function-name", "arguments": {"argument-name": "value"}}
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
    """An earlier answer's calls, with their arguments as objects or as the format needs them.

    Raises BadRequestError, with the field below `path`, where arguments are no JSON object.
    """
    calls = []
    for index, call in enumerate(message.tool_calls or []):
        arguments = _arguments(call, f"{path}.tool_calls.{index}.function.arguments")
        function = {
            "name": call.function.name,
            "arguments": _dumps(arguments) if form.has_text_arguments else arguments,
        }
        identity = {"id": template_call_id(call.id, form), "type": "function"}
        calls.append({**identity, "function": function})
    return calls


def template_call_id(call_id: str, form: ToolFormat) -> str:
    """Return an id for a template; Mistral's refuse ids that are not nine letters or digits."""
    if form.marker != "[TOOL_CALLS]" or _SHORT_ID.fullmatch(call_id):
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
    conversation: Sequence[TemplateMessage], tools: Sequence[dict[str, Any]], form: ToolFormat
) -> list[TemplateMessage]:
    """Write tools, calls and results as ordinary messages.

    Results that stand together are one message, as roles must alternate for many templates.
    """
    written: list[TemplateMessage] = []
    for is_result, group in groupby(conversation, key=lambda message: message["role"] == "tool"):
        if not is_result:
            written += [_with_written_calls(message, form) for message in group]
        elif form.result_role == "user":
            written.append({"role": "user", "content": "\n".join(map(_written_result, group))})
        else:
            written += [{"role": form.result_role, "content": item["content"]} for item in group]
    if not tools:
        return written
    if form.system_field:
        fields = {form.system_field: _dumps([tool["function"] for tool in tools])}
        return _with_system(written, fields, "")
    listed = "\n".join(map(_dumps, tools))
    example = write_calls([_EXAMPLE], form)
    return _with_system(written, {}, _INSTRUCTION.format(tools=listed, example=example))


def write_calls(calls: Sequence[dict[str, Any]], form: ToolFormat) -> str:
    """Write calls as a model of this format does."""
    texts = []
    for index, call in enumerate(calls):
        begin, middle = (
            text.replace(ANY_ID, str(index)) for text in (form.call_begin, form.call_middle)
        )
        text = _written_arguments(call["arguments"], form)
        texts.append(f"{begin}{call['name']}{middle}{text}{form.call_end}")
    if form.separator is not None:
        texts = [form.separator.join(texts)]
    begin, end = form.marker + form.lead, form.trail + form.end
    return form.between.join(f"{begin}{text}{end}" for text in texts)


def _written_arguments(arguments: dict[str, Any] | str, form: ToolFormat) -> str:
    xml = form.xml
    if isinstance(arguments, str) or xml is None:
        return arguments if isinstance(arguments, str) else _dumps(arguments)
    texts = []
    for key, value in arguments.items():
        text = value if isinstance(value, str) else _dumps(value)
        begin = f"{xml.key_begin}{key}{xml.key_end}{xml.value_begin}{xml.pad}"
        texts.append(f"{begin}{text}{xml.pad}{xml.value_end}{xml.between}")
    return "".join(texts)


def _with_system(
    written: list[TemplateMessage], fields: dict[str, Any], instruction: str
) -> list[TemplateMessage]:
    """Add fields and an instruction to the system message; begin with one where there is none."""
    if written[0]["role"] != "system":
        return [{"role": "system", "content": instruction, **fields}, *written]
    parts = [part for part in (written[0]["content"], instruction) if part]
    return [{**written[0], "content": "\n\n".join(parts), **fields}, *written[1:]]


def _written_result(message: TemplateMessage) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _with_written_calls(message: TemplateMessage, form: ToolFormat) -> TemplateMessage:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    parts = [message["content"]] if message["content"] or not calls else []
    if calls:
        parts.append(write_calls(calls, form))
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join(parts)}


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
