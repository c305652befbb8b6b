"""The endpoints of the Responses API in the OpenAPI document."""

from typing import Any, Final

from outrider.gateway.contract.schema.openapi import (
    generation_operation,
    operation,
    query,
    question_operation,
)
from outrider.gateway.http.apis.responses.answers import (
    DeletedResponse,
    InputItemList,
    ResponseEvent,
    ResponseObject,
)
from outrider.gateway.http.apis.responses.endpoints import DEFAULT_ITEMS, MAX_ITEMS, ORDERS
from outrider.gateway.http.apis.responses.request import InputTokensRequest, ResponsesRequest
from outrider.gateway.http.apis.tokenize_schema import InputTokens

_PATH_PARAMETER: Final = {
    "name": "response_id",
    "in": "path",
    "required": True,
    "description": "The id of a stored response.",
    "schema": {"type": "string"},
}


def responses_operation() -> dict[str, Any]:
    """A POST that generates. Its streams have named events, and end without [DONE]."""
    operation = generation_operation(
        ResponsesRequest, ResponseObject, ResponseEvent, "createResponse"
    )
    stream = operation["responses"]["200"]["content"]["text/event-stream"]
    stream["itemSchema"] = {
        "type": "object",
        "properties": {
            "event": {"type": "string"},
            "data": {
                "type": "string",
                "contentMediaType": "application/json",
                "contentSchema": {"$ref": f"#/components/schemas/{ResponseEvent.__name__}"},
            },
        },
        "required": ["event", "data"],
    }
    return operation


def count_input_operation() -> dict[str, Any]:
    """A POST that says how long an input is."""
    return question_operation(
        (InputTokensRequest,), InputTokens, "How many tokens the prompt has.", "countInputTokens"
    )


def retrieve_operation() -> dict[str, Any]:
    """A GET of a stored response."""
    stream = query("stream", "Not streamed again.", {"type": "boolean", "enum": [False]})
    return _stored_operation(ResponseObject, "The response.", "getResponse", stream)


def delete_operation() -> dict[str, Any]:
    """A DELETE of a stored response."""
    return _stored_operation(DeletedResponse, "It is forgotten.", "deleteResponse")


def input_items_operation() -> dict[str, Any]:
    """A GET of the items in front of a stored response."""
    count = {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS, "default": DEFAULT_ITEMS}
    return _stored_operation(
        InputItemList,
        "A page of items.",
        "listInputItems",
        query("limit", "Items at most.", count),
        query("order", "By time.", {"type": "string", "enum": list(ORDERS), "default": "desc"}),
        query("after", "Begin behind the item with this id.", {"type": "string"}),
    )


def _stored_operation(
    answer: type, description: str, name: str, *parameters: dict[str, Any]
) -> dict[str, Any]:
    described = operation(answer, description, 400, 404, 503, operation_id=name)
    users = (
        query(field, "Only a response of this end user.", {"type": "string"})
        for field in ("safety_identifier", "user")
    )
    return {**described, "parameters": [_PATH_PARAMETER, *parameters, *users]}
