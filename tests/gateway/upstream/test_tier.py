"""A tier with servers that do nothing wrong, and with clients that leave."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.shared.mock_upstream import MockScript, ToolCall, Toxic
from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    LoopError,
    UpstreamError,
    UpstreamRefusalError,
)
from outrider.gateway.settings.passed import UpstreamPriceSettings
from outrider.gateway.upstream.dialects.base import to_event
from outrider.gateway.upstream.model_list import model_ids
from outrider.gateway.upstream.retry_after import asked_wait_s
from outrider.gateway.upstream.upstream_request import UpstreamRequest
from tests.gateway.upstream.raw_server import (
    CHUNKED,
    LAST_CHUNK,
    Connection,
    RawServer,
    answering,
    raw_server,
    whole,
)
from tests.gateway.upstream.raw_server import chunk as framed
from tests.gateway.upstream.tiers import (
    Bench,
    bench,
    expected_text,
    read_all,
    read_broken,
    text_of,
    until,
)

SCRIPT = MockScript(num_pieces=6)


def stall(after_events: int) -> MockScript:
    """A server that falls silent, so that a test can leave in peace."""
    return MockScript(num_pieces=6, toxic=Toxic(kind="stall", after_events=after_events))


@asynccontextmanager
async def checked_bench(*scripts: Any, **settings: Any) -> AsyncIterator[Bench]:
    """A tier of one healthy replica, or of those that are given. Nothing may be left."""
    async with bench(*(scripts or (SCRIPT,)), **settings) as under_test:
        yield under_test
        under_test.nothing_left()


async def test_a_stream_is_passed_on_byte_by_byte() -> None:
    events = [
        b": hello\n\n",
        b'data:{"id":"x","choices":[{"index":0,"delta":{"role":"assistant"}}]}\r\n\r\n',
        to_event(b'{"id":"x","odd":[1,  2],"choices":[{"index":0,"delta":{"content":"Hi"}}]}'),
        to_event(b'{"id":"x","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'),
        to_event(b'{"id":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}'),
        b"data: [DONE]\n\n",
    ]

    answer = CHUNKED + b"".join(map(framed, events)) + LAST_CHUNK
    async with raw_server(answering(answer)) as server, bench(SCRIPT) as under_test:
        under_test.tier.replicas.replicas[0].url = server.url
        chunks = await read_all(under_test.answer())
        assert [chunk.raw for chunk in chunks] == events
        assert text_of(chunks) == "Hi"


async def test_a_stream_reports_its_facts() -> None:
    async with checked_bench(price=UpstreamPriceSettings(completion=1000.0)) as under_test:
        answer = under_test.answer()
        assert (answer.replica, answer.num_attempts, answer.first_token_s) == ("", 0, None)
        await answer.begin()
        assert answer.delivered_text == ""
        chunks = [chunk async for chunk in answer.chunks()]
        assert chunks[-1].is_done
        assert answer.delivered_text == text_of(chunks) == expected_text(SCRIPT)
        assert answer.replica == under_test.tier.replicas.replicas[0].name
        assert (answer.num_attempts, answer.num_continuations, answer.is_hedged) == (1, 0, False)
        (attempt,) = under_test.booked
        assert attempt.first_token_s == answer.first_token_s
        assert attempt.started_s < attempt.first_token_s < attempt.ended_s
        assert (attempt.tier, attempt.request_id, attempt.status) == ("cloud", "req-1", 200)
        assert attempt.usage == answer.usage
        assert (answer.usage.num_completion_tokens, answer.usage.source) == (6, "reported")
        # 1000 dollars for a million tokens of an answer
        assert attempt.cost_usd == pytest.approx(6 * 1e-3)
        assert under_test.tier.first_token.num_samples == 1
        assert under_test.tier.total.num_samples == 1


async def test_an_answer_in_one_piece() -> None:
    async with checked_bench() as under_test:
        answer = under_test.answer(stream=False)
        whole_answer = await answer.whole()
        await answer.aclose()
        assert whole_answer.texts == (expected_text(SCRIPT),)
        assert json.loads(whole_answer.body)["id"].startswith("chatcmpl-m0")
        assert answer.delivered_text == expected_text(SCRIPT)
        assert answer.first_token_s is None
        assert answer.usage.num_completion_tokens == 6
        assert under_test.outcomes == [("answer", "answered", None)]
        # The time of a whole answer says nothing about first tokens.
        assert under_test.tier.first_token.num_samples == 0
        assert under_test.tier.total.num_samples == 1


async def test_begin_and_whole_overrule_the_document() -> None:
    async with checked_bench() as under_test:
        chunks = await read_all(under_test.answer(stream=False))
        assert text_of(chunks) == expected_text(SCRIPT)
        answer = under_test.answer(stream=True, stream_options={"include_usage": True})
        assert (await answer.whole()).texts == (expected_text(SCRIPT),)
        await answer.aclose()


async def test_the_request_has_the_expected_headers_and_body() -> None:
    async with checked_bench(api_key="secret", headers={"X-Team": "trees"}) as under_test:
        await read_all(under_test.answer(endpoint="completion", temperature=0.5))
        (request,) = under_test.mocks[0].requests
        assert request.path == "/v1/completions"
        assert request.document["model"] == "mock-model"
        assert request.document["temperature"] == 0.5
        assert "seed" not in request.document
        headers = request.headers
        assert headers["authorization"] == "Bearer secret"
        assert headers["x-team"] == "trees"
        assert headers["x-request-id"] == "req-1"
        assert headers["x-outrider-hops"] == "gateway-a, gateway-b"


async def test_a_request_id_is_kept_from_servers_that_do_not_take_it() -> None:
    async with checked_bench(server="llama_cpp") as under_test:
        await read_all(under_test.answer())
        assert "x-request-id" not in under_test.mocks[0].requests[0].headers


async def test_several_choices_and_calls_pass() -> None:
    async with checked_bench(
        MockScript(tool_calls=(ToolCall(name="plant", arguments='{"tree": "oak"}'),))
    ) as under_test:
        chunks = await read_all(under_test.answer(n=2))
        assert {chunk.index for chunk in chunks if chunk.finish_reason} == {0, 1}
        assert any(chunk.has_calls for chunk in chunks)


async def test_connections_are_used_again() -> None:
    async with checked_bench() as under_test:
        for _ in range(3):
            await read_all(under_test.answer())
            answer = under_test.answer()
            await answer.whole()
            await answer.aclose()
        # One is kept warm, and one at most was opened while that was still being opened.
        assert under_test.mocks[0].num_connections <= 2


async def test_closing_on_done_gives_the_connection_back() -> None:
    """A relay need not ask for a chunk behind [DONE]."""

    async with checked_bench() as under_test:
        for _ in range(4):
            answer = under_test.answer()
            await answer.begin()
            async for chunk in answer.chunks():
                if chunk.is_done:
                    break
            await answer.aclose()
        assert under_test.mocks[0].num_connections <= 2
        assert [outcome for _, outcome, _ in under_test.outcomes] == ["answered"] * 4


async def test_the_last_bytes_are_waited_for() -> None:
    """They come behind [DONE], and only then the connection can be used again."""
    finish = to_event(b'{"id":"x","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}')

    has_read_all = asyncio.Event()

    async def handler(connection: Connection, server: RawServer) -> None:
        del server
        while True:
            first, _, _ = await connection.request()
            if first.startswith("GET"):
                await connection.send(whole(b'{"data":[]}'))
                continue
            await connection.send(CHUNKED + framed(finish) + framed(b"data: [DONE]\n\n"))
            await has_read_all.wait()
            has_read_all.clear()
            await connection.send(LAST_CHUNK)

    async with raw_server(handler) as server, bench(SCRIPT) as under_test:
        under_test.tier.replicas.replicas[0].url = server.url
        for _ in range(4):
            answer = under_test.answer()
            await answer.begin()
            async for chunk in answer.chunks():
                if chunk.is_done:
                    has_read_all.set()
            await answer.aclose()
        # One was opened to be kept warm.
        assert server.num_connections <= 2


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_answer_makes_up_for_failures(is_streamed: bool) -> None:
    """Five failures in a row open the breaker; four before an answer and four behind it do not."""

    async with checked_bench() as under_test:
        (replica,) = under_test.tier.replicas.replicas
        for _ in range(12):  # so that their share opens nothing
            replica.begin().succeeded()
        for _ in range(4):
            replica.begin().failed("status")
        answer = under_test.answer()
        await (read_all(answer) if is_streamed else answer.whole())
        await answer.aclose()
        for _ in range(4):
            replica.begin().failed("status")
        assert under_test.tier.is_available


@pytest.mark.parametrize(
    ("kind", "failure"), [("no_done", "ended_early"), ("reset", "reset"), ("garbage", "garbage")]
)
async def test_a_stream_that_breaks_off_before_its_end_has_failed(kind: Any, failure: str) -> None:
    """Six texts are all that it has, but no finish reason was there."""

    async with checked_bench(
        MockScript(num_pieces=6, toxic=Toxic(kind=kind, after_events=6))
    ) as under_test:
        answer = under_test.answer()
        received, error = await read_broken(answer)
        assert isinstance(error, UpstreamError)
        assert error.failure == failure
        assert error.replica == under_test.tier.replicas.replicas[0].name
        assert text_of(received) == answer.delivered_text == expected_text(SCRIPT)


@pytest.mark.parametrize("ending", ["clean", "reset"])
async def test_a_failure_behind_the_last_event_leaves_the_answer_whole(ending: str) -> None:
    """The finish reason is there; [DONE] is made up."""
    events = [
        to_event(b'{"id":"x","choices":[{"index":0,"delta":{"content":"Hi"}}]}'),
        to_event(b'{"id":"x","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'),
    ]

    has_finished = asyncio.Event()

    async def handler(connection: Connection, server: RawServer) -> None:
        del server
        await connection.request()
        await connection.send(CHUNKED + b"".join(map(framed, events)))
        await has_finished.wait()
        if ending == "reset":
            connection.reset()
        else:
            await connection.send(LAST_CHUNK)

    async with raw_server(handler) as server, bench(SCRIPT) as under_test:
        under_test.tier.replicas.replicas[0].url = server.url
        answer = under_test.answer()
        await answer.begin()
        chunks = []
        async for part in answer.chunks():
            chunks.append(part)
            if part.finish_reason:
                has_finished.set()
        assert [part.raw for part in chunks] == [*events, b"data: [DONE]\n\n"]
        assert chunks[-1].is_done
        assert under_test.outcomes == [("answer", "answered", None)]


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_refusal_is_passed_on_in_its_own_words(is_streamed: bool) -> None:
    async with checked_bench(MockScript(toxic=Toxic(kind="status", status=422))) as under_test:
        answer = under_test.answer()
        with pytest.raises(UpstreamRefusalError) as caught:
            await (answer.begin() if is_streamed else answer.whole())
        await answer.aclose()
        assert caught.value.status == 422
        assert b"The mock was told to answer so." in caught.value.body
        assert under_test.outcomes == [("answer", "refused", None)]
        assert under_test.booked[0].status == 422
        # Five in a row would open the breaker, if it were the server's fault.
        for _ in range(6):
            answer = under_test.answer()
            with pytest.raises(UpstreamRefusalError):
                await answer.begin()
        assert under_test.tier.is_available


async def test_a_refusal_by_an_event_is_one_too() -> None:
    error = to_event(b'{"error":{"message":"The prompt is too long.","code":400}}')
    answer = CHUNKED + framed(error) + LAST_CHUNK
    async with raw_server(answering(answer)) as server, bench(SCRIPT) as under_test:
        under_test.tier.replicas.replicas[0].url = server.url
        with pytest.raises(UpstreamRefusalError, match="too long") as caught:
            await read_all(under_test.answer())
        assert caught.value.status == 400
        for _ in range(5):
            with pytest.raises(UpstreamRefusalError):
                await read_all(under_test.answer())
        assert under_test.tier.is_available
        assert set(under_test.outcomes) == {("answer", "refused", None)}


async def test_a_fault_of_the_request_that_is_told_late_is_not_the_servers() -> None:
    events = [
        to_event(b'{"id":"x","choices":[{"index":0,"delta":{"content":"Hi"}}]}'),
        to_event(b'{"error":{"message":"This is not allowed.","code":400}}'),
    ]

    answer = CHUNKED + b"".join(map(framed, events)) + LAST_CHUNK
    async with raw_server(answering(answer)) as server, bench(SCRIPT) as under_test:
        under_test.tier.replicas.replicas[0].url = server.url
        for _ in range(6):
            received, error = await read_broken(under_test.answer())
            assert text_of(received) == "Hi"
            assert isinstance(error, UpstreamError)
            assert (error.failure, error.replica != "") == ("reported", True)
        assert under_test.tier.is_available
        assert set(under_test.outcomes) == {("answer", "refused", "reported")}


async def test_a_loop_is_told() -> None:
    async with checked_bench(MockScript(toxic=Toxic(kind="status", status=508))) as under_test:
        with pytest.raises(LoopError):
            await read_all(under_test.answer())
        assert under_test.outcomes == [("answer", "refused", None)]


async def test_a_call_that_cannot_be_said_is_a_bad_request() -> None:
    async with checked_bench(server="anthropic") as under_test:
        with pytest.raises(BadRequestError):
            await read_all(under_test.answer(endpoint="completion"))
        assert under_test.booked == []


async def test_a_key_that_is_not_taken_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with checked_bench(api_key="secret", api_key_env="CLOUD_KEY") as under_test:
        under_test.mocks[0].api_key = "another"
        for _ in range(2):
            with pytest.raises(UpstreamError) as caught:
                await read_all(under_test.answer())
            assert caught.value.failure == "not_trusted"
        # There is no point in asking twice with the same key.
        assert under_test.num_asked == [2]
        under_test.mocks[0].api_key = "secret"
        await read_all(under_test.answer())
        told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert len(told) == 1
        assert "CLOUD_KEY" in told[0]
        # It was taken meanwhile, so this is news again.
        under_test.mocks[0].api_key = "another"
        with pytest.raises(UpstreamError):
            await read_all(under_test.answer())
        assert sum(r.levelno == logging.ERROR for r in caplog.records) == 2
        assert "secret" not in caplog.text


async def test_models_are_asked_for_once() -> None:
    async with checked_bench() as under_test:
        mock = under_test.mocks[0]
        lists = await asyncio.gather(*(under_test.tier.models() for _ in range(5)))
        assert lists == [("mock-model",)] * 5
        # Once to have a connection warm, once to read it.
        assert mock.num_model_lists <= 2


async def test_models_of_a_server_that_does_not_tell() -> None:
    async with checked_bench(MockScript(toxic=Toxic(kind="status", status=500))) as under_test:
        assert await under_test.tier.models() == ()


async def test_models_are_asked_of_the_next_replica() -> None:
    async with checked_bench(
        MockScript(toxic=Toxic(kind="status", status=500)), SCRIPT
    ) as under_test:
        assert await under_test.tier.models() == ("mock-model",)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"data":[{"id":"a","x":1},{"id":"b"}]}', ("a", "b")),
        (b'{"data":[]}', ()),
        (b'{"models":[]}', ()),
        (b'{"data":[{"id":3}]}', ()),
        (b"<html>", ()),
        (b"", ()),
    ],
)
def test_reading_model_lists(body: bytes, expected: tuple[str, ...]) -> None:
    assert model_ids(body) == expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "7", "retry-after-ms": "250"}, 0.25),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-3"}, None),
        (
            {
                "retry-after": "Wed, 21 Oct 2015 07:28:09 GMT",
                "date": "Wed, 21 Oct 2015 07:28:00 GMT",
            },
            9.0,
        ),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:09 GMT"}, 0.0),
    ],
)
def test_reading_retry_after(headers: dict[str, str], expected: float | None) -> None:
    assert asked_wait_s(headers) == expected


# ---- clients that leave -------------------------------------------------------------------------


async def test_an_answer_that_was_never_begun() -> None:
    async with checked_bench() as under_test:
        await under_test.answer().aclose()
        assert under_test.booked == []


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_leaving_before_the_first_token(is_streamed: bool) -> None:
    toxic = Toxic(kind="slow_headers")
    async with checked_bench(
        MockScript(toxic=toxic), timeouts={"first_token_s": 30.0}
    ) as under_test:
        answer = under_test.answer()
        task = asyncio.create_task(answer.begin() if is_streamed else answer.whole())
        await under_test.mocks[0].received(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert under_test.outcomes == [("answer", "cancelled", None)]
        await answer.aclose()
        await under_test.mocks[0].settled()
        assert under_test.mocks[0].requests[0].outcome == "client_left"


async def test_leaving_when_it_has_begun() -> None:
    async with checked_bench(stall(2)) as under_test:
        answer = under_test.answer()
        await answer.begin()
        await answer.aclose()
        await answer.aclose()
        await under_test.mocks[0].settled()
        assert under_test.mocks[0].requests[0].outcome == "client_left"
        assert under_test.outcomes == [("answer", "cancelled", None)]
        # What was made for nothing is paid all the same.
        assert under_test.booked[0].usage is not None


async def test_an_answer_is_booked_though_its_end_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Issue 15, second round: while the usage was waited for, another cancellation made it free."""

    async def silence(_: UpstreamRequest) -> None:
        await asyncio.Event().wait()

    async with checked_bench() as under_test:
        answer = under_test.answer()
        await answer.begin()
        chunks = answer.chunks()
        async for chunk in chunks:
            if chunk.finish_reason is not None:
                break
        with monkeypatch.context() as patch:
            patch.setattr(UpstreamRequest, "_read_usage", silence)
            closing = asyncio.create_task(answer.aclose())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait({closing})
        assert under_test.outcomes == [("answer", "answered", None)]
        await chunks.aclose()
        under_test.nothing_left()


