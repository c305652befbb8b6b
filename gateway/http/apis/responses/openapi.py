"""POST /v1/responses in the OpenAPI document."""

from typing import Any

from outrider.gateway.contract.schema.openapi import generation_operation
from outrider.gateway.http.apis.responses.answers import ResponseEvent, ResponseObject
from outrider.gateway.http.apis.responses.request import ResponsesRequest


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
