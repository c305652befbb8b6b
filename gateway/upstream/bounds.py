"""An upper bound of a request's tokens for servers with an unknown tokenizer: its bytes.

No tokenizer makes more than one token of a byte of UTF-8, and JSON never writes a text shorter than
it is. So the size of the request bounds the prompt, for any text, and costs no more than writing
JSON. Ordinary text has a quarter as many tokens; the unused rest is given back.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

_NO_PROMPT: Final = frozenset(
    {
        *("model", "stream", "stream_options", "n", "best_of", "stop", "seed", "logit_bias"),
        *("max_tokens", "max_completion_tokens", "min_tokens", "stop_token_ids", "ignore_eos"),
        *("temperature", "top_p", "top_k", "min_p", "logprobs", "top_logprobs", "echo"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "parallel_tool_calls"),
        *("service_tier", "store", "user", "metadata", "safety_identifier", "prediction"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_salt"),
    }
)
"""Fields that no model reads. Every other field counts, also an unknown one."""
_TOOLS_TOKENS: Final = 600
"""Tokens of the text that explains tool calls to a model; the longest such text of known
servers."""
_MEDIA: Final = frozenset(
    {"image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file"}
)
_IMAGES: Final = frozenset({"image_url", "input_image"})

_encode: Final = msgspec.json.Encoder().encode


def most_prompt_tokens(document: Mapping[str, Any], media_tokens: int) -> int:
    """Bound the tokens of all fields that a model may read, tools, schemas and images too.

    An image counts `media_tokens`, whatever its size; sounds and files at least so many, and one
    for each two bytes of their data.
    """
    num_tokens = sum(
        len(_encode(value))
        for name, value in document.items()
        if name not in _NO_PROMPT and value is not None
    )
    if document.get("tools") or document.get("functions"):
        num_tokens += _TOOLS_TOKENS
    return num_tokens + sum(_beyond_bytes(part, media_tokens) for part in media_parts(document))


def most_predicted_tokens(document: Mapping[str, Any]) -> int:
    """Bound the tokens of the client's predicted answer: servers charge for wrong ones in full."""
    prediction = document.get("prediction")
    return 0 if prediction is None else len(_encode(prediction))


def media_parts(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of messages that are no text."""
    messages = document.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind in _MEDIA:
                yield part


def _beyond_bytes(part: Mapping[str, Any], media_tokens: int) -> int:
    """Return a part's tokens beyond its counted bytes; negative where it takes fewer."""
    num_data = max((len(data) for data in _data(part.get(part["type"]))), default=0)
    if part["type"] in _IMAGES:
        return media_tokens - num_data
    return max(media_tokens, num_data // 2) - num_data


def _data(value: object) -> Iterator[str]:
    """Return inline data of a part: a data URL, or base64 in the field `data` or `file_data`."""
    if isinstance(value, str) and value.startswith("data:"):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(inner, str) and (
                name in ("data", "file_data") or inner.startswith("data:")
            ):
                yield inner
