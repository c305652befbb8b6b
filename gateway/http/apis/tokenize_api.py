"""/v1/tokenize and /v1/detokenize in the OpenAPI document."""

from typing import Any

from outrider.gateway.contract.schema.openapi import question_operation
from outrider.gateway.http.apis.tokenize_schema import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeMessages,
    TokenizePrompt,
)


def tokenize_operation() -> dict[str, Any]:
    """A POST of a text or of a conversation."""
    return question_operation(
        (TokenizePrompt, TokenizeMessages), Tokenized, "The prompt's tokens.", "tokenize"
    )


def detokenize_operation() -> dict[str, Any]:
    """A POST of tokens."""
    return question_operation(
        (DetokenizeRequest,), Detokenized, "The text of the tokens.", "detokenize"
    )