@pytest.mark.parametrize("how", ["break", "generator", "cancel"])
async def test_leaving_in_the_middle(how: str) -> None:
    async with checked_bench(stall(2)) as under_test:
        answer = under_test.answer()
        await answer.begin()
        chunks = answer.chunks()
        received = []

        async def read() -> None:
            async for chunk in chunks:
                received.append(chunk)
                if how != "cancel" and len(text_of(received).split()) == 2:
                    break

        if how == "cancel":
            task = asyncio.create_task(read())
            await until(lambda: len(received) >= 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await read()
        if how == "generator":
            await chunks.aclose()
        assert len(under_test.booked) == (how != "break")
        await answer.aclose()
        await under_test.mocks[0].settled()
        assert under_test.mocks[0].requests[0].outcome == "client_left"
        assert under_test.outcomes == [("answer", "cancelled", None)]
        assert expected_text(SCRIPT).startswith(answer.delivered_text)
        await chunks.aclose()


async def test_leaving_behind_the_finish_reason_is_no_leaving() -> None:
    async with checked_bench() as under_test:
        answer = under_test.answer()
        await answer.begin()
        async for chunk in answer.chunks():
            if chunk.finish_reason:
                break
        await answer.aclose()
        assert under_test.outcomes == [("answer", "answered", None)]


async def test_closing_the_tier_ends_what_is_under_way() -> None:
    async with bench(stall(2)) as under_test:
        answer = under_test.answer()
        await answer.begin()
        chunks = answer.chunks()
        await anext(chunks)
        await under_test.tier.close()
        with pytest.raises(UpstreamError):
            async for _ in chunks:
                pass
        await answer.aclose()
        under_test.nothing_left()


# ---- mirrors ------------------------------------------------------------------------------------


async def test_a_mirror_gets_one_attempt() -> None:
    toxic = Toxic(kind="status", status=500)
    async with checked_bench(MockScript(toxic=toxic), MockScript(toxic=toxic)) as under_test:
        answer = under_test.answer(kind="mirror")
        with pytest.raises(UpstreamError):
            await answer.whole()
        assert under_test.outcomes == [("mirror", "failed", "status")]
        assert answer.num_attempts == 1


# ---- breakers and probes ------------------------------------------------------------------------


async def test_a_dead_server_is_probed_and_comes_back() -> None:
    async with bench(SCRIPT, max_retries=0) as under_test:
        tier, (mock,) = under_test.tier, under_test.mocks
        await mock.refuse()
        for _ in range(5):
            with pytest.raises(UpstreamError) as caught:
                await read_all(under_test.answer())
            assert caught.value.failure == "refused"
        assert not tier.is_available
        assert 0 < tier.retry_after_s <= 1.2
        await mock.listen()
        breaker = tier.replicas.replicas[0].breaker
        await until(lambda: breaker.state != "open")
        assert breaker.state == "half_open"
        assert tier.is_available
        assert text_of(await read_all(under_test.answer())) == expected_text(SCRIPT)
        assert breaker.state == "closed"


@pytest.mark.parametrize("is_listening", [True, False])
async def test_a_probe_that_fails_keeps_the_breaker_open(is_listening: bool) -> None:
    """No server listens, or a proxy says that there is none."""

    dead = MockScript(toxic=Toxic(kind="status", status=503))
    async with bench(dead, max_retries=0) as under_test:
        (mock,) = under_test.mocks
        for _ in range(5):
            with pytest.raises(UpstreamError):
                await read_all(under_test.answer())
        if not is_listening:
            await mock.refuse()
        breaker = under_test.tier.replicas.replicas[0].breaker
        first_until_s = breaker.open_until_s
        await until(lambda: breaker.open_until_s != first_until_s)
        assert breaker.state == "open"
