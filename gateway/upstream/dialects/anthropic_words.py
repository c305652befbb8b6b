"""Terms of Anthropic's Messages API beside OpenAI's, for both ways between them."""

from collections.abc import Mapping
from typing import Final, Literal

MessageStopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]

FINISH_REASONS: Final = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
"""OpenAI's finish reason by stop reason; all others are a stop."""

STOP_REASONS: Final[Mapping[str, MessageStopReason]] = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
"""Stop reason by OpenAI's finish reason; all others are the end of the turn."""

TOOL_CHOICES: Final = {"auto": "auto", "required": "any", "none": "none"}
"""The type of a `tool_choice` by OpenAI's word."""

ERROR_STATUS: Final = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""HTTP status by the type of an error. https://platform.claude.com/docs/en/api/errors"""


def error_type(status: int) -> str:
    """Return the type of an error with this HTTP status."""
    types = {known: kind for kind, known in ERROR_STATUS.items()} | {503: "overloaded_error"}
    return types.get(status, "invalid_request_error" if status < 500 else "api_error")
