"""The OpenAPI document: the requests' and responses' models, and what every failure looks like.

Endpoints read their bodies themselves (limits, speed, OpenAI's errors), so FastAPI cannot see the
models; they are put in here. Limits that depend on the loaded models are written in too.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Final, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from outrider.gateway.contract.answers.responder import HandOffKind
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.completions import CompletionRequest
from outrider.gateway.contract.schema.errors import ErrorEvent, ErrorResponse
from outrider.gateway.contract.schema.loaded_limits import (
    LoadedLimits,
    add_limits,
    add_names,
    add_tiers,
)
from outrider.gateway.contract.schema.model_cards import (
    ModelCard,
    ModelList,
    NamedModel,
    NamedModels,
)
from outrider.gateway.contract.schema.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Health,
    Readiness,
    ServerLoad,
    UpstreamChunk,
    UpstreamCompletion,
    Version,
)
from outrider.gateway.contract.schema.routing import RouteReport
from outrider.gateway.contract.schema.structs import REF, schemas_of
from outrider.verifier.params import TIERS

_MODELS: Final[tuple[type, ...]] = (
    ChatRequest,
    CompletionRequest,
    ErrorEvent,
    ErrorResponse,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Health,
    ModelCard,
    ModelList,
    NamedModel,
    NamedModels,
    Readiness,
    RouteReport,
    ServerLoad,
    Version,
)
_FAILURES: Final[Mapping[int, str]] = {
    400: "The request is malformed or not supported; `param` names the field.",
    401: "No key, or one that is not valid.",
    403: "The key is valid, but not for this.",
    404: "Unknown model or path.",
    409: "The name is taken, the key is revoked, or another experiment is in the way.",
    413: "The body is too large.",
    415: "The body is not declared as application/json.",
    422: "The idempotency-key was used for another body.",
    429: "A limit of the key or its team is reached, the queue is full, or a tier is busy.",
    500: "The gateway or the engine failed.",
    502: "An upstream tier failed.",
    503: "No tier that may answer is available now, or the engine is loading or restarting.",
    504: "The request's own deadline has passed.",
    508: "The request has come through this gateway before.",
}
_RETRY_HEADERS: Final = {
    name: {"description": text, "schema": {"type": "string"}}
    for name, text in {
        "retry-after": "Seconds to wait.",
        "retry-after-ms": "The same in milliseconds.",
        "x-should-retry": "Whether a retry may help: `true` or `false`.",
    }.items()
}
_ID_HEADER: Final = {
    "x-request-id": {
        "description": "The client's own, or a new one.",
        "schema": {"type": "string"},
        "required": True,
    }
}
_TIER_HEADER: Final = {
    "x-outrider-tier": {
        "description": "The tier that answered: `small`, `large`, or the name of an upstream tier.",
        "schema": {"type": "string"},
        "required": True,
    },
    "x-outrider-reason": {
        "description": "Reason of the choice: the router's, then that of the answer's watch.",
        "schema": {"type": "string"},
        "required": True,
    },
    "x-outrider-ignored-fields": {
        "description": "Fields of the request that the answering model did not get.",
        "schema": {"type": "string"},
    },
}
_HAND_OFF_HEADERS: Final = {
    "x-outrider-hand-off": {
        "description": "Why the answer is not from the first tier.",
        "schema": {"type": "string", "enum": list(get_args(HandOffKind))},
    },
    "x-outrider-confidence": {
        "description": "How safe the small model's answer looked, from 0 to 1.",
        "schema": {"type": "string"},
    },
    "x-outrider-degraded": {
        "description": "An upstream tier should have answered and could not.",
        "schema": {"type": "string", "enum": ["true"]},
    },
}
_TRACE_HEADER: Final = {
    "name": "x-outrider-trace",
    "in": "header",
    "required": False,
    "description": "`1`: each chunk also says which of its tokens were drafted.",
    "schema": {"type": "string"},
}


_ANTHROPIC_HEADER: Final = {
    "name": "anthropic-version",
    "in": "header",
    "required": False,
    "description": "Any: the answer has the words of Anthropic's API.",
    "schema": {"type": "string"},
}
_IDEMPOTENCY_HEADER: Final = {
    "name": "idempotency-key",
    "in": "header",
    "required": False,
    "description": "A request that is repeated with its key gets the first one's answer.",
    "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
}
_FREE: Final = frozenset({"/health", "/ready", "/ping"})
_SECURITY: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of the gateway."},
    "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def _ref(model: type) -> dict[str, str]:
    return {"$ref": REF.format(model=model.__name__)}


def json_content(*models: type) -> dict[str, Any]:
    """A body in JSON: one of the models."""
    references = [_ref(model) for model in models]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"application/json": {"schema": schema}}


def success(answer: type, description: str) -> dict[str, Any]:
    """The response of an operation that answers JSON."""
    return {"description": description, "headers": _ID_HEADER, "content": json_content(answer)}


def failures(*statuses: int, words: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Responses of an operation that may fail in these ways. `words`: its own descriptions."""
    described = {**_FAILURES, **(words or {})}
    return {
        str(status): {
            "description": described[status],
            "headers": _ID_HEADER | (_RETRY_HEADERS if status in {429, 503} else {}),
            "content": json_content(ErrorResponse),
        }
        for status in statuses
    }


