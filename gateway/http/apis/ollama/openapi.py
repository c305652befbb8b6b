"""The endpoints of Ollama's API in the OpenAPI document."""

from typing import Any

from outrider.gateway.contract.schema.openapi import (
    failing_with,
    failures,
    generation_operation,
    json_content,
    operation,
    question_operation,
)
from outrider.gateway.http.apis.ollama.answers import (
    LoadedModels,
    OllamaAnswer,
    OllamaChatAnswer,
    OllamaError,
    OllamaModels,
    OllamaVersion,
    ShownModel,
)
from outrider.gateway.http.apis.ollama.embedding import (
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
)
from outrider.gateway.http.apis.ollama.schema import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)


def chat_operation() -> dict[str, Any]:
    """A POST of a conversation."""
    return _generation(OllamaChatRequest, OllamaChatAnswer, "ollamaChat")


def generate_operation() -> dict[str, Any]:
    """A POST of a prompt."""
    return _generation(OllamaGenerateRequest, OllamaAnswer, "ollamaGenerate")


def tags_operation() -> dict[str, Any]:
    """A GET of all names."""
    return failing_with(
        OllamaError, operation(OllamaModels, "All names.", 503, operation_id="ollamaTags")
    )


def ps_operation() -> dict[str, Any]:
    """A GET of the loaded models."""
    return failing_with(
        OllamaError, operation(LoadedModels, "Loaded models.", 503, operation_id="ollamaPs")
    )


def version_operation() -> dict[str, Any]:
    """A GET of the API's version."""
    return failing_with(
        OllamaError, operation(OllamaVersion, "The API's.", operation_id="ollamaVersion")
    )


def show_operation() -> dict[str, Any]:
    """A POST of a name."""
    return failing_with(
        OllamaError, question_operation((OllamaShowRequest,), ShownModel, "One name.", "ollamaShow")
    )


def embed_operation(*, is_old: bool) -> dict[str, Any]:
    """A POST of texts, or of one in the older form."""
    request, answer, name = (
        (OllamaEmbeddingsRequest, OllamaEmbedding, "ollamaEmbeddings")
        if is_old
        else (OllamaEmbedRequest, OllamaEmbeddings, "ollamaEmbed")
    )
    described = question_operation((request,), answer, "Embeddings.", name)
    described["responses"] |= failures(502)
    return failing_with(OllamaError, described)


def _generation(request: type, answer: type, operation_id: str) -> dict[str, Any]:
    """A POST that generates; its streams have one JSON a line."""
    described = generation_operation(request, answer, answer, operation_id)
    answered = described["responses"]["200"]
    lines = {"itemSchema": json_content(answer, OllamaError)["application/json"]["schema"]}
    answered["content"] = json_content(answer) | {"application/x-ndjson": lines}
    answered["headers"] = {
        name: {**header, "required": False} if name.startswith("x-outrider") else header
        for name, header in answered["headers"].items()
    }  # a request that asks nothing is answered by no tier
    return failing_with(OllamaError, described)
