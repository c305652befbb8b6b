"""POST /api/chat, /api/generate and /api/show: the requests.

Fields are strict, as all of ours are. Those typed `Ignored` change nothing here, and an answer
names the ones that a request has; docs/ollama.md says which and why.
"""

from typing import Annotated, Final, Literal

from pydantic import Field, JsonValue

from outrider.gateway.contract.schema.common import (
    MAX_STOPS,
    WHOLE,
    Ignored,
    Label,
    ListOf,
    ModelName,
    OutriderOptions,
    Penalty,
    RequestModel,
    StopString,
)
from outrider.gateway.contract.schema.kinds import AUTO
from outrider.gateway.contract.schema.tools import MAX_TOOLS, FunctionName, Tool

MAX_MESSAGES: Final = 100_000

_Integer = Annotated[int, Field(ge=-(2**31), le=2**31 - 1), WHOLE]
Think = bool | Literal["low", "medium", "high", "max"]
Format = Literal["", "json"] | dict[str, JsonValue]
Image = Annotated[str, Field(description="In base64.")]


class ModelOptions(RequestModel):
    """Options of the sampling. Those of memory and threads are the server's own settings."""

    num_predict: Annotated[
        _Integer | None,
        Field(description="The most tokens; absent, 0 and less: what the server gives."),
    ] = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE] | None = None
    stop: StopString | Annotated[ListOf[StopString], Field(max_length=MAX_STOPS)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    num_ctx: Ignored = None
    num_keep: Ignored = None
    num_batch: Ignored = None
    num_gpu: Ignored = None
    main_gpu: Ignored = None
    num_thread: Ignored = None
    numa: Ignored = None
    low_vram: Ignored = None
    f16_kv: Ignored = None
    use_mmap: Ignored = None
    use_mlock: Ignored = None


class CalledFunction(RequestModel):
    """Function that was called."""

    index: Ignored = None
    name: FunctionName
    arguments: dict[str, JsonValue] | None = None


class OllamaCallParam(RequestModel):
    """A call in an earlier answer."""

    id: Label | None = None
    type: Ignored = None
    function: CalledFunction


class OllamaMessageParam(RequestModel):
    """A message. Images are for upstream tiers that take images."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: ListOf[Image] | None = None
    tool_calls: ListOf[OllamaCallParam] | None = None
    tool_name: Annotated[Label | None, Field(description="Of the call whose result this is.")] = (
        None
    )
    tool_call_id: Label | None = None


class OllamaFields(RequestModel):
    """Fields of chats and of prompts."""

    model: ModelName = AUTO
    stream: Annotated[bool | None, Field(description="Absent: true.")] = None
    format: Annotated[
        Format | None, Field(description='"json", or a schema that the answer conforms to.')
    ] = None
    think: Think | None = None
    options: ModelOptions | None = None
    keep_alive: Ignored = None
    outrider: OutriderOptions | None = None


class OllamaChatRequest(OllamaFields):
    """A conversation to continue; without messages the model is only looked up."""

    messages: Annotated[ListOf[OllamaMessageParam], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[ListOf[Tool], Field(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaFields):
    """A prompt to answer; without a prompt the model is only looked up."""

    prompt: str | None = None
    system: str | None = None
    images: ListOf[Image] | None = None
    raw: Annotated[
        bool | None, Field(description="true: the prompt is continued without a chat template.")
    ] = None
    suffix: Annotated[
        str | None, Field(description="The text behind the answer, which is filled in between.")
    ] = None
    template: Ignored = None
    context: Ignored = None


class OllamaShowRequest(RequestModel):
    """A model to describe."""

    model: ModelName
    verbose: Ignored = None
