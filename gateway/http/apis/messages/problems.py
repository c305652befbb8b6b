"""Errors in the words of the Messages API."""

from typing import Final

from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.http.apis.messages.answers import MessagesErrorDetail
from outrider.gateway.upstream.dialects.anthropic_words import error_type

# Clients look for these words to know that they have to shorten the conversation.
_TOO_LONG: Final = "prompt is too long: "
# Fields with other names in this API. Messages are checked before they are renumbered.
_NAMES: Final = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "tool_choice.function.name": "tool_choice.name",
    "continue_final_message": "messages",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
    "user": "metadata.user_id",
}


def error_detail(problem: Problem) -> MessagesErrorDetail:
    """Describe an error."""
    return MessagesErrorDetail(type=error_type(problem.status), message=_message(problem))


def _message(problem: Problem) -> str:
    """The message, in which fields have this API's names."""
    message = problem.message
    if problem.code == "context_length_exceeded":
        return _TOO_LONG + message
    param = problem.param
    if param is None or not message.startswith(param):
        return message
    return _renamed(param) + message.removeprefix(param)


def _renamed(param: str) -> str:
    if param in _NAMES:
        return _NAMES[param]
    if param.startswith("tools."):
        return param.replace(".function.parameters", ".input_schema").replace(".function.", ".")
    return param
