"""A request that is repeated with its idempotency-key gets the first one's answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    IdempotencyKeyReusedError,
    RateLimitError,
)
from outrider.gateway.http.edge.bounds import ConnectionBounds
from outrider.gateway.http.edge.edge_metrics import EdgeMetrics
from outrider.gateway.http.edge.idempotency import IdempotentAnswers
from tests.gateway.http.edge.asking import Exchange, http_scope
from tests.gateway.http.edge.gateways import STEPS, whole_gateway
from tests.gateway.http.edge.serving import served
from tests.gateway.scripted_client import Script
from tests.gateway.waiting import HandClock

BODY = b'{"messages": []}'


class Kitchen:
    """Makes a new answer each time. `plan` may fail, block or answer otherwise, call by call."""

    def __init__(self, *plan: Callable[[], Awaitable[Response]]) -> None:
        self.num_made = 0
        self._plan = list(plan)

    async def make(self) -> Response:
        self.num_made += 1
        if self._plan:
            return await self._plan.pop(0)()
        return JSONResponse({"number": self.num_made}, headers={"x-outrider-tier": "small"})


class Gate:
    """A place where work waits until it is opened."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self.opened.wait()


def fails(error: Exception) -> Callable[[], Awaitable[Response]]:
    async def make() -> Response:
        raise error

    return make


def gives(response: Response) -> Callable[[], Awaitable[Response]]:
    async def make() -> Response:
        return response

    return make


def waits(gate: Gate, then: Response | Exception) -> Callable[[], Awaitable[Response]]:
    async def make() -> Response:
        await gate()
        if isinstance(then, Exception):
            raise then
        return then

    return make


class BrokenStream(Response):
    """Ends badly after its first part, as AnswerResponse tells it."""

    may_be_kept = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        self.may_be_kept = False
        await send({"type": "http.response.body", "body": b'data: {"error": {}}\n\n'})


