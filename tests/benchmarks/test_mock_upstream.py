import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import httpx
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared.mock_script import answer_pieces
from benchmarks.shared.mock_upstream import (
    MockScript,
    MockUpstream,
    ToolCall,
    Toxic,
    answer_text,
    mock_in_thread,
)
from benchmarks.shared.record import ROOT
from benchmarks.shared.toxics import ToxicKind

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Name trees."}]}
HELLO = MockScript(pieces=("Hello", " from", " here", "."))
TIMEOUT = aiohttp.ClientTimeout(total=10)


def run(test: Callable[[MockUpstream, aiohttp.ClientSession], Awaitable[None]]) -> None:
    """Run it with a mock and a client, on both kinds of event loop."""

    async def body() -> None:
        async with MockUpstream(HELLO) as mock, aiohttp.ClientSession(timeout=TIMEOUT) as session:
            await test(mock, session)

    asyncio.run(body())
    uvloop.run(body())


def events(raw: bytes) -> list[Any]:
    """The documents of a stream; "[DONE]" as it is."""
    datas = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
    return [data.decode() if data == b"[DONE]" else json.loads(data) for data in datas]


def contents(raw: bytes) -> list[str]:
    return [
        choice["delta"]["content"]
        for event in events(raw)
        if isinstance(event, dict)
        for choice in event["choices"]
        if choice.get("delta", {}).get("content")
    ]


async def post(
    session: aiohttp.ClientSession, mock: MockUpstream, document: Mapping[str, Any], **more: Any
) -> bytes:
    path = "/chat/completions" if "messages" in document else "/completions"
    async with session.post(mock.url + path, json=document, **more) as response:
        return await response.read()


def test_a_stream_has_role_pieces_finish_usage_and_done() -> None:
    async def body(mock: MockUpstream, session: aiohttp.ClientSession) -> None:
        asked = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        raw = await post(session, mock, asked, headers={"X-Test": "yes"})
        first, *texts, last, usage, done = events(raw)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [text["choices"][0]["delta"]["content"] for text in texts] == list(HELLO.pieces)
        assert last["choices"][0]["finish_reason"] == "stop"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 4
        assert done == "[DONE]"
        (request,) = mock.requests
        assert request.document == asked
        assert request.headers["x-test"] == "yes"
        await mock.settled()
        assert request.outcome == "answered"

    run(body)