def operation(answer: type, description: str, *statuses: int, operation_id: str) -> dict[str, Any]:
    """A GET that answers JSON."""
    return {
        "operationId": operation_id,
        "responses": failures(*statuses) | {"200": success(answer, description)},
    }


def query(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A field of the query."""
    where = {"name": name, "in": "query", "required": False}
    return {**where, "description": description, "schema": schema}


def models_operation(
    answer: type, anthropic: type, description: str, operation_id: str, *statuses: int
) -> dict[str, Any]:
    """A GET about models, which answers in Anthropic's words where a header asks for them."""
    described = operation(answer, description, *statuses, 503, operation_id=operation_id)
    described["responses"]["200"]["content"] = json_content(answer, anthropic)
    return {**described, "parameters": [_ANTHROPIC_HEADER]}


def generation_operation(
    request: type, whole: type, chunk: type, operation_id: str
) -> dict[str, Any]:
    """A POST that generates, whole or as a stream."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_ref(chunk), _ref(ErrorEvent)]},
    }
    # itemSchema is OpenAPI 3.2's; FastAPI writes it too, and readers of 3.1 pass over it.
    stream = {
        "itemSchema": {
            "type": "object",
            "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
            "required": ["data"],
        }
    }
    answered = {
        "description": "The answer; a stream of events when `stream` is true.",
        "headers": _ID_HEADER | _TIER_HEADER | _HAND_OFF_HEADERS,
        "content": json_content(whole) | {"text/event-stream": stream},
    }
    statuses = failures(400, 404, 413, 415, 422, 429, 500, 502, 503, 504, 508)
    return {
        "operationId": operation_id,
        "parameters": [_TRACE_HEADER, _IDEMPOTENCY_HEADER],
        "requestBody": {"required": True, "content": json_content(request)},
        "responses": statuses | {"200": answered},
    }


def question_operation(
    requests: Sequence[type], answer: type, description: str, name: str
) -> dict[str, Any]:
    """A POST of one of several bodies that answers JSON and generates nothing."""
    statuses = failures(400, 404, 413, 415, 500, 503, 508)
    return {
        "operationId": name,
        "requestBody": {"required": True, "content": json_content(*requests)},
        "responses": statuses | {"200": success(answer, description)},
    }


def failing_with(error: type, described: dict[str, Any]) -> dict[str, Any]:
    """The operation of an API whose errors have words of their own."""
    refusals = failures(401, 403, 429)
    responses = {
        status: told if status == "200" else {**told, "content": json_content(error)}
        for status, told in (refusals | described["responses"]).items()
    }
    return {**described, "responses": responses}


def passed_operation(path: str, *, takes_form: bool) -> dict[str, Any]:
    """A POST that is passed on to an upstream server, whose own API describes its fields."""
    media_type = "multipart/form-data" if takes_form else "application/json"
    schema = {
        "type": "object",
        "properties": {"model": {"type": "string", "minLength": 1}},
        "required": ["model"],
    }
    statuses = failures(400, 401, 403, 404, 413, 415, 429, 500, 502, 503, 508)
    headers = {**_ID_HEADER, "x-outrider-tier": _TIER_HEADER["x-outrider-tier"]}
    answered = {"description": "The server's answer.", "headers": headers}
    return {
        "operationId": "pass" + "".join(part.title() for part in path.strip("/").split("/")),
        "requestBody": {"required": True, "content": {media_type: {"schema": schema}}},
        "responses": statuses | {"200": answered},
    }


def build_document(
    app: FastAPI,
    limits: LoadedLimits | None,
    *,
    models: Sequence[type] = (),
    upstream_tiers: Sequence[str] = (),
) -> dict[str, Any]:
    """The document; `limits` is None while the engine is not ready.

    `models`: what requests and answers of other APIs than chat and completions are made of.
    """
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    document = deepcopy(document)  # parts of it are the routes' own
    described = [*_MODELS, *models]
    if upstream_tiers:
        described += (UpstreamCompletion, UpstreamChunk)
        _add_upstream_tiers(document)
    schemas = schemas_of(described)
    add_tiers(schemas, (*TIERS, *upstream_tiers))
    if limits is not None:
        add_limits(schemas, limits)
        add_names(schemas, limits)
    document["components"] = {
        "schemas": dict(sorted(schemas.items())),
        "securitySchemes": _SECURITY,
    }
    for path, operations in document["paths"].items():
        for operation_ in operations.values():
            _finish(path, operation_["responses"], operation_)
    return document


def _finish(path: str, responses: dict[str, Any], described: dict[str, Any]) -> None:
    """Add what all operations share: authentication, and its failures."""
    if responses.get("422", {}).get("description") == "Validation Error":
        del responses["422"]  # FastAPI's own, which no endpoint here answers with
    if path in _FREE:
        return
    # While no key exists none is needed: hence the empty requirement.
    described["security"] = [{}, {"bearer": []}, {"api_key": []}]
    for status, text in failures(401, 403, 429).items():
        responses.setdefault(status, text)


def _add_upstream_tiers(document: dict[str, Any]) -> None:
    """Answers may be a server's own."""
    for path in ("/v1/chat/completions", "/v1/completions"):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        whole = content["application/json"]
        whole["schema"] = {"anyOf": [whole["schema"], _ref(UpstreamCompletion)]}
        event = content["text/event-stream"]["itemSchema"]["properties"]["data"]
        event["anyOf"][1]["contentSchema"]["anyOf"].append(_ref(UpstreamChunk))
