"""Clients that leave, deadlines, shutdown and rings: whatever happens, nothing is left running."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from benchmarks.shared.mock_upstream import MockScript, MockThread, mock_in_thread
from benchmarks.shared.toxics import Toxic
from outrider.engine.events import EngineEvent
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.client import OnEnd
from outrider.gateway.engines.backends.step_loop import no_progress
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.wiring.serving import background_gateway
from tests.gateway.conftest import OpenWorld, wait_for
from tests.gateway.hybrid import CHAT, LOCAL_TEXT, Streamed, TestPolicy, World
from tests.gateway.scripted_client import Script, ScriptedClient
from tests.gateway.watches import PlannedWatch

Encode = Callable[[str], list[int]]
Make = Callable[..., Any]

SLOW = MockScript(num_pieces=400, gap_s=0.02)
SILENT = MockScript(first_token_delay_s=30.0)


@pytest.fixture
def make(open_world: OpenWorld) -> Make:
    return open_world


def num_tasks(world: World) -> int:
    """Tasks of the gateway's event loop that answer requests."""
    loop = world.context.upstream.tiers["cloud"]._tasks[0].get_loop()
    return sum(not task.done() for task in asyncio.all_tasks(loop))


def in_flight(world: World) -> int:
    tiers = world.context.upstream.tiers.values()
    return sum(replica.in_flight for tier in tiers for replica in tier.replicas.replicas)


@contextmanager
def nothing_left(world: World) -> Iterator[None]:
    """Check that work begun in this context ends soon after it, here and upstream."""
    world.http.get("/v1/models")
    world.http.close()
    world.http = httpx.Client(base_url=world.url, timeout=20)
    wait_for(lambda: in_flight(world) == 0)
    before = num_tasks(world)
    yield
    world.http.close()
    wait_for(lambda: in_flight(world) == 0)
    wait_for(lambda: not world.engine.running)
    wait_for(lambda: num_tasks(world) <= before)
    for cloud in world.clouds:
        wait_for(lambda cloud=cloud: all(r.outcome != "open" for r in cloud.requests))
    world.http = httpx.Client(base_url=world.url, timeout=20)


def leave(world: World, until: Callable[[], bool], **fields: Any) -> None:
    """Ask, and hang up as soon as something has happened."""
    task = threading.Thread(target=lambda: _ask_and_leave(world, left, fields))
    left = threading.Event()
    task.start()
    try:
        wait_for(until)
    finally:
        left.set()
        task.join()


def _ask_and_leave(world: World, left: threading.Event, fields: dict[str, Any]) -> None:
    async def ask() -> None:
        async with httpx.AsyncClient(base_url=world.url, timeout=20) as http:
            body = {**CHAT, **fields}
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            await asyncio.to_thread(left.wait)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(ask())


def read_and_leave(world: World, num_events: int, **fields: Any) -> None:
    """Read some events of a stream, and hang up."""
    body = {**CHAT, "stream": True, **fields}
    with world.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        seen = 0
        for part in response.iter_bytes():
            seen += part.count(b"\n\n")
            if seen >= num_events:
                break


# ---- clients that leave -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_byte(make: Make, stream: bool) -> None:
    with make(clouds=(SILENT, SILENT), tier={"max_retries": 2}) as world:
        for script in (
            SILENT,
            MockScript(toxic=Toxic(kind="slow_headers")),
            MockScript(toxic=Toxic(kind="stall")),
        ):
            for cloud in world.clouds:
                cloud.script = script
            for policy in ("cloud_only", "prefer_cloud"):
                with nothing_left(world):
                    leave(
                        world,
                        lambda: in_flight(world) > 0 and any(_is_open(world.clouds)),
                        stream=stream,
                        outrider={"policy": policy},
                    )
        assert not world.engine.submitted


def _is_open(clouds: Any) -> Iterator[bool]:
    return (request.outcome == "open" for cloud in clouds for request in cloud.requests)


def test_leaving_while_a_retry_is_waited_for(make: Make) -> None:
    busy = MockScript(toxic=Toxic(kind="status", status=503, retry_after_s=5))
    with make(clouds=(busy,), tier={"max_retries": 3}) as world, nothing_left(world):
        cloud = world.cloud
        for _ in range(2):
            leave(world, lambda: len(cloud.requests) >= 1, stream=True, model="cloud")


