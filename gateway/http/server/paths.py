"""Paths as clients write them: with doubled slashes, without /v1, and as Azure's clients do."""

from typing import Final

_PREFIX: Final = "/v1"
_WITH_PREFIX: Final = "/v1/"
_TWICE: Final = "/v1/v1/"
_WITHOUT_PREFIX: Final = (
    *("chat", "completions", "responses", "messages", "models", "embeddings", "rerank"),
    *("images", "audio", "tokenize", "detokenize", "tokenizer_info", "files", "batches"),
)
"""The beginnings of paths that clients ask for where their base URL lacks /v1. No page has one."""
_AZURE: Final = "/openai"
_DEPLOYMENTS: Final = "/openai/deployments/"
_OF_DEPLOYMENTS: Final = (
    "/chat/completions",  # before /completions, with which it ends
    "/completions",
    "/embeddings",
    "/images/generations",
    "/images/edits",
    "/audio/speech",
    "/audio/transcriptions",
    "/audio/translations",
)


def meant_path(path: str) -> tuple[str, str | None]:
    """Return the path of the endpoint that is meant, and the model that the path names.

    Azure's clients call /openai/deployments/MODEL/chat/completions, and /openai/models or
    /openai/v1/models. A base URL with a slash too many, or one too few cut off, doubles slashes.
    One without /v1 leaves it out, and one with a /v1 that the client adds by itself doubles it.
    """
    while "//" in path:
        path = path.replace("//", "/")
    if path.startswith(_WITH_PREFIX):
        return (path.removeprefix(_PREFIX) if path.startswith(_TWICE) else path), None
    if path[1:].partition("/")[0] in _WITHOUT_PREFIX:
        return f"{_PREFIX}{path}", None
    if path.startswith(_DEPLOYMENTS):
        for endpoint in _OF_DEPLOYMENTS:
            if path.endswith(endpoint):
                model = path[len(_DEPLOYMENTS) : -len(endpoint)]
                return (f"/v1{endpoint}", model) if model else (path, None)
    elif path.startswith(f"{_AZURE}/"):
        return f"/v1{path.removeprefix(_AZURE).removeprefix('/v1')}", None
    return path, None
