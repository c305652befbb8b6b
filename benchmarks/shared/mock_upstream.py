"""An OpenAI-compatible server that answers as it is told to, and fails as it is told to.

    async with MockUpstream(MockScript(pieces=("Hello", " you"))) as mock: ...   # mock.url
    with mock_in_thread(MockScript()) as mock: ...
    python -m benchmarks.shared.mock_upstream --port 0 --first-token-ms 20 --gap-ms 5

For tests (it remembers what it was asked) and for benchmarks: a bare protocol on httptools, fast
enough that a server in front of it is what is measured.
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Final

import uvloop

from benchmarks.shared.mock_connection import Connection
from benchmarks.shared.mock_connection import MockRequest as MockRequest
from benchmarks.shared.mock_script import MockScript as MockScript
from benchmarks.shared.mock_script import ToolCall as ToolCall
from benchmarks.shared.mock_script import answer_text as answer_text
from benchmarks.shared.mock_script import models_body, not_found, plan_of
from benchmarks.shared.toxics import Plan, error_body, spoil, whole_plan
from benchmarks.shared.toxics import Step as Step
from benchmarks.shared.toxics import Toxic as Toxic

logger = logging.getLogger(__name__)

HOST: Final = "127.0.0.1"
# Between a connection's being accepted and its `connection_made`.
_JOINING_TURNS: Final = 3
# Waits no longer than this for its thread.
_THREAD_S: Final = 10.0

Scripted = MockScript | Callable[[MockRequest], MockScript]
"""One script for every request, or who says which one this request gets."""


class MockUpstream:
    """A server on loopback. `script` may be changed at any time; it counts for later requests.

    `requests` are those for answers, `num_model_lists` how often GET /models came, `num_accepted`
    how many connections it has taken. With `api_key` set, requests without it are answered with
    401. `name` is part of each answer's id.
    """

    def __init__(
        self,
        script: Scripted | None = None,
        *,
        name: str = "mock",
        models: Sequence[str] = ("mock-model",),
        api_key: str | None = None,
        remembers: bool = True,
    ) -> None:
        self.script: Scripted = script if script is not None else MockScript()
        self.name = name
        self.models = tuple(models)
        self.api_key = api_key
        self.requests: list[MockRequest] = []
        self.num_requests = 0
        self.num_model_lists = 0
        self.num_accepted = 0
        self.port = 0
        self._remembers = remembers
        self._server: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._changed: asyncio.Event | None = None

    @property
    def url(self) -> str:
        """Base URL as OpenAI's clients take it."""
        return f"http://{HOST}:{self.port}/v1"

    @property
    def is_listening(self) -> bool:
        """Return whether it takes connections."""
        return self._server is not None

    @property
    def num_connections(self) -> int:
        """Return how many clients are connected now."""
        return len(self._connections)

    async def __aenter__(self) -> "MockUpstream":
        """Listen."""
        await self.listen()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Hang up."""
        await self.refuse()

    async def listen(self, port: int = 0) -> None:
        """Take connections; after `refuse` on the same port as before."""
        if self._server is not None:
            return
        self._changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), HOST, self.port or port, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Cut every connection and take no new ones."""
        if self._server is None:
            return
        # asyncio leaks a connection that it accepts just before its server closes: take no more
        # first, and give those that were taken the turns of the loop until they have joined.
        loop = asyncio.get_running_loop()
        for each in self._server.sockets:
            loop.remove_reader(each.fileno())
        for _ in range(_JOINING_TURNS):
            await asyncio.sleep(0)
        self._server.close()
        for connection in tuple(self._connections):
            connection.cut()
        while self._connections:
            await self._next_change()
        await self._server.wait_closed()
        self._server = None

    async def received(self, count: int) -> None:
        """Wait until so many requests for answers have come."""
        while self.num_requests < count:
            await self._next_change()

    async def settled(self) -> None:
        """Wait until no remembered request is open any more."""
        while any(request.outcome == "open" for request in self.requests):
            await self._next_change()

    async def _next_change(self) -> None:
        assert self._changed is not None
        self._changed.clear()
        await self._changed.wait()

    # ---- for its connections ------------------------------------------------------------------

    def joined(self, connection: "Connection") -> None:
        """A client has connected."""
        self._connections.add(connection)
        self.num_accepted += 1

    def left(self, connection: "Connection") -> None:
        """A connection has ended."""
        self._connections.discard(connection)
        self.changed()

    def changed(self) -> None:
        """Wake the waiters: something has happened."""
        if self._changed is not None:
            self._changed.set()

    def plan(self, request: MockRequest) -> Plan:
        """Return what is answered."""
        if request.method == "GET" and request.path.endswith("/models"):
            self.num_model_lists += 1
            return self._spoilt_list(request)
        if request.method != "POST" or not request.path.endswith("/completions"):
            return not_found(request.path)
        request.index = self.num_requests
        self.num_requests += 1
        if self._remembers:
            self.requests.append(request)
        self.changed()
        if self.api_key is not None and not self._is_trusted(request):
            body = error_body("Wrong key.", kind="invalid_request_error", code="invalid_api_key")
            return whole_plan(401, "application/json", body)
        script = self.script if isinstance(self.script, MockScript) else self.script(request)
        answer = plan_of(script, request.document, f"chatcmpl-{self.name}-{request.index}")
        return answer if script.toxic is None else spoil(answer, script.toxic)

    def _is_trusted(self, request: MockRequest) -> bool:
        return request.headers.get("authorization") == f"Bearer {self.api_key}"

    def _spoilt_list(self, request: MockRequest) -> Plan:
        """The model list. A server that fails all the time fails here too."""
        plan = whole_plan(200, "application/json", models_body(self.models))
        if isinstance(self.script, MockScript) and self.script.toxic is not None:
            toxic = self.script.toxic
            if toxic.kind in ("status", "slow_headers", "content_type") or (
                toxic.kind == "reset" and not toxic.after_events
            ):
                return spoil(plan, toxic)
        return plan


