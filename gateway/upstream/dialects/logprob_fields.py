"""Log-probabilities that the gateway asks a server for, to judge its answer.

Chats have `content`, a list of entries; completions have `tokens` and `token_logprobs` side by
side, or at llama.cpp the entries of chats.
"""

import math
from typing import Final

import msgspec

from outrider.gateway.upstream.call import Chunk, TokenLogprob, UpstreamCall
from outrider.gateway.upstream.dialects.base import ChunkReader, to_event
from outrider.gateway.upstream.event_stream import event_data

_NULL: Final = msgspec.Raw(b"null")
_encode: Final = msgspec.json.Encoder().encode
_read_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_choices: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode


class _Entry(msgspec.Struct):
    token: str = ""
    logprob: float | None = None
    bytes: list[int] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None


_read_logprobs: Final = msgspec.json.Decoder(_Logprobs | None).decode


class LogprobReader:
    """Reads a stream's log-probabilities; removes them where the client did not ask for them."""

    def __init__(self, reader: ChunkReader, call: UpstreamCall) -> None:
        """`reader` reads everything else."""
        self._reader = reader
        self._shows_logprobs = call.shows_logprobs

    @property
    def is_complete(self) -> bool:
        """Return whether the answer is complete."""
        return self._reader.is_complete

    def read(self, event: bytes) -> Chunk:
        """Read one event. Raises as `reader` does."""
        chunk = self._reader.read(event)
        if not chunk.has_logprobs:
            return chunk
        choices = _read_choices(_read_fields(event_data(event) or b"")["choices"])
        found = tuple(
            entry for choice in choices for entry in read_logprobs(choice.get("logprobs", _NULL))
        )
        if self._shows_logprobs:
            return msgspec.structs.replace(chunk, token_logprobs=found)
        return msgspec.structs.replace(
            chunk, raw=without_logprobs(chunk.raw), has_logprobs=False, token_logprobs=found
        )


def read_logprobs(raw: msgspec.Raw) -> tuple[TokenLogprob, ...]:
    """Return the tokens and their log-probabilities; none for what cannot be read. Never raises."""
    try:
        fields = _read_logprobs(raw)
        if fields is None:
            return ()
        if fields.content is not None:
            return tuple(
                TokenLogprob(_bytes_of(entry), _number(entry.logprob)) for entry in fields.content
            )
        return tuple(
            TokenLogprob(token.encode("utf-8", "surrogatepass"), _number(logprob))
            for token, logprob in zip(fields.tokens or (), fields.token_logprobs or (), strict=True)
        )
    except (ValueError, RecursionError):  # also a byte that is none, and lists of other lengths
        return ()


def without_logprobs(raw: bytes) -> bytes:
    """Return an event, or a whole body, with null as the log-probabilities of its choices."""
    is_body = raw.lstrip()[:1] == b"{"
    fields = _read_fields(raw if is_body else event_data(raw) or b"")
    choices = _read_choices(fields["choices"])
    for choice in choices:
        if "logprobs" in choice:
            choice["logprobs"] = _NULL
    fields["choices"] = msgspec.Raw(_encode(choices))
    body = _encode(fields)
    return body if is_body else to_event(body)


def _bytes_of(entry: _Entry) -> bytes:
    if entry.bytes is not None:
        return bytes(entry.bytes)
    return entry.token.encode("utf-8", "surrogatepass")


def _number(logprob: float | None) -> float:
    return math.nan if logprob is None else logprob
