"""The names of the models that a server lists."""

from itertools import islice
from typing import Final

import msgspec


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


_MAX_MODELS: Final = 2048
_MAX_CHARS: Final = 256

_decode: Final = msgspec.json.Decoder(_Cards).decode


def _is_name(model: str) -> bool:
    return 0 < len(model) <= _MAX_CHARS and model.isprintable()


def model_ids(body: bytes) -> tuple[str, ...]:
    """Return the ids in the body of GET /models, in order; none if it cannot be read.

    At most as many as any server lists: each is a name that our own list shows, and must be one
    that a request can carry.
    """
    try:
        ids = (card.id for card in _decode(body).data)
        return tuple(islice(filter(_is_name, ids), _MAX_MODELS))
    except (ValueError, RecursionError):
        return ()