@pytest.mark.slow_cases
@pytest.mark.parametrize("num_events", [1, 5])
def test_leaving_in_mid_stream(make: Make, num_events: int) -> None:
    with make(clouds=(SLOW,)) as world:
        world.says(LOCAL_TEXT * 3, gap_s=0.02)
        for fields in ({"model": "cloud"}, {"outrider": {"policy": "local_only"}}):
            with nothing_left(world):
                read_and_leave(world, num_events, **fields)
        assert world.cloud.requests[-1].outcome == "client_left"


def test_leaving_in_the_hold_back_window(make: Make) -> None:
    """While the upstream tier is asked to take over, the local answer goes on in reserve."""
    policy = TestPolicy(watch=lambda: PlannedWatch("escalate", at=2))
    with make(clouds=(SILENT,), local=("small",), policy=policy) as world:
        for stream in (False, True):
            world.says(LOCAL_TEXT, hangs=True)
            num = len(world.cloud.requests)
            with nothing_left(world):
                leave(world, lambda num=num: len(world.cloud.requests) > num, stream=stream)
        assert all(request.outcome == "client_left" for request in world.cloud.requests)


class _Reluctant(ScriptedClient):
    """Takes its time to end a request."""

    async def submit(
        self, request: EngineRequest, on_end: OnEnd | None = None
    ) -> AsyncGenerator[EngineEvent]:
        events = super().submit(request, on_end)
        try:
            async for event in events:
                yield event
        finally:
            self.is_ending = True
            try:
                await asyncio.sleep(0.2)
            finally:
                await events.aclose()

    is_ending = False


