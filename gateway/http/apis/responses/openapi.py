"""The endpoints of the Responses API in the OpenAPI document."""

from typing import Any

from outrider.gateway.contract.schema.openapi import generation_operation, question_operation
from outrider.gateway.http.apis.responses.answers import ResponseEvent, ResponseObject
from outrider.gateway.http.apis.responses.request import InputTokensRequest, ResponsesRequest
from outrider.gateway.http.apis.tokenize_schema import InputTokens


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
