"""The gateway's side of running requests: one queue of events for each, filled once per step."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from engine.errors import (
    CrashSuspectError,
    EngineDiedError,
    EngineError,
    InvalidRequestError,
)
from engine.events import AdapterInfo, Ending, EngineEvent, EngineStats, Failed, Finished
from engine.request import AdapterRef, EngineRequest
from gateway.backends.client import OnEnd, tell_end
from gateway.backends.crash_suspects import EXPIRES_S, CrashSuspects
from gateway.backends.seen_work import SeenWork
from gateway.backends.wire import (
    Abort,
    AdapterReply,
    Command,
    Events,
    GetStats,
    PrepareAdapter,
    Refused,
    StatsReply,
    Submit,
    unpack_error,
)

DIED_MESSAGE = "The engine stopped while it worked on this request. Send the request again."
SHUT_DOWN_MESSAGE = "The engine was shut down while it worked on this request."
NOT_READY_MESSAGE = "The engine is not running at the moment (it is starting). Try again soon."


class _Stream:
    """One request in flight."""

    __slots__ = ("_on_end", "is_followed", "queue", "request", "request_id", "seen")

    def __init__(self, request: EngineRequest, on_end: OnEnd | None) -> None:
        self.request = request
        self.request_id = request.request_id
        self.queue: asyncio.Queue[EngineEvent | EngineError] = asyncio.Queue()
        self.seen = SeenWork(request)
        self.is_followed = True
        self._on_end = on_end

    def add(self, event: EngineEvent) -> None:
        """Pass on an event that is not the last."""
        self.seen.add(event)
        if self.is_followed:
            self.queue.put_nowait(event)

    def end(self, ending: Ending | None) -> None:
        """Pass on the last event; None where there was none before the refusal."""
        if ending is not None and self.is_followed:
            self.queue.put_nowait(ending)
        on_end, self._on_end = self._on_end, None
        tell_end(on_end, self.request_id, ending)


class EventStreams:
    """Requests in flight and calls that wait for an answer. Belongs to one event loop.

    `is_open` says whether an engine serves at the moment; only then are new requests taken. One
    that was in flight when an engine died may be sent once more, and is refused after a second
    death: `suspects` remembers it.

    The queues have no bound, but they cannot grow without one: a request emits at most `max_tokens`
    events and the engine admits a limited number of requests.
    """

    def __init__(
        self, send: Callable[[Command], None], suspects: CrashSuspects | None = None
    ) -> None:
        """`send` passes a command to the engine and never blocks."""
        self.is_open = False
        self._send = send
        self._suspects = CrashSuspects() if suspects is None else suspects
        self._streams: dict[str, _Stream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call_id = 0

    def __len__(self) -> int:
        """Number of requests in flight, those included that are being aborted."""
        return len(self._streams)

    async def follow(
        self, request: EngineRequest, on_end: OnEnd | None = None
    ) -> AsyncGenerator[EngineEvent, None]:
        """Submit the request and yield its events; leaving early aborts it in the engine.

        `on_end`: see `EngineClient.submit`. Raises EngineDiedError when no engine serves,
        CrashSuspectError for a request that two engines died with, else what `Engine.submit`
        raises.
        """
        stream, request_id = _Stream(request, on_end), request.request_id
        try:
            self._submit(stream, request)
        except BaseException:
            stream.end(None)
            raise
        try:
            while True:
                item = await stream.queue.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if isinstance(item, Finished | Failed):
                    return
        finally:
            # The last event removes its stream; one that is still there was left early.
            # It stays until the engine has said how it ended.
            if self._streams.get(request_id) is stream:
                stream.is_followed = False
                self._send(Abort(request_id))

    def _submit(self, stream: _Stream, request: EngineRequest) -> None:
        self._require_open()
        self._suspects.check(request)
        if request.request_id in self._streams:
            raise InvalidRequestError(
                f"request_id={request.request_id!r} is in use by a running request"
            )
        self._streams[request.request_id] = stream
        try:
            self._send(Submit(request))
        except BaseException:
            del self._streams[request.request_id]
            raise

    def receive(self, reply: Events | Refused | StatsReply | AdapterReply) -> None:
        """Hand a reply of the engine to the streams and calls that wait for it."""
        match reply:
            case Events():
                self.publish(reply.unpack())
            case Refused(request_id, error):
                self.refuse(request_id, unpack_error(error))
            case StatsReply(call_id, stats):
                self.answer(call_id, stats)
            case AdapterReply(call_id, info, error):
                self.answer(call_id, info if error is None else unpack_error(error))

    def publish(self, events: Iterable[EngineEvent]) -> None:
        """Hand out the events of one step. Those of requests that have left are only counted."""
        for event in events:
            if isinstance(event, Finished | Failed):
                if stream := self._streams.pop(event.request_id, None):
                    if isinstance(event, Finished) and event.finish_reason != "abort":
                        self._suspects.acquit(stream.request)
                    stream.end(event)
            elif stream := self._streams.get(event.request_id):
                stream.add(event)

    def refuse(self, request_id: str, error: EngineError) -> None:
        """End a stream with the exception that `Engine.submit` raised."""
        if stream := self._streams.pop(request_id, None):
            stream.queue.put_nowait(error)
            stream.end(None)

    async def call_stats(self) -> EngineStats:
        """Ask the engine for a snapshot. Raises EngineDiedError when there is none or it dies."""
        stats: EngineStats = await self._call(GetStats)
        return stats

    async def call_adapter(self, ref: AdapterRef) -> AdapterInfo:
        """Have an adapter read. Raises InvalidAdapterError, and EngineDiedError as `call_stats`."""
        info: AdapterInfo = await self._call(lambda call_id: PrepareAdapter(call_id, ref))
        return info

    async def _call(self, command: Callable[[int], Command]) -> Any:
        """Send a command and wait for its answer."""
        self._require_open()
        call_id = self._next_call_id
        self._next_call_id += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(command(call_id))
            return await future
        finally:
            self._calls.pop(call_id, None)

    def answer(self, call_id: int, answer: EngineStats | AdapterInfo | EngineError | None) -> None:
        """Deliver an answer to the call that waits for it; an error is raised there."""
        future = self._calls.get(call_id)
        if future is None or future.done():
            return
        if isinstance(answer, EngineError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def close(self, message: str) -> None:
        """The engine was shut down: end streams with `Failed` and calls with an exception."""
        self._end_all(
            [(stream, EngineDiedError.code, message) for stream in self._streams.values()], message
        )

    def died(self) -> None:
        """The engine died: as `close`, and remember what was in flight."""
        streams = list(self._streams.values())
        had_too_many = self._suspects.note_death(stream.request for stream in streams)
        again = CrashSuspectError(retry_after_s=EXPIRES_S)
        self._end_all(
            [
                (stream, again.code, str(again))
                if is_suspect
                else (stream, EngineDiedError.code, DIED_MESSAGE)
                for stream, is_suspect in zip(streams, had_too_many, strict=True)
            ],
            DIED_MESSAGE,
        )

    def _end_all(self, endings: list[tuple[_Stream, str, str]], message: str) -> None:
        """endings: (stream, code, message)."""
        self.is_open = False
        self.publish(
            [
                Failed(
                    request_id=stream.request_id, code=code, message=told, stats=stream.seen.stats()
                )
                for stream, code, told in endings
            ]
        )
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDiedError(message))

    def _require_open(self) -> None:
        if not self.is_open:
            raise EngineDiedError(NOT_READY_MESSAGE)
