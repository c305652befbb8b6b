"""/v1/tokenize and /v1/detokenize in the OpenAPI document."""

from typing import Any

from outrider.gateway.contract.schema.openapi import operation, question_operation
from outrider.gateway.http.apis.tokenize_schema import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeMessages,
    TokenizePrompt,
    TokenizerInfo,
)


def tokenize_operation() -> dict[str, Any]:
    """A POST of a text or of a conversation."""
    return question_operation(
        (TokenizePrompt, TokenizeMessages), Tokenized, "The prompt's tokens.", "tokenize"
    )


def tokenizer_info_operation() -> dict[str, Any]:
    """A GET of a tokenizer's control tokens."""
    described = operation(
        TokenizerInfo, "Its control tokens.", 400, 404, 503, operation_id="tokenizerInfo"
    )
    model = {
        "name": "model",
        "in": "query",
        "required": False,
        "description": "A model of this machine; absent: auto.",
        "schema": {"type": "string"},
    }
    return described | {"parameters": [model]}


def detokenize_operation() -> dict[str, Any]:
    """A POST of tokens."""
    return question_operation(
        (DetokenizeRequest,), Detokenized, "The text of the tokens.", "detokenize"
    )
