"""OpenAI's messages and tools as Anthropic's: turns of content blocks.

System messages go in front of all others, wherever they stood, as Anthropic's own compatible API
does it. Results of tools are the user's messages there; turns of the same role become one.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import msgspec

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.parsing import JsonBounds, check_json_bounds
from outrider.gateway.upstream.dialects.anthropic_words import TOOL_CHOICES

BlockDict = dict[str, Any]

_FOREIGN_CHARS: Final = re.compile(r"[^a-zA-Z0-9_-]")
_IMAGE_TYPES: Final = {
    "image/jpeg": "image/jpeg",
    "image/jpg": "image/jpeg",
    "image/png": "image/png",
    "image/gif": "image/gif",
    "image/webp": "image/webp",
}
_PDF: Final = "application/pdf"
_ARGUMENTS: Final = JsonBounds()
"""Of one call's arguments: a text to the body's own bounds, JSON to a parser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedConversation:
    """A conversation: the system's blocks, and turns of user and assistant."""

    system: list[BlockDict] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)

    def add(self, role: str, blocks: list[BlockDict]) -> None:
        """Add blocks to the last turn if it has that role, else to a new one."""
        if not blocks:
            return  # the Messages API refuses an empty turn
        if self.turns and self.turns[-1]["role"] == role:
            self.turns[-1]["content"].extend(blocks)
        else:
            self.turns.append({"role": role, "content": blocks})


def translate_messages(messages: object) -> TranslatedConversation:
    """Translate messages. Raises BadRequestError with the path of those that have no
    translation."""
    translated = TranslatedConversation()
    if not isinstance(messages, list) or not messages:
        _refuse("messages", "a list of messages is required")
    for index, message in enumerate(messages):
        path = f"messages.{index}"
        fields = _object(path, message)
        match fields.get("role"):
            case "system" | "developer":
                translated.system.extend(_blocks(path, fields, _TEXT_ONLY))
            case "user":
                translated.add("user", _blocks(path, fields, _FROM_USER))
            case "assistant":
                translated.add("assistant", _answer(path, fields))
            case "tool":
                translated.add("user", [_tool_result(path, fields)])
            case role:
                _refuse(f"{path}.role", f"{role!r} is not supported")
    return translated


def translate_tools(document: Mapping[str, Any]) -> dict[str, Any]:
    """Translate `tools` and `tool_choice`."""
    tools = document["tools"]
    if not isinstance(tools, list):
        _refuse("tools", "a list of tools is required")
    body: dict[str, Any] = {"tools": [_tool(f"tools.{i}", tool) for i, tool in enumerate(tools)]}
    choice = _tool_choice(document.get("tool_choice"))
    if document.get("parallel_tool_calls") is False:
        choice = choice or {"type": "auto"}
        if choice["type"] != "none":
            choice["disable_parallel_tool_use"] = True
    if choice is not None:
        body["tool_choice"] = choice
    return body


def _tool(path: str, tool: object) -> BlockDict:
    fields = _object(path, tool)
    if fields.get("type") != "function":
        _refuse(f"{path}.type", "only functions are supported")
    function = _object(f"{path}.function", fields.get("function"))
    parameters = function.get("parameters") or {}
    block: BlockDict = {
        "name": _text(f"{path}.function.name", function.get("name")),
        "input_schema": {
            "type": "object",
            **_object(f"{path}.function.parameters", parameters),
        },
    }
    if function.get("description"):
        block["description"] = function["description"]
    if function.get("strict"):
        block["strict"] = True
    return block | _cache_control(fields)


def _tool_choice(choice: object) -> BlockDict | None:
    if choice is None:
        return None
    if isinstance(choice, str):
        if choice not in TOOL_CHOICES:
            _refuse("tool_choice", f"{choice!r} is not supported")
        return {"type": TOOL_CHOICES[choice]}
    fields = _object("tool_choice", choice)
    if fields.get("type") != "function":
        _refuse("tool_choice.type", "only functions are supported")
    function = _object("tool_choice.function", fields.get("function"))
    return {"type": "tool", "name": _text("tool_choice.function.name", function.get("name"))}


def _answer(path: str, message: Mapping[str, Any]) -> list[BlockDict]:
    """Translate an earlier answer: signed thoughts if the client returns them, text, calls."""
    blocks: list[BlockDict] = []
    thoughts = message.get("thinking_blocks")
    if isinstance(thoughts, list):
        blocks.extend(thought for thought in thoughts if isinstance(thought, dict))
    blocks.extend(_blocks(path, message, _TEXT_ONLY))
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        _refuse(f"{path}.tool_calls", "a list of calls is required")
    blocks.extend(_call(f"{path}.tool_calls.{i}", call) for i, call in enumerate(calls))
    return blocks