# ---- in a thread, as a process ----------------------------------------------------------------


class MockThread:
    """A mock whose event loop is a thread of its own: for callers that have none."""

    def __init__(self, mock: MockUpstream, loop: asyncio.AbstractEventLoop) -> None:
        self.mock = mock
        self._loop = loop

    @property
    def url(self) -> str:
        """Base URL as OpenAI's clients take it."""
        return self.mock.url

    @property
    def requests(self) -> list[MockRequest]:
        """Return what it was asked."""
        return self.mock.requests

    @property
    def script(self) -> Scripted:
        """Return what it answers; may be set at any time."""
        return self.mock.script

    @script.setter
    def script(self, script: Scripted) -> None:
        self.mock.script = script

    def refuse(self) -> None:
        """Cut every connection and take no new ones."""
        self._run(self.mock.refuse())

    def listen(self) -> None:
        """Take connections again, on the same port."""
        self._run(self.mock.listen())

    def settled(self) -> None:
        """Wait until no request is open any more."""
        self._run(self.mock.settled())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_THREAD_S)


@contextlib.contextmanager
def mock_in_thread(
    script: Scripted | None = None,
    *,
    name: str = "mock",
    models: Sequence[str] = ("mock-model",),
    api_key: str | None = None,
) -> Iterator[MockThread]:
    """A mock that listens as long as the context lasts."""
    mock = MockUpstream(script, name=name, models=models, api_key=api_key)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=f"mock-{name}", daemon=True)
    thread.start()
    handle = MockThread(mock, loop)
    try:
        handle.listen()
        yield handle
    finally:
        handle.refuse()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_THREAD_S)
        loop.close()


async def _serve(mock: MockUpstream, port: int) -> None:
    """Until the process is told to end."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    await mock.listen(port)
    print(mock.url, flush=True)
    await ended.wait()
    await mock.refuse()


def main(argv: Sequence[str] | None = None) -> None:
    """Serve; the first line of the output is the base URL."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--name", default="mock")
    parser.add_argument("--model", default="mock-model")
    parser.add_argument("--tokens", type=int, default=64, help="words of an answer")
    parser.add_argument("--stamped", action="store_true", help="pieces tell when they were sent")
    parser.add_argument("--first-token-ms", type=float, default=0.0)
    parser.add_argument("--gap-ms", type=float, default=0.0, help="between two tokens")
    arguments = parser.parse_args(argv)
    script = MockScript(
        num_pieces=arguments.tokens,
        model=arguments.model,
        is_stamped=arguments.stamped,
        first_token_delay_s=arguments.first_token_ms / 1e3,
        gap_s=arguments.gap_ms / 1e3,
    )
    mock = MockUpstream(script, name=arguments.name, models=[arguments.model], remembers=False)
    # What is alive now lives on, so that no collection looks at it in mid-measurement.
    gc.freeze()
    uvloop.run(_serve(mock, arguments.port))


if __name__ == "__main__":
    main()