@pytest.mark.slow
def test_leaving_when_the_other_tier_has_just_taken_over(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local answer is being ended, and the other one is not read yet."""
    monkeypatch.setattr("tests.gateway.hybrid.ScriptedClient", _Reluctant)
    policy = TestPolicy(watch=lambda: PlannedWatch("escalate", at=2))
    with make(clouds=(SLOW,), local=("small",), policy=policy) as world:
        world.says(LOCAL_TEXT, hangs=True)
        engine = world.engine
        assert isinstance(engine, _Reluctant)
        for stream in (False, True):
            world.cloud.script = SLOW if stream else MockScript()
            engine.is_ending = False
            with nothing_left(world):
                leave(world, lambda: engine.is_ending, stream=stream)
        assert all(r.outcome in ("client_left", "answered") for r in world.cloud.requests)


def test_leaving_while_another_goes_on_behind_a_broken_answer(make: Make) -> None:
    broken = MockScript(pieces=("Far ", "away."), toxic=Toxic(kind="reset", after_events=1))
    rules = {"continue_on_failure": True, "policy": "prefer_cloud"}
    with make(clouds=(broken,), handoff=rules) as world:
        world.engine.script = lambda _: Script(hangs=True)
        with nothing_left(world):
            leave(world, lambda: bool(world.engine.running), stream=True)


def test_a_crowd_that_leaves_at_random_leaves_nothing(make: Make) -> None:
    async def one(http: httpx.AsyncClient, number: int) -> None:
        options = {"policy": ("cloud_only", "prefer_cloud", "prefer_local")[number % 3]}
        if number % 4 == 0:
            options["deadline_ms"] = 1 + number
        body = {**CHAT, "stream": bool(number % 2), "outrider": options}
        try:
            async with asyncio.timeout(0.001 * (number * 7 % 120)):
                await http.post("/v1/chat/completions", json=body)
        except TimeoutError:
            pass

    async def crowd(url: str) -> None:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=url, timeout=20, limits=limits) as http:
            await asyncio.gather(*(one(http, number) for number in range(100)))

    weak = TestPolicy(watch=lambda: PlannedWatch("escalate", at=2))
    scripts = (
        MockScript(first_token_delay_s=0.03, gap_s=0.01),
        MockScript(gap_s=0.005, toxic=Toxic(kind="reset", after_events=3)),
    )
    tier = {"max_retries": 2, "hedge_share": 1.0, "server": "vllm"}
    with make(clouds=scripts, tier=tier, local=("small",), policy=weak) as world:
        world.says(LOCAL_TEXT, gap_s=0.005)
        with nothing_left(world):
            asyncio.run(crowd(world.url))
        for replica in world.context.upstream.tiers["cloud"].replicas.replicas:
            assert replica.in_flight == 0


# ---- deadlines, flapping ------------------------------------------------------------------------


def test_a_deadline_of_a_millisecond_or_less_is_a_clean_answer(make: Make) -> None:
    weak = TestPolicy(watch=lambda: PlannedWatch("escalate", at=2))
    with make(clouds=(SILENT,), local=("small",), policy=weak, tier={"max_retries": 2}) as world:
        world.says(LOCAL_TEXT, gap_s=0.05)
        with nothing_left(world):
            for deadline_ms in (1, 0.001, 1e-300):
                for policy in ("local_only", "prefer_local", "prefer_cloud", "cloud_only"):
                    for stream in (False, True):
                        options = {"policy": policy, "deadline_ms": deadline_ms}
                        response = world.chat(stream=stream, outrider=options)
                        assert response.status_code == 504, response.text
                        assert response.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.slow
def test_a_server_that_comes_and_goes_costs_no_answer(make: Make) -> None:
    def flapping(request: Any) -> MockScript:
        is_down = request.index % 7 < 4
        toxic = Toxic(kind="status", status=500) if is_down else None
        return MockScript(pieces=("Far ", "away."), toxic=toxic)

    with make(clouds=(flapping,), handoff={"policy": "prefer_cloud"}) as world:
        with nothing_left(world):
            for number in range(60):
                response = world.stream() if number % 2 else world.chat()
                text = (
                    response.text
                    if isinstance(response, Streamed)
                    else response.json()["choices"][0]["message"]["content"]
                )
                assert text in ("Far away.", LOCAL_TEXT)
        states = {r.breaker.state for r in world.context.upstream.tiers["cloud"].replicas.replicas}
        assert states <= {"closed", "open", "half_open"}


# ---- real gateways ------------------------------------------------------------------------------


@contextmanager
def gateway(url: str, **flags: Any) -> Iterator[str]:
    """A real gateway without models of its own; its upstream tier is at `url`."""
    settings = load_settings(
        flags={
            "models.small": "none",
            "models.large": "none",
            "tiers.cloud.url": url,
            "tiers.cloud.max_retries": 0,
            **flags,
        },
        environ={},
        config_file=None,
    )
    with background_gateway(settings, no_progress) as own:
        yield own


@pytest.mark.slow
def test_two_gateways_that_point_at_each_other_say_so(make: Make) -> None:
    """The first one learns its own address only when it listens, so a mock stands in for it."""
    with ExitStack() as stack:
        front = stack.enter_context(_Forwarder())
        flags = {"tiers.cloud.model": "cloud"}
        second = stack.enter_context(gateway(f"{front.url}/v1", **flags))
        first = stack.enter_context(gateway(f"{second}/v1", **flags))
        front.target = first
        for stream in (False, True):
            response = httpx.post(
                f"{first}/v1/chat/completions",
                json={**CHAT, "stream": stream},
                timeout=10,
            )
            assert response.status_code == 508, response.text
            assert response.json()["error"]["code"] == "loop_detected"
        assert front.num_requests == 2  # each went round once


class _Forwarder:
    """Passes requests on to a gateway that is started later."""

    def __init__(self) -> None:
        self.target = ""
        self.num_requests = 0

    def __enter__(self) -> "_Forwarder":
        forwarder = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(200, b'{"data":[]}')

            def do_POST(self) -> None:
                forwarder.num_requests += 1
                body = self.rfile.read(int(self.headers["content-length"]))
                names = ("content-type", "x-outrider-hops", "x-request-id")
                sent = {name: self.headers[name] for name in names if self.headers[name]}
                answer = httpx.post(forwarder.target + self.path, content=body, headers=sent)
                self._reply(answer.status_code, answer.content)

            def _reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.mark.slow
def test_shutting_down_with_streams_in_flight(make: Make) -> None:
    """The drain time passes, streams are cut, servers are told, and nothing hangs."""
    with mock_in_thread(MockScript(num_pieces=5000, gap_s=0.02)) as mock:
        flags = {"tiers.cloud.model": "mock-model", "server.drain_timeout_s": 1}
        reading: list[threading.Thread] = []
        with gateway(mock.url, **flags) as url:
            for stream in (True, True, False):
                reading.append(threading.Thread(target=_read_all, args=(url, stream)))
                reading[-1].start()
            wait_for(lambda: len(mock.requests) == 3)
        for thread in reading:
            thread.join(5)
            assert not thread.is_alive()
        _all_left(mock)


def _read_all(url: str, stream: bool) -> None:
    try:
        body = {**CHAT, "stream": stream}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20)
    except httpx.TransportError:
        pass  # cut


def _all_left(mock: MockThread) -> None:
    wait_for(lambda: all(request.outcome == "client_left" for request in mock.requests))
