"""A tier that speaks Anthropic's API, on real sockets."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.shared.mock_upstream import MockScript
from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    UpstreamError,
    UpstreamRefusalError,
)
from tests.gateway.upstream.raw_server import (
    CHUNKED,
    LAST_CHUNK,
    Connection,
    RawServer,
    chunk,
    raw_server,
    whole,
)
from tests.gateway.upstream.tiers import Bench, bench, read_all, read_broken, text_of


def event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}).encode()
    return chunk(b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n")


def delta(text: str) -> bytes:
    return event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})


USAGE = {"input_tokens": 4, "cache_read_input_tokens": 6, "output_tokens": 1}
BEGIN = b"".join(
    [
        CHUNKED,
        event("message_start", message={"id": "msg_1", "model": "opus", "usage": USAGE}),
        event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        event("ping"),
        delta("Hello "),
        delta("you"),
    ]
)
END = b"".join(
    [
        event("content_block_stop", index=0),
        event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 3}),
        event("message_stop"),
        LAST_CHUNK,
    ]
)
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "model": "opus",
    "content": [{"type": "text", "text": "Hello you"}],
    "stop_reason": "end_turn",
    "usage": USAGE,
}
Posts = list[tuple[str, dict[str, str], bytes]]
"""The requests for answers that a server has got."""

JSON = "content-type: application/json\r\n"


def complaint(kind: str, message: str) -> bytes:
    return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()


@asynccontextmanager
async def answering_bench(*answers: bytes) -> AsyncIterator[tuple[Bench, Posts]]:
    """A tier whose only server gives these answers, the last one for ever."""
    posts: Posts = []

    async def handler(connection: Connection, server: RawServer) -> None:
        while True:
            request = await connection.request()
            if request[0].startswith("POST "):
                posts.append(request)
                await connection.send(answers[min(len(posts), len(answers)) - 1])
            else:
                await connection.send(whole(b'{"data":[]}', headers=JSON))

    async with (
        raw_server(handler) as server,
        bench(MockScript(), server="anthropic", api_key="secret") as under_test,
    ):
        under_test.tier.replicas.replicas[0].url = server.url
        yield under_test, posts


async def test_a_stream() -> None:
    async with answering_bench(BEGIN + END) as (under_test, posts):
        answer = under_test.answer(max_tokens=9)
        chunks = await read_all(answer)
        assert text_of(chunks) == "Hello you"
        assert chunks[-1].is_done
        assert chunks[-2].is_usage_only
        assert [one.finish_reason for one in chunks if one.finish_reason] == ["stop"]
        assert (answer.usage.num_prompt_tokens, answer.usage.num_completion_tokens) == (10, 3)
        ((line, headers, sent),) = posts
        assert line.startswith("POST /v1/messages ")
        assert headers["x-api-key"] == "secret"
        assert "authorization" not in headers
        document = json.loads(sent)
        assert (document["model"], document["max_tokens"]) == ("mock-model", 9)
        assert under_test.outcomes == [("answer", "answered", None)]


async def test_a_whole_answer() -> None:
    async with answering_bench(whole(json.dumps(MESSAGE).encode(), headers=JSON)) as (
        under_test,
        _,
    ):
        answer = under_test.answer(stream=False)
        told = await answer.whole()
        await answer.aclose()
        assert json.loads(told.body)["choices"][0]["message"]["content"] == "Hello you"
        assert told.texts == ("Hello you",)


async def test_an_overloaded_server_is_asked_again() -> None:
    overloaded = complaint("overloaded_error", "Overloaded")
    refused = whole(overloaded, status="529 Overloaded", headers=JSON)
    late = CHUNKED + chunk(b"event: error\ndata: " + overloaded + b"\n\n") + LAST_CHUNK
    async with answering_bench(refused, late, BEGIN + END) as (under_test, posts):
        chunks = await read_all(under_test.answer())
        assert text_of(chunks) == "Hello you"
        assert len(posts) == 3
        failures = [failure for _, _, failure in under_test.outcomes]
        assert failures == ["status", "reported", None]


async def test_a_refusal_is_told_in_openais_form() -> None:
    said = complaint("invalid_request_error", "prompt is too long: 9 > 8")
    async with answering_bench(whole(said, status="400 Bad Request", headers=JSON)) as (
        under_test,
        posts,
    ):
        answer = under_test.answer()
        with pytest.raises(UpstreamRefusalError) as caught:
            await answer.begin()
        await answer.aclose()
        assert caught.value.status == 400
        error = json.loads(caught.value.body)["error"]
        assert error["message"] == "prompt is too long: 9 > 8"
        assert error["code"] == "context_length_exceeded"
        assert len(posts) == 1


async def test_an_answer_that_breaks_off_ends_in_an_error() -> None:
    said = complaint("api_error", "Broken")
    async with answering_bench(
        BEGIN + chunk(b"event: error\ndata: " + said + b"\n\n") + LAST_CHUNK
    ) as (under_test, posts):
        chunks, error = await read_broken(under_test.answer())
        assert text_of(chunks) == "Hello you"
        assert isinstance(error, UpstreamError)
        assert error.failure == "reported"
        assert len(posts) == 1


@pytest.mark.parametrize(
    ("call", "param"), [({"n": 2}, "n"), ({"endpoint": "completion"}, "model")]
)
async def test_requests_the_dialect_cannot_express_are_not_sent(
    call: dict[str, Any], param: str
) -> None:
    async with answering_bench(BEGIN + END) as (under_test, posts):
        answer = under_test.answer(**call)
        with pytest.raises(BadRequestError) as caught:
            await answer.begin()
        await answer.aclose()
        assert caught.value.param == param
        assert not posts
        assert under_test.tier.replicas.replicas[0].in_flight == 0