def test_whole_answers_and_completions_and_models() -> None:
    async def body(mock: MockUpstream, session: aiohttp.ClientSession) -> None:
        whole = json.loads(await post(session, mock, CHAT))
        assert whole["choices"][0]["message"]["content"] == "Hello from here."
        assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        plain = json.loads(await post(session, mock, {"prompt": "Say", "max_tokens": 2}))
        assert plain["choices"][0] == {
            **{"index": 0, "text": "Hello from", "finish_reason": "length", "logprobs": None}
        }
        async with session.get(mock.url + "/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["mock-model"]
        async with session.get(mock.url + "/nothing") as response:
            assert response.status == 404
        assert mock.num_requests == 2
        assert mock.num_model_lists == 1

    run(body)


def test_tool_calls_thoughts_and_logprobs() -> None:
    async def body(mock: MockUpstream, session: aiohttp.ClientSession) -> None:
        mock.script = MockScript(
            pieces=("Well",),
            reasoning=("Hm", "..."),
            tool_calls=(ToolCall(name="look", arguments='{"at": 1}'),),
        )
        asked = CHAT | {"stream": True, "logprobs": True}
        deltas = [event["choices"][0] for event in events(await post(session, mock, asked))[:-1]]
        assert "".join(d["delta"].get("reasoning_content", "") for d in deltas) == "Hm..."
        calls = [d["delta"]["tool_calls"][0] for d in deltas if "tool_calls" in d["delta"]]
        assert calls[0]["function"]["name"] == "look"
        assert "".join(call["function"]["arguments"] for call in calls) == '{"at": 1}'
        assert deltas[-1]["finish_reason"] == "tool_calls"
        (spoken,) = [d for d in deltas if d["delta"].get("content")]
        assert spoken["logprobs"]["content"][0]["token"] == "Well"
        whole = json.loads(await post(session, mock, CHAT))["choices"][0]["message"]
        assert whole["tool_calls"][0]["function"]["arguments"] == '{"at": 1}'

    run(body)


def test_several_choices_differ() -> None:
    async def body(mock: MockUpstream, session: aiohttp.ClientSession) -> None:
        mock.script = MockScript(num_pieces=8)
        whole = json.loads(await post(session, mock, CHAT | {"n": 2}))
        texts = [choice["message"]["content"] for choice in whole["choices"]]
        assert len(set(texts)) == 2
        raw = await post(session, mock, CHAT | {"n": 2, "stream": True})
        streamed = ["", ""]
        for event in events(raw)[:-1]:
            for choice in event["choices"]:
                streamed[choice["index"]] += choice["delta"].get("content", "")
        assert streamed == texts

    run(body)


@given(prompt=st.text(min_size=1, max_size=30), cut=st.integers(0, 200), pieces=st.integers(1, 12))
def test_an_answer_goes_on_where_it_broke_off(prompt: str, cut: int, pieces: int) -> None:
    script = MockScript(num_pieces=pieces)
    chat = {"messages": [{"role": "user", "content": prompt}]}
    text = answer_text(script, chat)
    begun = text[:cut]
    messages = [*chat["messages"], {"role": "assistant", "content": begun}]
    continued = {"messages": messages, "continue_final_message": True}
    assert begun + answer_text(script, continued) == text
    assert "" not in answer_pieces(script, continued)
    completion = answer_text(script, {"prompt": prompt})
    begun = completion[:cut]
    assert begun + answer_text(script, {"prompt": prompt + begun}) == completion


def test_a_sampled_answer_depends_on_its_seed() -> None:
    script = MockScript(is_sampled=True)
    pinned = [answer_pieces(script, CHAT | {"seed": 7}, nonce=nonce) for nonce in "ab"]
    assert pinned[0] == pinned[1]
    assert answer_pieces(script, CHAT | {"seed": 8}) != pinned[0]
    assert answer_pieces(script, CHAT, nonce="a") != answer_pieces(script, CHAT, nonce="b")


def test_usage_can_be_wrong_or_missing() -> None:
    async def body(mock: MockUpstream, session: aiohttp.ClientSession) -> None:
        mock.script = MockScript(reported_usage=(1, 999), usage="always")
        raw = await post(session, mock, CHAT | {"stream": True})
        assert events(raw)[-2]["usage"]["completion_tokens"] == 999
        mock.script = MockScript(usage="never")
        assert "usage" not in json.loads(await post(session, mock, CHAT))

    run(body)


async def test_a_wrong_key_is_refused() -> None:
    async with (
        MockUpstream(HELLO, api_key="secret") as mock,
        aiohttp.ClientSession() as session,
    ):
        assert b"invalid_api_key" in await post(session, mock, CHAT)
        good = {"authorization": "Bearer secret"}
        assert b"Hello" in await post(session, mock, CHAT, headers=good)


def test_pieces_are_stamped_and_keep_their_pace() -> None:
    async def body(mock: MockUpstream, session: aiohttp.ClientSession) -> None:
        mock.script = MockScript(
            num_pieces=4, is_stamped=True, first_token_delay_s=0.03, gap_s=0.02
        )
        raw = await post(session, mock, CHAT | {"stream": True})
        received_ns = mock.requests[0].received_ns
        assert {int(piece[:20]) for piece in contents(raw)} == {received_ns}
        stamps = [(int(piece[20:]) - received_ns) / 1e9 for piece in contents(raw)]
        assert len(stamps) == 4
        # Timers of event loops count whole milliseconds, and never come more than one early.
        assert all(s >= 0.03 + 0.02 * i - 0.0015 for i, s in enumerate(stamps)), stamps

    run(body)


STREAM_FAILURES: dict[ToxicKind, type[Exception]] = {
    "reset": aiohttp.ClientError,
    "half_closed": aiohttp.ClientPayloadError,
    "stall": TimeoutError,
}


@pytest.mark.parametrize("kind", STREAM_FAILURES)
def test_a_stream_breaks_off_behind_so_many_pieces(kind: ToxicKind) -> None:
    async def body(mock: MockUpstream, session: aiohttp.ClientSession) -> None:
        mock.script = MockScript(
            pieces=HELLO.pieces, gap_s=0.005, toxic=Toxic(kind=kind, after_events=2)
        )
        raw = b""
        timeout = aiohttp.ClientTimeout(sock_read=0.1)
        url = mock.url + "/chat/completions"
        asked = CHAT | {"stream": True}
        async with session.post(url, json=asked, timeout=timeout) as response:
            with pytest.raises(STREAM_FAILURES[kind]):  # noqa: PT012 - the loop is the statement
                async for data in response.content.iter_any():
                    raw += data
        assert contents(raw) == ["Hello", " from"]
        await mock.settled()
        expected = "client_left" if kind == "stall" else "broken_off"
        assert mock.requests[0].outcome == expected
        mock.script = HELLO
        assert b"Hello" in await post(session, mock, CHAT)

    run(body)


def test_a_reset_before_the_head_is_a_reset() -> None:
    async def body(mock: MockUpstream, session: aiohttp.ClientSession) -> None:
        mock.script = MockScript(toxic=Toxic(kind="reset"))
        reader, writer = await asyncio.open_connection("127.0.0.1", mock.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        with pytest.raises(ConnectionResetError):
            await writer.wait_closed()

    run(body)


def test_statuses_and_pages() -> None:
    async def body(mock: MockUpstream, session: aiohttp.ClientSession) -> None:
        url = mock.url + "/chat/completions"
        mock.script = MockScript(toxic=Toxic(kind="status", status=429, retry_after_s=2))
        async with session.post(url, json=CHAT) as response:
            assert response.status == 429
            assert response.headers["retry-after"] == "2"
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        mock.script = MockScript(toxic=Toxic(kind="content_type"))
        async with session.post(url, json=CHAT | {"stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/html"
        # Probes see a server that fails all the time, too.
        async with session.get(mock.url + "/models") as response:
            assert response.content_type == "text/html"

    run(body)


@pytest.mark.parametrize("kind", ["garbage", "error_event", "no_done", "long_line"])
def test_a_spoilt_stream_holds_its_faults(kind: ToxicKind) -> None:
    async def body(mock: MockUpstream, session: aiohttp.ClientSession) -> None:
        toxic = Toxic(kind=kind, after_events=1, size_bytes=2_000_000)
        mock.script = MockScript(pieces=HELLO.pieces, toxic=toxic)
        raw = await post(session, mock, CHAT | {"stream": True})
        role, hello, *rest = [event for event in raw.split(b"\n\n") if event]
        assert b"assistant" in role
        assert b"Hello" in hello
        assert b"[DONE]" not in raw
        match kind:
            case "no_done":
                assert rest == []
            case "error_event":
                assert "error" in json.loads(rest[0].removeprefix(b"data: "))
            case "long_line":
                assert len(rest[0]) > 2_000_000
            case _:
                with pytest.raises(json.JSONDecodeError):
                    json.loads(rest[0].removeprefix(b"data: "))

    run(body)


@pytest.mark.parametrize("kind", ["slow_headers", "slow_first_token"])
def test_slow_ones_are_slow_where_they_should(kind: ToxicKind) -> None:
    async def body(mock: MockUpstream, session: aiohttp.ClientSession) -> None:
        mock.script = MockScript(toxic=Toxic(kind=kind, delay_s=30.0))
        url = mock.url + "/chat/completions"

        async def headers_come() -> bool:
            async with session.post(url, json=CHAT | {"stream": True}):
                return True

        if kind == "slow_first_token":
            assert await headers_come()
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(headers_come(), 0.1)
        await mock.settled()
        assert mock.requests[0].outcome == "client_left"

    run(body)


def test_a_server_goes_away_and_comes_back() -> None:
    async def body(mock: MockUpstream, session: aiohttp.ClientSession) -> None:
        assert b"Hello" in await post(session, mock, CHAT)
        port = mock.port
        await mock.refuse()
        assert mock.num_connections == 0
        with pytest.raises(aiohttp.ClientConnectionError):
            await post(session, mock, CHAT)
        await mock.listen()
        assert mock.port == port
        assert b"Hello" in await post(session, mock, CHAT)

    run(body)


def test_a_stopped_mock_cuts_its_responses() -> None:
    async def body(mock: MockUpstream, session: aiohttp.ClientSession) -> None:
        mock.script = MockScript(toxic=Toxic(kind="stall", after_events=1))
        asking = asyncio.create_task(post(session, mock, CHAT | {"stream": True}))
        await mock.received(1)
        await asyncio.wait_for(mock.refuse(), 5.0)
        with pytest.raises(aiohttp.ClientError):
            await asking
        assert mock.requests[0].outcome == "client_left"

    run(body)


def test_a_function_decides_each_response() -> None:
    async def body(mock: MockUpstream, session: aiohttp.ClientSession) -> None:
        mock.script = lambda request: MockScript(pieces=(f"number {request.index}",))
        answers = [await post(session, mock, CHAT) for _ in range(2)]
        assert b"number 0" in answers[0]
        assert b"number 1" in answers[1]

    run(body)


def test_in_a_thread() -> None:
    with mock_in_thread(HELLO) as mock:
        url = mock.url + "/chat/completions"
        assert "Hello" in httpx.post(url, json=CHAT).text
        mock.refuse()
        with pytest.raises(httpx.ConnectError):
            httpx.post(url, json=CHAT)
        mock.listen()
        mock.script = MockScript(pieces=("Again",))
        assert "Again" in httpx.post(url, json=CHAT).text
        assert len(mock.requests) == 2


def test_as_a_process() -> None:
    command = [sys.executable, "-m", "benchmarks.shared.mock_upstream", "--tokens", "3"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            answer = httpx.post(url + "/chat/completions", json=CHAT).json()
            assert answer["choices"][0]["message"]["content"] == answer_text(
                MockScript(num_pieces=3), CHAT
            )
        finally:
            process.terminate()
    assert process.returncode == 0
