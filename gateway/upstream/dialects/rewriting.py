"""Small changes to OpenAI's JSON that leave all the other bytes as the server wrote them."""

import re
from typing import Final

import msgspec

from outrider.gateway.upstream.call import Chunk
from outrider.gateway.upstream.dialects.base import to_event
from outrider.gateway.upstream.event_stream import event_data

# An object whose values keep their original bytes.
_read_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode: Final = msgspec.json.Encoder().encode

_NULL: Final = msgspec.Raw(b"null")
_PLAIN_EVENT: Final = re.compile(rb"data: ?\{[^\r\n]*\}(?:\r\n\r\n|\n\n|\r\r)")
_REASONING_FIELDS: Final = ("reasoning_content", "reasoning")


def splice(raw: bytes, name: str, value_json: bytes) -> bytes:
    """Return an event, or a whole body, with one more field in its outermost object.

    A field of that name is replaced: an upstream gateway has a report of its own. `value_json` is
    JSON in one line. Raises ValueError for a text without an object.
    """
    key = _encode(name)
    is_body = raw.lstrip()[:1] == b"{"
    if key not in raw and (is_body or _PLAIN_EVENT.fullmatch(raw)):
        return _insert(raw, key + b":" + value_json)
    data = raw if is_body else event_data(raw)
    if data is None:
        raise ValueError("a comment holds no object")
    fields = _read_fields(data)
    fields[name] = msgspec.Raw(value_json)
    body = _encode(fields)
    return body if is_body else to_event(body)


def _insert(raw: bytes, field: bytes) -> bytes:
    """Insert a field before the last brace."""
    end = raw.rindex(b"}")
    comma = b"" if raw[:end].rstrip().endswith(b"{") else b","
    return raw[:end] + comma + field + raw[end:]


def with_id(raw: bytes, answer_id: str) -> bytes:
    """Return the event with another `id`; a text that is no JSON object stays as it is."""
    data = event_data(raw)
    try:
        fields = _read_fields(data or b"")
    except (ValueError, RecursionError):
        return raw
    fields["id"] = msgspec.Raw(_encode(answer_id))
    return to_event(_encode(fields))


def without_role(raw: bytes) -> bytes:
    """Return the event without roles in its choices; an unreadable event stays as it is."""
    if b'"role"' not in raw:
        return raw
    try:
        fields = _read_fields(event_data(raw) or b"")
        choices = [_read_fields(choice) for choice in _read_items(fields["choices"])]
        for choice in choices:
            delta = _read_fields(choice["delta"])
            delta.pop("role", None)
            choice["delta"] = msgspec.Raw(_encode(delta))
    except (ValueError, RecursionError, KeyError):
        return raw
    fields["choices"] = msgspec.Raw(_encode(choices))
    return to_event(_encode(fields))


def id_of(raw: bytes) -> str | None:
    """Return the `id` that an event or a body carries; None for none."""
    data = raw if raw.lstrip()[:1] == b"{" else event_data(raw)
    try:
        value = msgspec.json.decode(_read_fields(data or b"").get("id", b"null"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def cut_content(chunk: Chunk, num_chars: int) -> Chunk | None:
    """Return the chunk without the first characters of its text; None if no text is left.

    Text is its reasoning, then its content. For a chunk with one choice; log-probabilities stay.
    """
    reasoning = chunk.reasoning[num_chars:]
    content = chunk.content[max(num_chars - len(chunk.reasoning), 0) :]
    rest = msgspec.structs.replace(chunk, reasoning=reasoning, content=content)
    if not says_something(rest):
        return None
    if (reasoning, content) == (chunk.reasoning, chunk.content):
        return chunk
    return msgspec.structs.replace(
        rest, raw=_with_text(chunk.raw, reasoning=reasoning, content=content)
    )


def says_something(chunk: Chunk) -> bool:
    """Return whether the event has content; a role or a keep-alive has none."""
    return bool(
        chunk.has_text or chunk.has_logprobs or chunk.finish_reason or chunk.usage or chunk.is_done
    )


def num_logprobs(raw: bytes) -> int:
    """Return the number of tokens with log-probabilities in an event of one choice."""
    try:
        choice = _read_fields(_read_items(_read_fields(event_data(raw) or b"")["choices"])[0])
        logprobs = _read_fields(choice["logprobs"])
        return len(_read_items(logprobs[_entries_field(logprobs)]))
    except (ValueError, RecursionError, LookupError):
        return 0


def cut_logprobs(chunk: Chunk, num_tokens: int) -> Chunk:
    """Return the chunk without its first tokens' log-probabilities; its text stays.

    For a chunk with one choice that has as many.
    """
    fields = _read_fields(event_data(chunk.raw) or b"")
    choice = _read_fields(_read_items(fields["choices"])[0])
    logprobs = _read_fields(choice["logprobs"])
    num_left = len(_read_items(logprobs[_entries_field(logprobs)])) - num_tokens
    for name, value in logprobs.items():
        if bytes(value).lstrip()[:1] == b"[":  # a completion has several lists side by side
            logprobs[name] = msgspec.Raw(_encode(_read_items(value)[num_tokens:]))
    choice["logprobs"] = msgspec.Raw(_encode(logprobs)) if num_left else _NULL
    fields["choices"] = msgspec.Raw(_encode([choice]))
    return msgspec.structs.replace(chunk, raw=to_event(_encode(fields)), has_logprobs=num_left > 0)


def _entries_field(logprobs: dict[str, msgspec.Raw]) -> str:
    """Return the field in which chats or completions have an entry for each token."""
    return "content" if "content" in logprobs else "tokens"


def _with_text(raw: bytes, *, reasoning: str, content: str) -> bytes:
    """Return the event with another text in its only choice, in the fields that had some."""
    fields = _read_fields(event_data(raw) or b"")
    choice = _read_fields(_read_items(fields["choices"])[0])
    if "text" in choice:
        choice["text"] = msgspec.Raw(_encode(content))
    else:
        delta = _read_fields(choice["delta"])
        for name in _REASONING_FIELDS:
            _set_text(delta, name, reasoning)
        _set_text(delta, "content", content)
        choice["delta"] = msgspec.Raw(_encode(delta))
    fields["choices"] = msgspec.Raw(_encode([choice]))
    return to_event(_encode(fields))


def _set_text(delta: dict[str, msgspec.Raw], name: str, text: str) -> None:
    """Replace a text where there was one. Null stays null: it means no text."""
    if delta.get(name, _NULL) != _NULL:
        delta[name] = msgspec.Raw(_encode(text))
