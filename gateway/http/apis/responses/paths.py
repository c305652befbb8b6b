"""Paths of the chat request's validation errors in the request that the client sent."""

import re
from dataclasses import replace
from typing import Final

from outrider.gateway.contract.errors.http import Problem

# In this order; what a name is followed by stays, unless the pattern takes it.
_RENAMED: Final = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"messages\b.*", "input"),
        (r"max_tokens\b|max_completion_tokens\b", "max_output_tokens"),
        (r"response_format(\.json_schema)?\b", "text.format"),
        (r"tools\.(\d+)\.function\b", r"tools.\1"),
        (r"tool_choice\.function\b", "tool_choice"),
        (r"reasoning_effort\b", "reasoning.effort"),
        (r"verbosity\b", "text.verbosity"),
        (r"logprobs\b", "include"),
        (r"stream_options\.include_usage\b", "stream"),
    )
)


def own_path(path: str) -> str:
    """A field of a chat request as the field that it was made of."""
    for pattern, name in _RENAMED:
        if match := pattern.match(path):
            return match.expand(name) + path[match.end() :]
    return path


def in_own_words(problem: Problem) -> Problem:
    """The same problem with the paths of this API. What another server has written stays."""
    if problem.param is None or problem.raw is not None:
        return problem
    path = own_path(problem.param)
    # A function: in a text re.sub would read backslashes, and a client may have named the field.
    message = re.sub(
        rf"(?<![\w.]){re.escape(problem.param)}(?![\w])", lambda _: path, problem.message
    )
    return replace(problem, param=path, message=message)
