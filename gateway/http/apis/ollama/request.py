"""Requests of Ollama's API as those of chat and, for raw prompts, of completions."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.http.apis.ollama.schema import (
    ModelOptions,
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaMessageParam,
)
from outrider.gateway.upstream.dialects.anthropic_request import template_variables

_SAMPLING: Final = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
}
_IGNORED: Final = ("keep_alive", "template", "context")
_IGNORED_OPTIONS: Final = sorted(
    ModelOptions.model_fields.keys() - _SAMPLING.keys() - {"num_predict"}
)
_MEDIA_TYPES: Final = {"iVBOR": "image/png", "R0lG": "image/gif", "UklG": "image/webp"}
"""By how a file of this type begins in base64."""
_ANY_OBJECT: Final = {"type": "object"}

_encode: Final = msgspec.json.Encoder().encode
_Fields = dict[str, Any]


def chat_fields(request: OllamaChatRequest, document: _Fields, *, takes_images: bool) -> _Fields:
    """A conversation as a chat's request. Raises BadRequestError."""
    translator = _Translator(takes_images)
    messages = [
        translator.message(message, f"messages.{index}")
        for index, message in enumerate(request.messages or ())
    ]
    fields = _shared_fields(request) | {"messages": messages} | _template_fields(request)
    if request.tools:
        fields["tools"] = document["tools"]
    return fields


def prompt_fields(request: OllamaGenerateRequest, *, takes_images: bool) -> _Fields:
    """A prompt as a chat's request. Raises BadRequestError."""
    asked = OllamaMessageParam(role="user", content=request.prompt, images=request.images)
    messages = [_Translator(takes_images).message(asked, "")]
    if request.system:
        messages.insert(0, {"role": "system", "content": request.system})
    return _shared_fields(request) | {"messages": messages} | _template_fields(request)


def raw_fields(request: OllamaGenerateRequest) -> _Fields:
    """A prompt without a template, or with a suffix, as a completion's. Raises BadRequestError."""
    if request.images:
        raise BadRequestError("images: a raw prompt takes no images.", param="images")
    fields = _shared_fields(request) | {"prompt": request.prompt or ""}
    if request.suffix:
        fields["suffix"] = request.suffix
    if request.format:
        schema = _ANY_OBJECT if request.format == "json" else request.format
        fields["structured_outputs"] = {"json": schema}
    return fields


def idle_fields(request: OllamaFields) -> tuple[str, ...]:
    """Return the paths of the fields that were given and change nothing."""
    options = request.options
    paths = [name for name in _IGNORED if getattr(request, name, None) not in (None, "", [])]
    if options is not None:
        given = (name for name in _IGNORED_OPTIONS if getattr(options, name) is not None)
        paths += [f"options.{name}" for name in given]
    if isinstance(request, OllamaGenerateRequest) and (request.raw or request.suffix):
        paths += [name for name in ("system", "think") if getattr(request, name)]
    return tuple(paths)


def _shared_fields(request: OllamaFields) -> _Fields:
    fields: _Fields = {"model": request.model}
    if request.stream is not False:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    options = request.options
    if options is not None:
        given = {theirs: getattr(options, ours) for ours, theirs in _SAMPLING.items()}
        fields |= {name: value for name, value in given.items() if value not in (None, [])}
        if options.num_predict is not None and options.num_predict > 0:
            fields["max_tokens"] = options.num_predict
    own: _Fields = {"fit_context": True}
    if request.outrider is not None:
        own |= request.outrider.model_dump(by_alias=True, exclude_unset=True)
    fields["outrider"] = own
    return fields


def _template_fields(request: OllamaFields) -> _Fields:
    """Return the fields that a chat has and a completion has not."""
    fields: _Fields = {}
    if request.think is not None:
        fields["chat_template_kwargs"] = template_variables(is_on=request.think is not False)
        if isinstance(request.think, str):
            fields["reasoning_effort"] = request.think
    if request.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif request.format:
        schema = {"name": "answer", "schema": request.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


class _Translator:
    """Translates messages in their order. Calls get ids, which their results refer to."""

    def __init__(self, takes_images: bool) -> None:
        self._takes_images = takes_images
        self._num_calls = 0
        self._open: list[tuple[str, str]] = []  # the id and name of each call without a result

    def message(self, message: OllamaMessageParam, path: str) -> _Fields:
        """Raise BadRequestError for images that nobody reads."""
        if message.images and not self._takes_images:
            where = f"{path}.images".removeprefix(".")
            raise BadRequestError(
                f"{where}: the models of this machine read text only.", param=where
            )
        if message.role == "assistant":
            return self._answer(message)
        fields: _Fields = {"role": message.role, "content": _content(message)}
        if message.role == "tool":
            fields["tool_call_id"] = self._id_of(message)
        return fields

    def _answer(self, message: OllamaMessageParam) -> _Fields:
        calls = []
        for call in message.tool_calls or ():
            self._num_calls += 1
            function = call.function
            call_id = call.id or f"call_{self._num_calls}"
            self._open.append((call_id, function.name))
            arguments = _encode(function.arguments or {}).decode()
            called = {"name": function.name, "arguments": arguments}
            calls.append({"id": call_id, "type": "function", "function": called})
        fields: _Fields = {"role": "assistant", "content": message.content or ""}
        if message.thinking:
            fields["reasoning_content"] = message.thinking
        if calls:
            fields["tool_calls"] = calls
        return fields

    def _id_of(self, result: OllamaMessageParam) -> str:
        """Return the id of the call with this result: by its id, its name, or its place."""
        wanted = (result.tool_call_id, result.tool_name)
        found = [call for call in self._open if wanted[0] == call[0]]
        found += [call for call in self._open if wanted[1] == call[1]]
        call = next(iter(found or self._open), (result.tool_call_id or "call_0", ""))
        if call in self._open:
            self._open.remove(call)
        return call[0]


def _content(message: OllamaMessageParam) -> str | list[_Fields]:
    text = message.content or ""
    if not message.images:
        return text
    return [*([{"type": "text", "text": text}] if text else []), *_image_parts(message.images)]


def _image_parts(images: Sequence[str]) -> list[_Fields]:
    parts = []
    for image in images:
        kinds = (kind for start, kind in _MEDIA_TYPES.items() if image.startswith(start))
        url = f"data:{next(kinds, 'image/jpeg')};base64,{image}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts
