"""Tools of /v1/responses: the types of the request, and the functions that the models see.

A namespace's tools are functions whose names begin with it; a custom tool, which takes free text,
is a function with one argument. Hosted tools (`web_search` …) are left out and named: there is no
server that runs them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, JsonValue, Tag

from outrider.gateway.contract.schema.common import Harmless, Ignored, ListOf, Off, RequestModel
from outrider.gateway.contract.schema.tools import MAX_TOOLS, FunctionName
from outrider.gateway.http.apis.foreign import Foreign, by_kind

_MAX_NAME_CHARS: Final = 128
_INPUT: Final = "input"
_FREE_TEXT: Final = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}
_FUNCTION_FIELDS: Final = ("description", "parameters", "strict")
_KINDS: Final = ("function", "custom", "namespace")

ToolKind = Literal["function", "custom"]


class _CallableTool(RequestModel):
    """What all tools have that a model may call."""

    name: FunctionName
    description: str | None = None
    async_: Annotated[Off, Field(alias="async")] = None
    defer_loading: Ignored = None
    allowed_callers: Annotated[JsonValue, Harmless((None, ["direct"]))] = None


class FunctionTool(_CallableTool):
    """A function that the model may call. `parameters` is a JSON schema; absent: it takes none.

    Arguments always conform to the schema; `strict` false is accepted and changes nothing.
    """

    type: Literal["function"]
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    output_schema: Ignored = None


class CustomTool(_CallableTool):
    """A tool that takes free text. A grammar in `format` is not enforced."""

    type: Literal["custom"]
    format: dict[str, JsonValue] | None = None


class NamespaceTool(RequestModel):
    """Tools under one name."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[
        ListOf[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]],
        Field(min_length=1, max_length=MAX_TOOLS),
    ]


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Foreign,
    by_kind(*_KINDS),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A tool that the model may call. `function`: as the chat has it, with its name there."""

    kind: ToolKind
    name: str
    namespace: str | None
    function: dict[str, Any]


def chat_name(name: str, namespace: str | None) -> str:
    """Return a tool's name in the chat; of a long one the end, which tells tools apart."""
    return name if namespace is None else f"{namespace}__{name}"[-_MAX_NAME_CHARS:]


def offered_tools(tools: Sequence[Mapping[str, Any]]) -> list[OfferedTool]:
    """Return the tools of a valid request that a model may call."""
    return [offered for tool in tools for offered in _offered(tool)]


def left_out(tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the paths of what no model gets, with the types of hosted tools."""
    found = {
        f"tools.{index}.type": tool["type"]
        for index, tool in enumerate(tools)
        if tool["type"] not in _KINDS
    }
    return found | {
        f"tools.{index}.format": tool["type"]
        for index, tool in enumerate(tools)
        if tool["type"] == "custom" and (tool.get("format") or {}).get("type", "text") != "text"
    }


def text_arguments(text: str) -> str:
    """Return the arguments with which a custom tool is called."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def text_of(arguments: str) -> str:
    """Return a custom tool's text; of arguments that were cut the part that can be read."""
    for ending in ("", '"}', "}"):
        try:
            document = json.loads(arguments + ending)
        except (ValueError, RecursionError):
            continue
        text = document.get(_INPUT) if isinstance(document, dict) else None
        return text if isinstance(text, str) else ""
    return ""


def _offered(tool: Mapping[str, Any], namespace: str | None = None) -> Iterator[OfferedTool]:
    if tool["type"] == "namespace":
        for inner in tool["tools"]:
            yield from _offered(inner, tool["name"])
    if tool["type"] not in ("function", "custom"):
        return
    function: dict[str, Any] = {"name": chat_name(tool["name"], namespace)}
    function |= {name: tool[name] for name in _FUNCTION_FIELDS if tool.get(name) is not None}
    if tool["type"] == "custom":
        function["parameters"] = _FREE_TEXT
    yield OfferedTool(kind=tool["type"], name=tool["name"], namespace=namespace, function=function)
