"""Gateways and engines of two versions understand each other, or say that they do not.

A field may be added at the end of a message, with a default. Every other change needs another
PROTOCOL_VERSION, and with it new frames (`wire_frames.py`).
"""

import base64
import json
from dataclasses import is_dataclass
from typing import Any, get_args

import msgspec
import pytest

from outrider.gateway.engines.backends import wire
from tests.gateway.engines.backends.wire_frames import FILE, SAMPLES

RECORDED = json.loads(FILE.read_text(encoding="utf-8"))
REPLIES = tuple(get_args(wire.Reply))


def decoded(frame: bytes, message: object) -> object:
    """Decode as the side does that gets such messages."""
    return wire.decode_reply(frame) if isinstance(message, REPLIES) else wire.decode_command(frame)


def test_each_message_has_a_recorded_frame_of_this_protocol() -> None:
    kinds = {kind.__struct_config__.tag for kind in (*get_args(wire.Command), *REPLIES)}
    assert set(SAMPLES) == set(RECORDED["frames"]) == kinds
    assert RECORDED["protocol"] == wire.PROTOCOL_VERSION


@pytest.mark.parametrize("tag", sorted(SAMPLES))
def test_what_an_older_peer_sends_is_understood(tag: str) -> None:
    frame = base64.b64decode(RECORDED["frames"][tag])
    assert decoded(frame, SAMPLES[tag]) == SAMPLES[tag]


def with_news(message: Any, value: Any) -> Any:
    """Add what a newer peer may: a last element of messages, a field of what they carry."""
    if isinstance(message, msgspec.Struct):
        tag, *fields = value
        inner = [getattr(message, name) for name in message.__struct_fields__]
        is_tagged = message.__struct_config__.tag is not None
        rest = fields if is_tagged else value
        named = [with_news(*pair) for pair in zip(inner, rest, strict=True)]
        return [*([tag] if is_tagged else []), *named, "of a newer version"]
    if is_dataclass(message):
        return {**value, "of_a_newer_version": [1, {"x": None}]}
    if isinstance(message, list):
        return [with_news(*pair) for pair in zip(message, value, strict=True)]
    return value


@pytest.mark.parametrize("tag", sorted(SAMPLES))
def test_what_a_newer_peer_adds_is_passed_over(tag: str) -> None:
    message = SAMPLES[tag]
    plain = msgspec.msgpack.decode(wire.encode(message))
    newer = msgspec.msgpack.encode(with_news(message, plain))
    assert newer != wire.encode(message)
    assert decoded(newer, message) == message
