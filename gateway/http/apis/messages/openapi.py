"""The endpoints of the Messages API in the OpenAPI document."""

from typing import Any, Final

from outrider.gateway.contract.schema.openapi import (
    failing_with,
    generation_operation,
    question_operation,
)
from outrider.gateway.http.apis.messages.answers import (
    MESSAGE_EVENTS,
    MessageAnswer,
    MessagesError,
)
from outrider.gateway.http.apis.messages.schema import CountTokensRequest, MessagesRequest
from outrider.gateway.http.apis.tokenize_schema import TokenCount

_VERSION_HEADERS: Final = [
    {
        "name": name,
        "in": "header",
        "required": False,
        "description": "Accepted, and changes nothing.",
        "schema": {"type": "string"},
    }
    for name in ("anthropic-version", "anthropic-beta")
]


def messages_operation() -> dict[str, Any]:
    """A POST that generates. Its streams have named events, and end without [DONE]."""
    operation = generation_operation(MessagesRequest, MessageAnswer, MessageAnswer, "createMessage")
    operation["responses"]["200"]["content"]["text/event-stream"]["itemSchema"] = {
        "type": "object",
        "properties": {
            "event": {"type": "string"},
            "data": {
                "type": "string",
                "contentMediaType": "application/json",
                "contentSchema": {"anyOf": [_ref(model) for model in MESSAGE_EVENTS]},
            },
        },
        "required": ["event", "data"],
    }
    return _in_their_words(operation)


def count_tokens_operation() -> dict[str, Any]:
    """A POST that says how long a prompt is."""
    operation = question_operation(
        (CountTokensRequest,), TokenCount, "How many tokens the prompt has.", "countMessageTokens"
    )
    return _in_their_words(operation)


def _in_their_words(operation: dict[str, Any]) -> dict[str, Any]:
    """With the API's own errors and headers."""
    headers = [*operation.get("parameters", []), *_VERSION_HEADERS]
    return {**failing_with(MessagesError, operation), "parameters": headers}


def _ref(model: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
