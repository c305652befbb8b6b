"""The gateway's side of running requests: one queue of events for each, filled once per step."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

from engine.errors import EngineDiedError, EngineError, InvalidRequestError
from engine.events import EngineEvent, EngineStats, Failed, Finished
from engine.request import EngineRequest
from gateway.backends.wire import Abort, Command, GetStats, Submit

DIED_MESSAGE = "The engine stopped while it worked on this request. Send the request again."
SHUT_DOWN_MESSAGE = "The engine was shut down while it worked on this request."
NOT_READY_MESSAGE = "The engine is not running at the moment (it is starting). Try again soon."


class EventStreams:
    """Requests in flight and calls that wait for an answer. Belongs to one event loop.

    `is_open` says whether an engine serves at the moment; only then are new requests taken.

    The queues have no bound, but they cannot grow without one: a request emits at most `max_tokens`
    events and the engine admits a limited number of requests.
    """

    def __init__(self, send: Callable[[Command], None]) -> None:
        """`send` passes a command to the engine and never blocks."""
        self.is_open = False
        self._send = send
        self._queues: dict[str, asyncio.Queue[EngineEvent | EngineError]] = {}
        self._calls: dict[int, asyncio.Future[EngineStats]] = {}
        self._next_call_id = 0

    def __len__(self) -> int:
        """Number of requests in flight."""
        return len(self._queues)

    async def follow(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Submit the request and yield its events; leaving early aborts it in the engine.

        Raises EngineDiedError when no engine serves, else what `Engine.submit` raises.
        """
        self._require_open()
        request_id = request.request_id
        if request_id in self._queues:
            raise InvalidRequestError(f"request_id={request_id!r} is in use by a running request")
        queue: asyncio.Queue[EngineEvent | EngineError] = asyncio.Queue()
        self._queues[request_id] = queue
        try:
            self._send(Submit(request))
            while True:
                item = await queue.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if isinstance(item, Finished | Failed):
                    return
        finally:
            # Whoever delivers the last event takes the queue out; still there means we left early.
            if self._queues.get(request_id) is queue:
                del self._queues[request_id]
                self._send(Abort(request_id))

    def publish(self, events: Iterable[EngineEvent]) -> None:
        """Hand out the events of one step. Events of requests that have left are dropped."""
        for event in events:
            if isinstance(event, Finished | Failed):
                queue = self._queues.pop(event.request_id, None)
            else:
                queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.put_nowait(event)

    def refuse(self, request_id: str, error: EngineError) -> None:
        """End a stream with the exception that `Engine.submit` raised."""
        if queue := self._queues.pop(request_id, None):
            queue.put_nowait(error)

    async def call_stats(self) -> EngineStats:
        """Ask the engine for a snapshot. Raises EngineDiedError when there is none or it dies."""
        self._require_open()
        call_id = self._next_call_id
        self._next_call_id += 1
        future: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(GetStats(call_id))
            return await future
        finally:
            self._calls.pop(call_id, None)

    def answer(self, call_id: int, stats: EngineStats) -> None:
        """Deliver a snapshot to the call that asked for it."""
        future = self._calls.get(call_id)
        if future is not None and not future.done():
            future.set_result(stats)

    def close(self, message: str = DIED_MESSAGE) -> None:
        """The engine has gone: end every stream with `Failed`, every call with an exception."""
        self.is_open = False
        code = EngineDiedError.code
        self.publish([Failed(request_id=i, code=code, message=message) for i in self._queues])
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDiedError(message))

    def _require_open(self) -> None:
        if not self.is_open:
            raise EngineDiedError(NOT_READY_MESSAGE)
