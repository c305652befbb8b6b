"""/api/embed and /api/embeddings in the words of /v1/embeddings, which upstream tiers answer."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from outrider.gateway.contract.errors.tree import GenerationError
from outrider.gateway.contract.schema.common import (
    Ignored,
    ListOf,
    ModelName,
    OutriderOptions,
    PositiveCount,
    RequestModel,
)
from outrider.gateway.contract.schema.structs import ResponseModel
from outrider.gateway.http.apis.ollama.api import OllamaParts
from outrider.gateway.http.apis.reading import read_body

_NS: Final = 1_000_000_000
_encode: Final = msgspec.json.Encoder().encode


class _EmbeddingFields(RequestModel):
    """Fields of both endpoints."""

    model: ModelName
    options: Ignored = None
    keep_alive: Ignored = None
    outrider: OutriderOptions | None = None


class OllamaEmbedRequest(_EmbeddingFields):
    """Texts to embed."""

    input: str | ListOf[str]
    dimensions: PositiveCount | None = None
    truncate: Ignored = None


class OllamaEmbeddingsRequest(_EmbeddingFields):
    """A text to embed, in the older form."""

    prompt: str


class OllamaEmbeddings(ResponseModel):
    """The texts' embeddings."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(ResponseModel):
    """The text's embedding."""

    embedding: list[float]


OLLAMA_EMBEDDING_MODELS: Final[tuple[type, ...]] = (
    OllamaEmbedRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbeddings,
    OllamaEmbedding,
)


class _Made(msgspec.Struct):
    """An embedding of OpenAI's."""

    embedding: list[float]


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _Embedded(msgspec.Struct):
    """OpenAI's answer."""

    data: list[_Made]
    model: str = ""
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaEmbed:
    """One of the two endpoints. `is_old`: /api/embeddings."""

    parts: OllamaParts
    is_old: bool = False

    async def request(self, body: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
        """Translate a request; return it, and what translates its answer. Raises BadRequestError.

        What translates raises GenerationError for what is no answer.
        """
        model: type[_EmbeddingFields] = (
            OllamaEmbeddingsRequest if self.is_old else OllamaEmbedRequest
        )
        read = await read_body(model, body, ignores_unknown=self.parts.ignores_unknown)
        request, begin_s = read.request, time.monotonic()
        fields: dict[str, Any] = {"model": await self.parts.meant_name(request.model)}
        if isinstance(request, OllamaEmbedRequest):
            fields["input"] = request.input
            if request.dimensions is not None:
                fields["dimensions"] = request.dimensions
        elif isinstance(request, OllamaEmbeddingsRequest):
            fields["input"] = request.prompt
        if request.outrider is not None:
            fields["outrider"] = request.outrider.model_dump(by_alias=True, exclude_unset=True)

        def answer(told: bytes) -> bytes:
            embedded = _read(told)
            if self.is_old:
                return _encode(OllamaEmbedding(_first(embedded.data)))
            return _encode(
                OllamaEmbeddings(
                    model=embedded.model or request.model,
                    embeddings=[made.embedding for made in embedded.data],
                    total_duration=int((time.monotonic() - begin_s) * _NS),
                    load_duration=0,
                    prompt_eval_count=0 if embedded.usage is None else embedded.usage.prompt_tokens,
                )
            )

        return _encode(fields), answer


def _read(told: bytes) -> _Embedded:
    try:
        return msgspec.json.decode(told, type=_Embedded)
    except (ValueError, RecursionError):
        raise GenerationError(
            "The model's server sent an answer that cannot be read.", code="unreadable_answer"
        ) from None


def _first(data: Sequence[_Made]) -> list[float]:
    return data[0].embedding if data else []