def _call(path: str, call: object) -> BlockDict:
    fields = _object(path, call)
    function = _object(f"{path}.function", fields.get("function"))
    arguments = _text(f"{path}.function.arguments", function.get("arguments") or "{}")
    check_json_bounds(arguments.encode("utf-8", "replace"), _ARGUMENTS)
    try:
        given = msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        _refuse(f"{path}.function.arguments", "a JSON object is required")
    return {
        "type": "tool_use",
        "id": _call_id(f"{path}.id", fields.get("id")),
        "name": _text(f"{path}.function.name", function.get("name")),
        "input": given,
    }


def _tool_result(path: str, message: Mapping[str, Any]) -> BlockDict:
    return {
        "type": "tool_result",
        "tool_use_id": _call_id(f"{path}.tool_call_id", message.get("tool_call_id")),
        "content": _blocks(path, message, _FROM_TOOL),
    }


def _call_id(path: str, value: object) -> str:
    """Translate an id, always to the same one, so that calls and results stay together."""
    return _FOREIGN_CHARS.sub("_", _text(path, value))


def _blocks(
    path: str,
    message: Mapping[str, Any],
    kinds: Mapping[str, Callable[[str, Any], BlockDict | None]],
) -> list[BlockDict]:
    """Translate a message's content, part by part."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list):
        _refuse(f"{path}.content", "a text or a list of parts is required")
    return list(_parts(f"{path}.content", content, kinds))


def _parts(
    path: str, parts: list[Any], kinds: Mapping[str, Callable[[str, Any], BlockDict | None]]
) -> Iterator[BlockDict]:
    for index, part in enumerate(parts):
        here = f"{path}.{index}"
        fields = _object(here, part)
        kind = fields.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            _refuse(f"{here}.type", f"{kind!r} is not supported")
        block = kinds[kind](here, fields)
        if block is not None:
            yield block | _cache_control(fields)


def _text_block(path: str, part: Mapping[str, Any]) -> BlockDict | None:
    """Return a block; None for an empty text, which the Messages API refuses."""
    text = _text(f"{path}.text", part.get("text"))
    return {"type": "text", "text": text} if text else None


def _refusal_block(path: str, part: Mapping[str, Any]) -> BlockDict | None:
    text = _text(f"{path}.refusal", part.get("refusal"))
    return {"type": "text", "text": text} if text else None


def _image_block(path: str, part: Mapping[str, Any]) -> BlockDict:
    path = f"{path}.image_url"
    image = part.get("image_url")
    url = image if isinstance(image, str) else _object(path, image).get("url")
    url = _text(f"{path}.url", url)
    if url.startswith(("https://", "http://")):
        return {"type": "image", "source": {"type": "url", "url": url}}
    media_type, data = _data_url(f"{path}.url", url)
    if media_type not in _IMAGE_TYPES:
        _refuse(f"{path}.url", "only JPEG, PNG, GIF and WebP images are supported")
    return _with_source("image", _IMAGE_TYPES[media_type], data)


def _file_block(path: str, part: Mapping[str, Any]) -> BlockDict:
    path = f"{path}.file"
    file = _object(path, part.get("file"))
    if file.get("file_data") is None:
        _refuse(path, "only files with file_data are supported")
    url = _text(f"{path}.file_data", file["file_data"])
    media_type, data = _data_url(f"{path}.file_data", url)
    if media_type != _PDF:
        _refuse(f"{path}.file_data", "only PDF files are supported")
    block = _with_source("document", _PDF, data)
    if isinstance(name := file.get("filename"), str) and name:
        block["title"] = name
    return block


def _with_source(kind: str, media_type: str, data: str) -> BlockDict:
    return {"type": kind, "source": {"type": "base64", "media_type": media_type, "data": data}}


def _data_url(path: str, url: str) -> tuple[str, str]:
    """Return media type and base64 text."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64") or not comma:
        _refuse(path, "an http(s) URL or a base64 data URL is required")
    return head[len("data:") :].partition(";")[0].lower(), data


_TEXT_ONLY: Final[Mapping[str, Callable[[str, Any], BlockDict | None]]] = {
    "text": _text_block,
    "refusal": _refusal_block,
}
_FROM_TOOL: Final = {**_TEXT_ONLY, "image_url": _image_block}
_FROM_USER: Final = {**_FROM_TOOL, "file": _file_block}


def _cache_control(fields: Mapping[str, Any]) -> BlockDict:
    """Return Anthropic's mark of what to cache, from clients that send it."""
    mark = fields.get("cache_control")
    return {"cache_control": mark} if isinstance(mark, dict) else {}


def _object(path: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        _refuse(path, "an object is required")
    return value


def _text(path: str, value: object) -> str:
    if not isinstance(value, str):
        _refuse(path, "a text is required")
    return value


def _refuse(path: str, reason: str) -> NoReturn:
    raise BadRequestError(f"{path}: {reason}.", param=path)
