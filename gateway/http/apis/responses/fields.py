"""Fields that /v1/responses refuses, and those that only upstream tiers take."""

from typing import Annotated, Final, Literal

from pydantic import JsonValue, WithJsonSchema

from outrider.gateway.contract.schema.common import Harmless, Label

_STATELESS: Final = "no conversations are kept: send all of it as `input`, or previous_response_id"

ItemStatus = Literal["in_progress", "completed", "incomplete"]

Stateless = Annotated[JsonValue, Harmless(why=_STATELESS)]
NotInBackground = Annotated[
    JsonValue, Harmless((None, False), "responses are answered at once, not in the background")
]
NotKnown = Annotated[JsonValue, Harmless(why="this is not supported")]
UpstreamOnly = Annotated[
    Label | None,
    WithJsonSchema(
        {"enum": [None], "description": "For upstream tiers; the local models refuse it."}
    ),
]
"""Forwarded with the chat request, whose own schema refuses it for local models."""
