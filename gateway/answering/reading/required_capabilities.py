"""Finds what a request needs that the local models cannot do, and another server perhaps can.

A value out of its range is no such need: it is wrong for every server. The fields that the local
models take are read from their own schema: once a field is built there, it is no need any more.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel

from outrider.gateway.contract.schema.chat import (
    AssistantMessage,
    ChatRequest,
    FunctionMessage,
    InputMessage,
    TextPart,
    ToolMessage,
)
from outrider.gateway.contract.schema.common import Harmless, StreamOptions
from outrider.gateway.contract.schema.completions import CompletionRequest
from outrider.gateway.contract.schema.kinds import Capability, Endpoint
from outrider.gateway.contract.schema.structured import (
    ALIASES,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    StructuralTagFormat,
    TextFormat,
)
from outrider.gateway.contract.schema.tools import (
    FunctionCallParam,
    FunctionDefinition,
    FunctionReference,
    NamedToolChoice,
    Tool,
    ToolCallParam,
)
from outrider.gateway.contract.schema.unknown_fields import HINTS

NeedKind = Capability | Literal["options"]
"""options: a field that the local models do not know; no list says which servers know it."""

_REQUESTS: Final[dict[Endpoint, type[BaseModel]]] = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
}
_MESSAGES: Final[dict[str, type[BaseModel]]] = {
    "system": InputMessage,
    "developer": InputMessage,
    "user": InputMessage,
    "assistant": AssistantMessage,
    "tool": ToolMessage,
    "function": FunctionMessage,
}
_FORMATS: Final[dict[str, type[BaseModel]]] = {
    "text": TextFormat,
    "json_object": JsonObjectFormat,
    "json_schema": JsonSchemaFormat,
    "structural_tag": StructuralTagFormat,
}
_CONSTRAINED: Final = ("json_object", "json_schema", "structural_tag")
_PARTS: Final[dict[str, NeedKind]] = {
    "image_url": "images",
    "input_image": "images",
    "input_audio": "audio",
    "file": "files",
    "input_file": "files",
}
_FIELDS: Final[dict[str, NeedKind]] = {
    "audio": "audio",
    "modalities": "audio",
}
_SERVICES: Final = ("web_search_options", "moderation")
"""Services beside the answer: local models ignore them, a server may have them."""
_PLAIN_PATH: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredCapability:
    """A feature that the local models lack. `param` is the path of the field that wants it."""

    capability: NeedKind
    param: str


def required_capabilities(
    document: Mapping[str, Any], endpoint: Endpoint, *, fills_in: bool = True
) -> tuple[RequiredCapability, ...]:
    """Return the request's needs; none for what the local models take or ignore. Never raises.

    `fills_in`: a local model has tokens for text in the middle.
    """
    needs = dict.fromkeys(_needs(document, endpoint))
    if endpoint == "completion" and document.get("suffix") and not fills_in:
        needs[RequiredCapability(capability="options", param="suffix")] = None
    return tuple(need for need in needs if endpoint != "chat" or need.param not in HINTS)


def uses_of(document: Mapping[str, Any], endpoint: Endpoint) -> frozenset[Capability]:
    """Return the capabilities beside text that a request uses, whether or not the local models have
    them: a server must support them to get the request. Never raises.
    """
    used: set[Capability] = set()
    for need in _needs(document, endpoint):
        if need.capability != "options":
            used.add(need.capability)
    if (document.get("tools") or document.get("functions")) and endpoint == "chat":
        used.add("tools")
    return frozenset(used)


def lacking(
    needs: Collection[RequiredCapability], supports: Collection[Capability]
) -> tuple[RequiredCapability, ...]:
    """The needs that a server with these capabilities does not meet. Options are worth a try."""
    return tuple(
        need for need in needs if need.capability != "options" and need.capability not in supports
    )


def describe(needs: Sequence[RequiredCapability]) -> str:
    """Say in one line of ASCII why the local models cannot answer. Paths that the client made up
    are left out. `needs` is not empty.
    """
    first = needs[0]
    where = f" ({first.param})" if _PLAIN_PATH.fullmatch(first.param) else ""
    more = f" and {len(needs) - 1} more" if len(needs) > 1 else ""
    return f"capability: the local models do not take {first.capability}{where}{more}"


def _needs(document: Mapping[str, Any], endpoint: Endpoint) -> Iterator[RequiredCapability]:
    yield from _fields(document, _REQUESTS[endpoint], "")
    yield from _in_object(document.get("stream_options"), StreamOptions, "stream_options.")
    yield from _in_combination(document, endpoint)
    yield from _in_format(document.get("response_format"))
    if endpoint == "completion":
        return
    for name in _SERVICES:
        if document.get(name) is not None:
            yield RequiredCapability(capability="options", param=name)
    for index, message in enumerate(_objects(document.get("messages"))):
        yield from _in_message(message, f"messages.{index}.")
    for index, tool in enumerate(_objects(document.get("tools"))):
        yield from _in_tool(tool, f"tools.{index}.")
    yield from _in_tool_choice(document.get("tool_choice"))


def _fields(
    value: Mapping[str, Any], known: type[BaseModel], path: str
) -> Iterator[RequiredCapability]:
    """Yield the fields of an object that its model does not know, or knows as switched off only."""
    allowed = _ALLOWED[known]
    for name, given in value.items():
        harmless = allowed.get(name, _UNKNOWN)
        if harmless is not None and not harmless.passes(given):
            yield RequiredCapability(capability=_FIELDS.get(name, "options"), param=f"{path}{name}")


def _in_object(value: object, known: type[BaseModel], path: str) -> Iterator[RequiredCapability]:
    if isinstance(value, dict):
        yield from _fields(value, known, path)


def _in_message(message: Mapping[str, Any], path: str) -> Iterator[RequiredCapability]:
    role = message.get("role")
    if not isinstance(role, str):
        return
    known = _MESSAGES.get(role)
    if known is None:
        yield RequiredCapability(capability="options", param=f"{path}role")
        return
    yield from _fields(message, known, path)
    for index, part in enumerate(_objects(message.get("content"))):
        yield from _in_part(part, f"{path}content.{index}.")
    if known is AssistantMessage:
        for index, call in enumerate(_objects(message.get("tool_calls"))):
            yield from _in_call(call, f"{path}tool_calls.{index}.")


def _in_part(part: Mapping[str, Any], path: str) -> Iterator[RequiredCapability]:
    kind = part.get("type")
    if kind == "text":
        yield from _fields(part, TextPart, path)
    elif isinstance(kind, str):
        yield RequiredCapability(capability=_PARTS.get(kind, "options"), param=f"{path}type")


def _in_call(call: Mapping[str, Any], path: str) -> Iterator[RequiredCapability]:
    if _is_other(call.get("type"), "function"):
        yield RequiredCapability(capability="tools", param=f"{path}type")
        return
    yield from _fields(call, ToolCallParam, path)
    yield from _in_object(call.get("function"), FunctionCallParam, f"{path}function.")


def _in_tool(tool: Mapping[str, Any], path: str) -> Iterator[RequiredCapability]:
    if _is_other(tool.get("type"), "function"):
        yield RequiredCapability(capability="tools", param=f"{path}type")
        return
    yield from _fields(tool, Tool, path)
    yield from _in_object(tool.get("function"), FunctionDefinition, f"{path}function.")


def _in_tool_choice(choice: object) -> Iterator[RequiredCapability]:
    if not isinstance(choice, dict):
        return
    if _is_other(choice.get("type"), "function"):
        yield RequiredCapability(capability="tools", param="tool_choice.type")
        return
    yield from _fields(choice, NamedToolChoice, "tool_choice.")
    yield from _in_object(choice.get("function"), FunctionReference, "tool_choice.function.")


def _in_format(wanted: object) -> Iterator[RequiredCapability]:
    if not isinstance(wanted, dict):
        return
    kind = wanted.get("type")
    if not isinstance(kind, str):
        return
    known = _FORMATS.get(kind)
    if known is None:
        yield RequiredCapability(capability="options", param="response_format.type")
        return
    yield from _fields(wanted, known, "response_format.")
    if known is JsonSchemaFormat:
        path = "response_format.json_schema."
        yield from _in_object(wanted.get("json_schema"), NamedSchema, path)


def _in_combination(
    document: Mapping[str, Any], endpoint: Endpoint
) -> Iterator[RequiredCapability]:
    """Yield fields that the local models take, but not together: one grammar rules an answer."""
    wanted = document.get("response_format")
    has_format = isinstance(wanted, dict) and wanted.get("type") in _CONSTRAINED
    others = [name for name in ("structured_outputs", *ALIASES) if document.get(name) is not None]
    has_structure = bool(others)
    has_tools = (
        endpoint == "chat" and bool(document.get("tools")) and document.get("tool_choice") != "none"
    )
    if has_tools and (has_format or has_structure):
        param = "response_format" if has_format else others[0]
        yield RequiredCapability(capability="options", param=param)
    if has_tools or has_format or has_structure:
        for name in ("min_tokens", "ignore_eos"):
            if document.get(name):
                yield RequiredCapability(capability="options", param=name)


def _objects(value: object) -> Iterator[dict[str, Any]]:
    """The objects of a list; an empty one for any other item, so that the counting goes on."""
    for item in value if isinstance(value, list) else ():
        yield item if isinstance(item, dict) else {}


def _is_other(kind: object, known: str) -> bool:
    return isinstance(kind, str) and kind != known


def _allowed(known: type[BaseModel]) -> dict[str, Harmless | None]:
    """Map each field to its `Harmless` note; None for a field that is built."""
    return {
        field.alias or name: next(
            (note for note in field.metadata if isinstance(note, Harmless)), None
        )
        for name, field in known.model_fields.items()
    }


_UNKNOWN: Final = Harmless(())
_MODELS: Final[tuple[type[BaseModel], ...]] = (
    *_REQUESTS.values(),
    *_MESSAGES.values(),
    *_FORMATS.values(),
    FunctionCallParam,
    FunctionDefinition,
    FunctionReference,
    NamedSchema,
    NamedToolChoice,
    StreamOptions,
    TextPart,
    Tool,
    ToolCallParam,
)
_ALLOWED: Final = {known: _allowed(known) for known in _MODELS}
