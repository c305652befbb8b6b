"""Answers of Ollama's API: the Structs that are sent, and described in /openapi.json."""

from typing import Annotated, Final, Literal

from pydantic import JsonValue

from outrider.gateway.contract.schema.errors import DeliveredReport
from outrider.gateway.contract.schema.responses import WrittenReport
from outrider.gateway.contract.schema.structs import ResponseModel, says
from outrider.gateway.http.apis.ollama.schema import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)

DoneReason = Literal["stop", "length", "load", "unload"]


class AnswerFunction(ResponseModel):
    """Function that the model wants to be run."""

    name: str
    arguments: dict[str, JsonValue]


class AnswerCall(ResponseModel):
    """A whole call."""

    function: AnswerFunction


class AnswerMessage(ResponseModel):
    """The answer, or more of it."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[AnswerCall] | None = None


class Figures(ResponseModel, kw_only=True):
    """What the last line of an answer has, and a whole answer. Times are in nanoseconds."""

    done: bool
    done_reason: DoneReason | None = None
    total_duration: int | None = None
    load_duration: Annotated[int | None, says("0: models are loaded before.")] = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: Annotated[int | None, says("The time to the first token.")] = None
    eval_count: int | None = None
    eval_duration: int | None = None
    outrider: WrittenReport = None


class OllamaChatAnswer(Figures, kw_only=True):
    """An answer to a chat, or a line of it."""

    model: str
    created_at: str
    message: AnswerMessage


class OllamaAnswer(Figures, kw_only=True):
    """An answer to a prompt, or a line of it."""

    model: str
    created_at: str
    response: str
    thinking: str | None = None


class OllamaError(ResponseModel):
    """Error; the last line of a stream that fails midway, with what was delivered of the answer."""

    error: str
    outrider: DeliveredReport | None = None


class OllamaVersion(ResponseModel):
    """Version of the API."""

    version: Annotated[str, says("The release of Ollama whose API this is.")]


class ModelDetails(ResponseModel):
    """What a model is made of; empty where it is unknown."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(ResponseModel, kw_only=True):
    """A name that `model` accepts."""

    name: str
    model: str
    modified_at: str
    size: Annotated[int, says("Bytes of the weights; 0 for models of upstream servers.")]
    digest: Annotated[str, says("Of the name.")]
    details: ModelDetails


class OllamaModels(ResponseModel):
    """Every name that `model` accepts."""

    models: list[OllamaModel]


class LoadedModel(OllamaModel, kw_only=True):
    """A name behind which models of this machine are."""

    expires_at: Annotated[str, says("Models stay loaded.")]
    size_vram: int
    context_length: int


class LoadedModels(ResponseModel):
    """All of them."""

    models: list[LoadedModel]


class ShownModel(ResponseModel):
    """A description of a model."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, JsonValue]
    capabilities: list[str]
    modified_at: str


OLLAMA_MODELS: Final[tuple[type, ...]] = (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
    OllamaChatAnswer,
    OllamaAnswer,
    OllamaError,
    OllamaVersion,
    OllamaModels,
    LoadedModels,
    ShownModel,
)
