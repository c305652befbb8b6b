"""Facts about a request's document, as an upstream server gets it."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from outrider.gateway.answering.reading.parsed_request import ParsedRequest
from outrider.gateway.contract.schema.kinds import Endpoint

_AFFINE_MESSAGES: Final = 2
_AFFINE_CHARS: Final = 1024
_ID_FIELDS: Final = ("logit_bias", "stop_token_ids")


def beginning(document: Mapping[str, Any]) -> bytes:
    """Return what requests of one conversation, or with one system prompt, begin with."""
    messages = document.get("messages")
    if isinstance(messages, list):
        return msgspec.json.encode(messages[:_AFFINE_MESSAGES])
    return msgspec.json.encode(document.get("prompt"))[:_AFFINE_CHARS]


def num_answers(parsed: ParsedRequest) -> int:
    """The number of answers that are written and paid for, sent or not."""
    prompt, best_of = parsed.document.get("prompt"), parsed.document.get("best_of")
    num_prompts = 1
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        num_prompts = len(prompt)
    num_tries = int(best_of) if isinstance(best_of, int | float) else 1
    return num_prompts * max(parsed.num_choices, num_tries)


def speaks_in_ids(document: Mapping[str, Any], endpoint: Endpoint) -> bool:
    """True if it has token ids, which mean something in one tokenizer only."""
    if any(document.get(name) for name in _ID_FIELDS):
        return True
    prompt = document.get("prompt")
    if endpoint == "chat" or not isinstance(prompt, list) or not prompt:
        return False
    first = prompt[0]
    return isinstance(first, int | list)
