"""The official clients read what servers with habits of their own stream, in every API."""

import json
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.conftest import OpenWorld
from tests.gateway.hybrid import World

Calls = list[tuple[str, dict[str, str]]]
OSLO, ROME = ("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Rome"})
QUESTION: Any = [{"role": "user", "content": "hi"}]


class OddServer(ThreadingHTTPServer):
    """Answers every request with `stream`."""

    stream = b""


class _Handler(BaseHTTPRequestHandler):
    server: OddServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(self.server.stream)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def odd() -> Iterator[OddServer]:
    with OddServer(("127.0.0.1", 0), _Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def world(open_world: OpenWorld, odd: OddServer) -> Iterator[World]:
    tier = {"url": f"http://127.0.0.1:{odd.server_port}/v1"}
    with open_world(clouds=(), tier=tier) as made:
        yield made


def event(delta: object, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"


def ending(finish_reason: str) -> bytes:
    return event({}, finish_reason) + b"data: [DONE]\n\n"


def chatted(world: World) -> Calls:
    with (
        openai.OpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(model="cloud", messages=QUESTION) as stream,
    ):
        calls: Any = stream.get_final_completion().choices[0].message.tool_calls
        assert all(call.id and call.type == "function" for call in calls)
        assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def responded(world: World) -> Calls:
    with (
        openai.OpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model="cloud", input="hi") as stream,
    ):
        items: Any = stream.get_final_response().output
    return [(item.name, json.loads(item.arguments)) for item in items]


def messaged(world: World) -> Calls:
    with (
        anthropic.Anthropic(base_url=world.url, api_key="none", max_retries=0) as client,
        client.messages.stream(model="cloud", max_tokens=50, messages=QUESTION) as stream,
    ):
        message: Any = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    assert all(block.type == "tool_use" and block.id for block in message.content)
    return [(block.name, block.input) for block in message.content]


def whole(city: str, **fields: object) -> dict[str, object]:
    """A call in one part, without an index."""
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return {"type": "function", "function": function, **fields}


STREAMS: dict[str, tuple[Sequence[Sequence[dict[str, Any]]], Calls]] = {
    "no index": (
        [
            [{"id": "c1", "type": "function", "function": {"name": OSLO[0], "arguments": ""}}],
            [{"function": {"arguments": '{"city":"Oslo"}'}}],
        ],
        [OSLO],
    ),
    "two calls without index": ([[whole("Oslo", id="c1")], [whole("Rome", id="c2")]], [OSLO, ROME]),
    "together, without index": ([[whole("Oslo", id="c1"), whole("Rome", id="c2")]], [OSLO, ROME]),
    "neither index nor id": ([[whole("Oslo")], [whole("Oslo")]], [OSLO, OSLO]),
    "together, neither index nor id": ([[whole("Oslo"), whole("Rome")]], [OSLO, ROME]),
    "one index": (
        [[whole("Oslo", index=0, id="c1")], [whole("Rome", index=0, id="c2")]],
        [OSLO, ROME],
    ),
    "one index, empty ids": (
        [[whole("Oslo", index=0, id="")], [whole("Rome", index=0, id="")]],
        [OSLO, ROME],
    ),
    "counted from one": (
        [[whole("Oslo", index=1, id="c1")], [whole("Rome", index=2, id="c2")]],
        [OSLO, ROME],
    ),
    "counted in words": ([[whole("Oslo", index="0", id="c1")]], [OSLO]),
    "all is said again": (
        [
            [
                {
                    "index": 0,
                    "id": "c1",
                    "type": "function",
                    "function": {"name": OSLO[0], "arguments": part},
                }
            ]
            for part in ('{"city"', ':"Oslo"', "}", "")
        ],
        [OSLO],
    ),
    "a new id with each part": (
        [
            [
                {
                    "index": 0,
                    "id": "c1",
                    "type": "function",
                    "function": {"name": OSLO[0], "arguments": '{"city":'},
                }
            ],
            [{"index": 0, "id": "c2", "function": {"name": None, "arguments": '"Oslo"}'}}],
        ],
        [OSLO],
    ),
    "null for what is said": (
        [
            [
                {
                    "index": 0,
                    "id": "c1",
                    "type": None,
                    "function": {"name": OSLO[0], "arguments": None},
                }
            ],
            [
                {
                    "index": None,
                    "id": None,
                    "type": None,
                    "function": {"name": None, "arguments": '{"city":"Oslo"}'},
                }
            ],
        ],
        [OSLO],
    ),
    "arguments as an object": (
        [[{"id": "c1", "function": {"name": OSLO[0], "arguments": OSLO[1]}}]],
        [OSLO],
    ),
}


@pytest.mark.parametrize("api", [chatted, responded, messaged])
@pytest.mark.parametrize("name", STREAMS)
def test_calls_are_told_apart(
    odd: OddServer, world: World, api: Callable[[World], Calls], name: str
) -> None:
    parts, calls = STREAMS[name]
    odd.stream = b"".join(event({"tool_calls": part}) for part in parts) + ending("stop")
    assert api(world) == calls


@pytest.mark.parametrize("sign", ["data: \n\n", "data:\n\n", "event: ping\n\n", "id: 7\n\n"])
def test_a_sign_of_life_is_no_chunk(odd: OddServer, world: World, sign: str) -> None:
    life = sign.encode()
    odd.stream = life + event({"content": "Hello"}) + life + ending("stop")
    with openai.OpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(client.chat.completions.create(model="cloud", messages=QUESTION, stream=True))
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == "Hello"
