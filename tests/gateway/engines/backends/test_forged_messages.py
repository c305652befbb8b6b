"""Forged messages on the engine's socket: none is taken, and the streams go on as they were.

Where there are no private socket files the engine listens on loopback TCP, which every program of
the machine can reach. A forger knows the address and the messages' format, but no key.
"""

import asyncio
import contextlib
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from msgspec import DecodeError

from outrider.engine.events import EngineEvent, Finished, RequestStats, TokensEmitted
from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.engines.backends.spawning import EngineRecipe
from outrider.gateway.engines.backends.wire import (
    Abort,
    Crashed,
    Events,
    KeepOnTier,
    Stop,
    Submit,
    SwitchTier,
    decode_command,
    decode_reply,
    encode,
    pack_error,
)
from tests.gateway.engines.backends.clients import BUILDER, collect, started, tokens
from tests.gateway.scripted_engine import make_request

NUM_FORGED = 1000
VICTIM = "victim"

RECIPE = EngineRecipe(builder=BUILDER, arguments='{"step_s": 0.001}')


def forged_messages() -> Iterator[bytes]:
    """Commands and replies that would end, change or extend the victim's stream, and garbage."""
    rng = random.Random(1)
    stolen = TokensEmitted(request_id=VICTIM, token_ids=(666,))
    end = Finished(
        request_id=VICTIM,
        tier="large",
        finish_reason="stop",
        stats=RequestStats(num_prompt_tokens=1),
    )
    messages: list[Any] = [
        Stop(),
        Abort(VICTIM),
        KeepOnTier(VICTIM),
        SwitchTier(VICTIM, "small"),
        Submit(make_request("forged")),
        Events.pack([stolen]),
        Events.pack([stolen, end]),
        Crashed(pack_error(RuntimeError("forged"))),
    ]
    for number in range(NUM_FORGED):
        if number % 4 == 3:
            yield rng.randbytes(rng.randrange(1, 200))
        else:
            yield encode(messages[number % len(messages)])


@contextmanager
def forger(endpoint: str, kind: str) -> Iterator[zmq.Socket[bytes]]:
    """A peer without keys, or with keys of its own and a server's key that it made up."""
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    peer.set_hwm(0)  # what waits for a handshake is not refused by the forger's own queue
    if kind == "wrong keys":
        public, secret = zmq.curve_keypair()
        peer.curve_publickey, peer.curve_secretkey = public, secret
        peer.curve_serverkey, _ = zmq.curve_keypair()
    peer.connect(endpoint)
    try:
        yield peer
    finally:
        context.destroy(linger=0)


def forge(peer: "zmq.Socket[bytes]", endpoint: str, message: bytes) -> None:
    """Send a message; connect again where the engine has ended the connection for good."""
    try:
        peer.send(message, zmq.DONTWAIT)
    except zmq.Again:
        with contextlib.suppress(zmq.ZMQError):  # forgotten already
            peer.disconnect(endpoint)
        peer.connect(endpoint)
        peer.send(message, zmq.DONTWAIT)


def send_raw(endpoint: str) -> None:
    """The same bytes without ZeroMQ's framing, on connections of their own."""
    host, _, port = endpoint.removeprefix("tcp://").partition(":")
    for number, message in enumerate(forged_messages()):
        if number % 20 == 0:
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + message)


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["no keys", "wrong keys", "raw bytes"])
async def test_forged_messages_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has = zmq.has
    assert has("curve"), "the bundled libzmq has CURVE"
    monkeypatch.setattr(zmq, "has", lambda name: name != "ipc" and has(name))

    async with started(ProcessEngineClient(RECIPE)) as client:
        pid = client.pid
        assert client._link is not None
        endpoint = client._link.endpoint
        stream = asyncio.create_task(collect(client, VICTIM, prompt=(10, 20), max_tokens=300))
        await asyncio.sleep(0.02)
        if kind == "raw bytes":
            await asyncio.to_thread(send_raw, endpoint)
        else:
            with forger(endpoint, kind) as peer:
                for message in forged_messages():
                    forge(peer, endpoint, message)
                    if not stream.done():
                        await asyncio.sleep(0)
                await asyncio.sleep(0.2)  # a handshake would be over by now
                assert not peer.poll(0), "a forger was sent something"
        events: list[EngineEvent] = await stream
        assert tokens(events) == list(range(30, 330))
        assert isinstance(events[-1], Finished)
        assert client.pid == pid, "the engine was not restarted"
        stats = await client.stats()
        assert stats.tiers["large"].num_output_tokens == 300
        assert tokens(await collect(client, "next", max_tokens=2)) == [30, 31]


def test_a_reply_that_no_engine_sends_is_no_reply() -> None:
    """The format itself is strict: what is not a message of ours does not become one."""
    rng = random.Random(2)
    valid = encode(Events.pack([TokensEmitted(request_id=VICTIM, token_ids=(1, 2))]))
    num_refused = 0
    for _ in range(NUM_FORGED):
        broken = bytearray(valid)
        broken[rng.randrange(len(broken))] = rng.randrange(256)
        for decode in (decode_command, decode_reply):
            try:
                message: Any = decode(bytes(broken))
            except (DecodeError, UnicodeDecodeError):
                num_refused += 1
            else:
                assert isinstance(message, Events)
    assert num_refused > NUM_FORGED
