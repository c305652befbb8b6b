"""Tools in chat requests: functions to offer, which one to call, calls in earlier answers."""

import re
from typing import Annotated, Final, Literal

from pydantic import Field, JsonValue

from outrider.gateway.contract.schema.common import Ignored, Label, RequestModel

MAX_TOOLS = 1024
FUNCTION_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,128}")

FunctionName = Annotated[str, Field(pattern=f"^{FUNCTION_NAME.pattern}$")]


class FunctionDefinition(RequestModel):
    """A function that the model may call. `parameters` is a JSON schema; absent: it takes none.

    Arguments conform to what can be enforced of the schema; with `strict` a schema of which not all
    can be is refused.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """Something to call. There are functions only."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Ignored = None


class FunctionReference(RequestModel):
    """A function of `tools`."""

    name: FunctionName


class NamedToolChoice(RequestModel):
    """Call this function."""

    type: Literal["function"]
    function: FunctionReference


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class FunctionCallParam(RequestModel):
    """Function that was called. `arguments` is a JSON object as text; empty for none."""

    name: FunctionName
    arguments: str


class ToolCallParam(RequestModel):
    """A call in an earlier answer."""

    id: Label
    type: Literal["function"]
    function: FunctionCallParam
