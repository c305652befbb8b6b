"""Requests for OpenAI-compatible servers: the client's own, with as little changed as can be."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.settings.server_traits import ContinuationStrategy, ServerTraits
from outrider.gateway.upstream.call import UpstreamCall
from outrider.gateway.upstream.dialects.base import Resume

_encode: Final = msgspec.json.Encoder().encode
_NEWER_LIMIT: Final = "max_completion_tokens"
_OLDER_LIMIT: Final = "max_tokens"
_FURTHER_LIMIT: Final = "n_predict"  # llama.cpp's own, which wins there
_LOGPROBS: Final[Mapping[Endpoint, Mapping[str, object]]] = {
    "chat": {"logprobs": True, "top_logprobs": 1},
    "completion": {"logprobs": 1},
}
"""One rival a token: none are needed, but without a number llama.cpp sends twenty."""
_LIMITS: Final = (_OLDER_LIMIT, _NEWER_LIMIT, "min_tokens")
# With these, text in front of the answer means something else than an answer's beginning: a
# grammar begins anew, an echo comes again, calls and log-probabilities would be missing.
_UNCONTINUABLE: Final = (
    "tools",
    "functions",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "regex",
    "ebnf",
    "json_schema",
    "grammar",
    "logprobs",
    "top_logprobs",
    "echo",
    "prompt_logprobs",
    "return_token_ids",
    "suffix",
    "input_extra",
    "audio",
)


def request_body(call: UpstreamCall, traits: ServerTraits, resume: Resume | None) -> bytes:
    """Return the request as JSON."""
    document = dict(call.document)
    document.pop("outrider", None)
    document["model"] = call.model
    if call.is_streamed and traits.streams_usage:
        _ask_for_usage(document)
    # The rest of an answer that broke off is not judged any more.
    if call.wants_logprobs and not call.shows_logprobs and (resume is None or not resume.text):
        document |= _LOGPROBS[call.endpoint]
    guess = call.prediction
    if resume is not None and resume.text:
        if resume.strategy == "final_message":
            _continue(document, call, resume)
        elif resume.strategy == "replay":
            guess = resume.text
    if guess and traits.takes_prediction and call.endpoint == "chat":
        is_known = resume is not None and guess == resume.text
        _predict(document, guess, is_known=is_known)
    _name_limit(document, call, traits)
    return encode_request(document)


def encode_request(document: Mapping[str, Any]) -> bytes:
    """Encode as JSON. Raises BadRequestError for a document nested too deeply."""
    try:
        return _encode(document)
    except RecursionError:
        raise BadRequestError("The request is nested too deeply.") from None


def is_resumable(call: UpstreamCall, strategy: ContinuationStrategy) -> bool:
    """Return whether this call's answer can be continued that way, once it has begun.

    The answer's own content (calls, reasoning, log-probabilities) is not considered here.
    """
    if strategy == "none" or call.num_choices != 1 or (call.document.get("best_of") or 1) != 1:
        return False
    prompt = call.document.get("prompt")
    if call.endpoint == "completion" and isinstance(prompt, list) and len(prompt) != 1:
        is_text = False
    else:
        first = prompt[0] if isinstance(prompt, list) else prompt
        is_text = call.endpoint == "chat" or isinstance(first, str)
    if strategy == "replay":
        return is_text or _is_token_list(prompt)
    return is_text and not any(_says_something(call.document.get(name)) for name in _UNCONTINUABLE)


def _is_token_list(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def _says_something(value: object) -> bool:
    """Return whether a field changes anything; text is the format of an answer anyway."""
    is_number = isinstance(value, int) and not isinstance(value, bool)  # 0 alternatives are some
    return is_number or (bool(value) and value != {"type": "text"})


def _ask_for_usage(document: dict[str, Any]) -> None:
    """Ask for the usage chunk; servers may refuse odd options themselves."""
    options = document.get("stream_options")
    if options is None or isinstance(options, Mapping):
        document["stream_options"] = {**(options or {}), "include_usage": True}


def _name_limit(document: dict[str, Any], call: UpstreamCall, traits: ServerTraits) -> None:
    """Set one limit of an answer's length, under the name that the server takes.

    It is the one that this gateway has read: the effective limit must not depend on the reader. Of
    two names servers take either.
    """
    newer, older = document.get(_NEWER_LIMIT), document.get(_OLDER_LIMIT)
    limit = older if newer is None else newer
    if limit is None:
        return
    own = _OLDER_LIMIT if newer is None else _NEWER_LIMIT
    name = (traits.token_limit or own) if call.endpoint == "chat" else _OLDER_LIMIT
    for other in (_NEWER_LIMIT, _OLDER_LIMIT, _FURTHER_LIMIT):
        if other != name:
            document.pop(other, None)
    document[name] = limit


def _predict(document: dict[str, Any], guess: str, *, is_known: bool) -> None:
    """Set a prediction; the client's own stays, unless it is known to be wrong."""
    given = document.get("prediction")
    if given is None or (is_known and not _begins_with(given, guess)):
        document["prediction"] = {"type": "content", "content": guess}


def _begins_with(prediction: object, text: str) -> bool:
    content = prediction.get("content") if isinstance(prediction, Mapping) else None
    return isinstance(content, str) and content.startswith(text)


def _continue(document: dict[str, Any], call: UpstreamCall, resume: Resume) -> None:
    """Pass the delivered text as the beginning of the requested answer."""
    if call.endpoint == "chat":
        messages = list(document["messages"])
        if document.get("continue_final_message"):
            messages[-1] = _lengthened(messages[-1], resume.text)
        else:
            messages.append({"role": "assistant", "content": resume.text})
        document["messages"] = messages
        document["continue_final_message"] = True
        document["add_generation_prompt"] = False
    else:
        prompt = document["prompt"]
        document["prompt"] = (prompt[0] if isinstance(prompt, list) else prompt) + resume.text
    for name in _LIMITS:
        if isinstance(limit := document.get(name), int):
            lowest = 0 if name == "min_tokens" else 1
            document[name] = max(limit - resume.num_tokens, lowest)


def _lengthened(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return the message that the client itself had begun, with more of it."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": content + text}
    *parts, last = content
    return {**message, "content": [*parts, {**last, "text": (last.get("text") or "") + text}]}