class ClientLeft(Response):
    """Nothing more is sent once the client has left."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})


class Desk:
    """An endpoint with its answers."""

    def __init__(self, kitchen: Kitchen, **bounds: Any) -> None:
        self.clock = HandClock(0.0)
        self.registry = CollectorRegistry()
        metrics = EdgeMetrics(self.registry)
        bounds = {"ttl_s": 60.0, "max_bytes": 100_000} | bounds
        self.answers = IdempotentAnswers(clock=self.clock, metrics=metrics, **bounds)
        self.kitchen = kitchen

    async def ask(
        self,
        key: str | None = "key-1",
        body: bytes = BODY,
        *,
        path: str = "/v1/chat/completions",
        owner: str = "team",
        tenant: str | None = None,
        exchange: Exchange | None = None,
    ) -> Exchange:
        headers = [] if key is None else [("Idempotency-Key", key)]
        scope = http_scope(path, headers=headers)
        exchange = exchange or Exchange()
        request = Request(scope, exchange.receive, exchange.send)
        response = await self.answers.answer(
            request, body, self.kitchen.make, owner=owner, tenant=tenant
        )
        await response(scope, exchange.receive, exchange.send)
        return exchange

    def count(self, outcome: str) -> float:
        name = "outrider_idempotent_requests_total"
        return self.registry.get_sample_value(name, {"outcome": outcome}) or 0.0


async def test_a_repeated_request_gets_the_first_answer() -> None:
    limits = {"x-ratelimit-remaining-requests": "9"}
    desk = Desk(Kitchen(gives(JSONResponse({"number": 1}, 201, headers=limits))))
    first, second = await desk.ask(), await desk.ask()
    assert desk.kitchen.num_made == 1
    assert (second.status, second.body) == (first.status, first.body) == (201, b'{"number":1}')
    assert "idempotent-replayed" not in first.headers
    replayed = dict(first.headers, **{"idempotent-replayed": "true"})
    del replayed["x-ratelimit-remaining-requests"]
    assert second.headers == replayed
    assert (desk.count("first"), desk.count("replayed")) == (1, 1)


async def test_a_stream_is_repeated_byte_by_byte() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for i in range(3):
            yield f"data: {i}\n\n".encode()

    stream = StreamingResponse(parts(), media_type="text/event-stream")
    desk = Desk(Kitchen(gives(stream)))
    exchange = Exchange()
    # A real connection stays open while the stream is sent.
    first = await desk.ask(exchange=exchange)
    second = await desk.ask()
    assert first.body == second.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert second.headers["content-type"].startswith("text/event-stream")
    assert desk.kitchen.num_made == 1


async def test_without_the_header_nothing_is_kept() -> None:
    desk = Desk(Kitchen())
    assert (await desk.ask(None)).body != (await desk.ask(None)).body
    assert desk.answers.num_bytes == 0


async def test_keys_are_of_one_owner_and_one_endpoint() -> None:
    desk = Desk(Kitchen())
    asked = [
        await desk.ask(),
        await desk.ask(owner="other"),
        await desk.ask(path="/v1/completions"),
        await desk.ask("key-2"),
    ]
    assert [one.body for one in asked] == [b'{"number":%d}' % i for i in (1, 2, 3, 4)]
    # Nothing that is put together differently gives the same name.
    await desk.ask("1", path="/v1/chat/completionskey-")
    assert desk.kitchen.num_made == 5


async def test_another_body_is_refused_with_422_also_while_the_first_is_at_work() -> None:
    gate = Gate()
    desk = Desk(Kitchen(waits(gate, JSONResponse({}))))
    first = asyncio.create_task(desk.ask())
    await gate.reached.wait()
    with pytest.raises(IdempotencyKeyReusedError) as refused:
        await desk.ask(body=b"{}")
    gate.opened.set()
    await first
    with pytest.raises(IdempotencyKeyReusedError):
        await desk.ask(body=b"{}")
    problem = problem_of(refused.value)
    assert (problem.status, problem.code) == (422, "idempotency_key_reused")
    assert desk.count("reused") == 2
    assert desk.kitchen.num_made == 1


async def test_concurrent_repeats_wait_for_the_first() -> None:
    gate = Gate()
    desk = Desk(Kitchen(waits(gate, JSONResponse({"number": 7}))))
    tasks = [asyncio.create_task(desk.ask()) for _ in range(50)]
    await gate.reached.wait()
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    gate.opened.set()
    bodies = {one.body for one in await asyncio.gather(*tasks)}
    assert bodies == {b'{"number":7}'}
    assert desk.kitchen.num_made == 1
    assert (desk.count("first"), desk.count("waited")) == (1, 49)


async def test_a_waiting_repeat_takes_over_when_the_first_request_fails() -> None:
    gate, second_gate = Gate(), Gate()
    limited = RateLimitError("full", retry_after_s=1.0)
    kitchen = Kitchen(waits(gate, limited), waits(second_gate, JSONResponse({"number": 2})))
    desk = Desk(kitchen)
    tasks = [asyncio.create_task(desk.ask()) for _ in range(5)]
    await gate.reached.wait()
    gate.opened.set()
    await second_gate.reached.wait()
    second_gate.opened.set()
    first, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert first is limited
    assert [one.body for one in others] == [b'{"number":2}'] * 4  # type: ignore[union-attr]
    assert kitchen.num_made == 2


async def test_a_waiting_repeat_that_leaves_ends_only_itself() -> None:
    gate = Gate()
    desk = Desk(Kitchen(waits(gate, JSONResponse({"number": 7}))))
    first = asyncio.create_task(desk.ask())
    await gate.reached.wait()
    leaving = Exchange()
    waiting = asyncio.create_task(desk.ask(exchange=leaving))
    await asyncio.sleep(0.001)
    leaving.leave()
    await waiting
    assert leaving.messages == []
    assert not first.done()
    gate.opened.set()
    assert (await first).body == b'{"number":7}'


async def test_cancelling_the_first_lets_another_begin() -> None:
    gate = Gate()
    desk = Desk(Kitchen(waits(gate, JSONResponse({}))))
    first = asyncio.create_task(desk.ask())
    await gate.reached.wait()
    second = asyncio.create_task(desk.ask())
    await asyncio.sleep(0.001)
    first.cancel()
    assert (await second).body == b'{"number":2}'
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    "bad",
    [
        gives(BrokenStream()),
        gives(ClientLeft()),
        gives(JSONResponse({}, 400)),
        gives(JSONResponse({}, 429)),
        gives(JSONResponse({}, 503)),
        gives(JSONResponse({}, 302)),
    ],
    ids=["broken", "left", "400", "429", "503", "302"],
)
async def test_incomplete_or_failed_answers_are_not_replayed(
    bad: Callable[[], Awaitable[Response]],
) -> None:
    desk = Desk(Kitchen(bad))
    await desk.ask()
    assert desk.answers.num_bytes == 0
    again = await desk.ask()
    assert (again.status, again.body) == (200, b'{"number":2}')
    assert "idempotent-replayed" not in again.headers


@pytest.mark.parametrize("error", [ClientDisconnect(), BadRequestError("no"), ValueError("bug")])
async def test_errors_are_raised_and_not_kept(error: Exception) -> None:
    desk = Desk(Kitchen(fails(error)))
    with pytest.raises(type(error)):
        await desk.ask()
    # A request that was refused may be mended and sent with the same key.
    assert (await desk.ask(body=b"{}")).body == b'{"number":2}'


async def test_answers_expire() -> None:
    desk = Desk(Kitchen())
    await desk.ask()
    await desk.ask("other")
    desk.clock.now_s = 59.9
    assert (await desk.ask()).body == b'{"number":1}'
    desk.clock.now_s = 60.0
    assert (await desk.ask()).body == b'{"number":3}'
    held = desk.answers.num_bytes
    assert 1024 < held < 1200  # the other one is gone as well
    assert (await desk.ask(body=BODY)).body == b'{"number":3}'


async def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    desk = Desk(Kitchen(), max_bytes=10_000)
    for i in range(100):
        await desk.ask(f"key-{i}")
        assert desk.answers.num_bytes <= 10_000
    assert desk.registry.get_sample_value("outrider_idempotent_bytes") == desk.answers.num_bytes
    assert (await desk.ask("key-99")).headers["idempotent-replayed"] == "true"
    assert (await desk.ask("key-0")).body == b'{"number":101}'


async def test_one_tenant_cannot_flush_anothers_answers() -> None:
    desk = Desk(Kitchen(), max_bytes=20_000)
    await desk.ask("first", owner="quiet")
    for i in range(200):
        await desk.ask(f"key-{i}", owner=f"key {i % 7} of the loud", tenant="loud")
        assert desk.answers.num_bytes <= 20_000
    again = await desk.ask("first", owner="quiet")
    assert again.headers["idempotent-replayed"] == "true"
    assert (await desk.ask("key-199", owner="key 3 of the loud", tenant="loud")).headers[
        "idempotent-replayed"
    ] == "true"
    for i in range(9):  # as many answers as the loud one's: both have to make room
        await desk.ask(f"key-{i}", owner="quiet")
    held = [holding.num_bytes for holding in desk.answers._tenants.values()]
    assert sum(held) == desk.answers.num_bytes <= 20_000
    assert max(held) - min(held) < 3000


async def test_answers_that_are_being_recorded_make_room_for_other_tenants() -> None:
    gates = [Gate() for _ in range(9)]

    def stream(gate: Gate) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"x" * 800
            await gate()
            yield b"y"

        return StreamingResponse(parts())

    desk = Desk(Kitchen(*[gives(stream(gate)) for gate in gates]), max_bytes=10_000)
    tasks = [asyncio.create_task(desk.ask(f"{i}", owner="loud")) for i in range(9)]
    await asyncio.gather(*(gate.reached.wait() for gate in gates))
    await desk.ask("a", owner="quiet")
    assert (await desk.ask("a", owner="quiet")).headers["idempotent-replayed"] == "true"
    for gate in gates:
        gate.opened.set()
    answers = await asyncio.gather(*tasks)
    assert {answer.body for answer in answers} == {b"x" * 800 + b"y"}
    assert desk.answers.num_bytes <= 10_000
    desk.clock.now_s += 61
    desk.answers.find(b"", b"")
    assert (desk.answers.num_bytes, desk.answers._tenants) == (0, {})


async def test_an_answer_larger_than_memory_is_passed_on_and_not_kept() -> None:
    large = JSONResponse({"text": "x" * 20_000})
    desk = Desk(Kitchen(gives(large), gives(large)), max_bytes=10_000)
    assert len((await desk.ask()).body) > 20_000
    assert desk.answers.num_bytes == 0
    await desk.ask()
    assert desk.kitchen.num_made == 2


async def test_a_waiting_repeat_gets_an_answer_that_is_too_large_to_keep() -> None:
    gate = Gate()
    desk = Desk(Kitchen(waits(gate, JSONResponse({"text": "x" * 600}))), max_bytes=2000)
    tasks = [asyncio.create_task(desk.ask()) for _ in range(2)]
    await gate.reached.wait()
    gate.opened.set()
    await tasks[0]
    await desk.ask("another")
    assert (await tasks[1]).body == (await tasks[0]).body


@pytest.mark.parametrize("key", ["", " ", "a b", "x" * 256, "ümlaut", "a\tb"])
async def test_invalid_idempotency_keys_are_refused(key: str) -> None:
    desk = Desk(Kitchen())
    with pytest.raises(BadRequestError, match="1 to 255 visible"):
        await desk.ask(key)
    assert desk.kitchen.num_made == 0


async def test_keeping_no_answers_is_said() -> None:
    desk = Desk(Kitchen(), max_bytes=0)
    with pytest.raises(BadRequestError, match="is switched off"):
        await desk.ask()
    assert (await desk.ask(None)).body == b'{"number":1}'


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/chat/completions", "data: [DONE]"),
        ("/v1/responses", "event: response.completed"),
        ("/v1/messages", "event: message_stop"),
    ],
)
def test_a_whole_gateway_repeats_streams_and_not_those_that_broke_off(
    tokenizer: ChatTokenizer, path: str, end: str
) -> None:
    whole = whole_gateway(tokenizer)
    words = {"role": "user", "content": "Hello"}
    body = {"model": "small", "stream": True}
    body |= {"input": "Hello"} if path == "/v1/responses" else {"messages": [words]}
    body |= {"max_tokens": 16} if path == "/v1/messages" else {}
    failing = Script(steps=STEPS, failure=("internal", "gone"))
    scripts = [failing, Script(steps=STEPS), Script(steps=STEPS)]
    whole.engine.script = lambda _: scripts.pop(0)
    with (
        served(whole.app, ConnectionBounds()) as running,
        httpx.Client(base_url=running.url, headers={"idempotency-key": "stream"}) as client,
    ):
        broken, good, again = (client.post(path, json=body) for _ in range(3))
        mended = client.post(path, json=body | {"user": "me"}) if "chat" in path else None
    assert end not in broken.text
    assert end in good.text
    assert (again.status_code, again.content) == (200, good.content)
    assert again.headers["content-type"] == good.headers["content-type"]
    assert "idempotent-replayed" not in good.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert len(whole.engine.submitted) == 2
    assert mended is None or mended.status_code == 422
