"""The names of the models that a server lists."""

from typing import Final

import msgspec


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


_decode: Final = msgspec.json.Decoder(_Cards).decode


def model_ids(body: bytes) -> tuple[str, ...]:
    """The ids in the body of GET /models, in its order; none where it cannot be read."""
    try:
        return tuple(card.id for card in _decode(body).data)
    except (ValueError, RecursionError):
        return ()
