"""The texts in an answer, out of its JSON or out of the events of its stream."""

from collections import defaultdict
from typing import Any, Final

import msgspec

_DATA: Final = b"data:"
_MAX_CHARS: Final = 256 * 1024


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    message: _Message | None = None
    delta: _Message | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)


_DECODER: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder(_Answer)


def answer_of(body: bytes, *, is_streamed: bool) -> list[str]:
    """Return the choices' contents, in their order, cut where very long. Never raises."""
    texts: defaultdict[int, list[str]] = defaultdict(list)
    for part in _events(body) if is_streamed else [body]:
        try:
            answer = _DECODER.decode(part)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # [DONE], an error, or the half of an event that was cut
        for choice in answer.choices:
            said = choice.delta or choice.message
            texts[choice.index].append((said.content if said else choice.text) or "")
    return ["".join(texts[index])[:_MAX_CHARS] for index in sorted(texts)]


def _events(body: bytes) -> list[bytes]:
    lines = body.splitlines()
    return [line.removeprefix(_DATA).strip() for line in lines if line.startswith(_DATA)]
