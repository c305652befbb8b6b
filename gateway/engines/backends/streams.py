"""The gateway's side of running requests: one queue of events for each, filled once per step."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from outrider.engine.errors import (
    CrashSuspectError,
    EngineDiedError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
)
from outrider.engine.events import AdapterInfo, EngineEvent, EngineStats, Failed, Finished
from outrider.engine.queue.room import check_room
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.gateway.engines.backends.client import OnEnd, PausedRequests
from outrider.gateway.engines.backends.crash_suspects import EXPIRES_S, CrashSuspects
from outrider.gateway.engines.backends.event_stream import EventStream
from outrider.gateway.engines.backends.wire import (
    Abort,
    AdapterReply,
    Command,
    Events,
    GetStats,
    KeepOnTier,
    PrepareAdapter,
    Refused,
    StatsReply,
    Submit,
    SwitchTier,
    unpack_error,
)
from outrider.verifier.params import Tier

logger = logging.getLogger(__name__)

DIED_MESSAGE = "The engine stopped while it worked on this request. Send the request again."
SHUT_DOWN_MESSAGE = "The engine was shut down while it worked on this request."
NOT_READY_MESSAGE = "The engine is not running at the moment (it is starting). Try again soon."
NOT_BACK_MESSAGE = "The engine was not back in time (engine.resume_within_s). Try again soon."


class EventStreams:
    """Requests in flight and calls that wait for an answer. Belongs to one event loop.

    `is_open` says whether an engine serves at the moment. One that was in flight when an engine
    died waits for the next, if there is to be one, which goes on with its answer; after a second
    death it is refused: `suspects` remembers it. New requests wait with them while `is_holding`,
    and are refused where nothing serves and nothing is waited for.

    The queues have no bound, but they cannot grow without one: a request emits at most `max_tokens`
    events and the engine admits a limited number of requests.
    """

    def __init__(
        self,
        send: Callable[[Command], None],
        suspects: CrashSuspects | None = None,
        *,
        max_waiting: int = 0,
    ) -> None:
        """`send` passes a command to the engine and never blocks. `max_waiting`: see `hold`."""
        self.is_open = False
        self.is_holding = False
        self._max_waiting = max_waiting
        self._num_ever_paused = 0
        self._send = send
        self._suspects = CrashSuspects() if suspects is None else suspects
        self._streams: dict[str, EventStream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call_id = 0

    def __len__(self) -> int:
        """Number of requests in flight, those included that are being aborted."""
        return len(self._streams)

    @property
    def paused(self) -> PausedRequests:
        """New requests that wait for the next engine."""
        num_now = sum(stream.is_new for stream in self._streams.values())
        return PausedRequests(num_now=num_now, num_ever=self._num_ever_paused)

    async def follow(
        self, request: EngineRequest, on_end: OnEnd | None = None
    ) -> AsyncGenerator[EngineEvent, None]:
        """Submit the request and yield its events; leaving early aborts it in the engine.

        `on_end`: see `EngineClient.submit`. Raises EngineDiedError when no engine serves, and none
        is waited for or too many requests wait; CrashSuspectError for a request that two engines
        died with; else what `Engine.submit` raises.
        """
        stream, request_id = EventStream(request, on_end), request.request_id
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
                self.abort(request_id)

    def _submit(self, stream: EventStream, request: EngineRequest) -> None:
        if not self.is_holding:
            self._require_open()
        self._suspects.check(request)
        if request.request_id in self._streams:
            raise InvalidRequestError(
                f"request_id={request.request_id!r} is in use by a running request"
            )
        if not self.is_open:
            self._hold(stream)
            return
        self._streams[request.request_id] = stream
        try:
            self._send(Submit(request))
        except BaseException:
            del self._streams[request.request_id]
            raise

    def _hold(self, stream: EventStream) -> None:
        """Have a new request wait for the next engine, in the room that its queue will have."""
        try:
            check_room(stream.request, self._streams.values(), max_waiting=self._max_waiting)
        except QueueFullError as full:
            raise EngineDiedError(
                f"The engine is being restarted, and {full.num_waiting} requests wait for it "
                "already. Try again soon."
            ) from None
        if not self.paused.num_now:
            logger.warning("new requests wait for the next engine")
        stream.is_waiting = stream.is_new = True
        self._streams[stream.request_id] = stream
        self._num_ever_paused += 1

    def switch_tier(self, request_id: str, tier: Tier, *, keeps_answer: bool) -> None:
        """Hand a request to another tier; unknown ids are ignored."""
        command = SwitchTier(request_id, tier, keeps_answer)
        if stream := self._streams.get(request_id):
            stream.answer.switch = command
        self._send(command)

    def keep_on_tier(self, request_id: str) -> None:
        """Leave the answer with its tier; unknown ids are ignored."""
        if stream := self._streams.get(request_id):
            stream.answer.stays_on_tier = True
        self._send(KeepOnTier(request_id))

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is not None and stream.is_waiting:
            del self._streams[request_id]
            stream.abort()
        else:
            self._send(Abort(request_id))

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
                        self._suspects.note_served(stream.request)
                    stream.end(event)
            elif stream := self._streams.get(event.request_id):
                stream.add(event)

    def refuse(self, request_id: str, error: EngineError) -> None:
        """End a stream with the exception that `Engine.submit` raised."""
        if stream := self._streams.pop(request_id, None):
            stream.refuse(error)

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
        self.is_open = self.is_holding = False
        self._fail(list(self._streams.values()), EngineDiedError.code, message)
        self._end_calls(message)

    def died(self, *, resumes: bool = False) -> None:
        """The engine died: remember what was in flight, and end it.

        With `resumes`, requests that are followed and met no earlier death wait for `resume`.
        """
        self._count_death([each for each in self._streams.values() if not each.is_waiting])
        self.lost(resumes=resumes)

    def lost(self, *, resumes: bool = False) -> None:
        """Do as `died` for an engine that cannot be reached, but suspect no request."""
        self.is_open = False
        for stream in [each for each in self._streams.values() if not each.is_waiting]:
            if resumes and stream.is_followed:
                stream.is_waiting = True
            else:
                self._fail([stream], EngineDiedError.code, DIED_MESSAGE)
        self._end_calls(DIED_MESSAGE)

    def count_death(self) -> None:
        """Count a death for the requests that wait: the engine that was lost had died."""
        waiting = [each for each in self._streams.values() if each.is_waiting]
        self._count_death([each for each in waiting if not each.is_new])

    def hold(self) -> None:
        """Have new requests wait for the next engine, in the room that `max_waiting` gives."""
        self.is_holding = self._max_waiting > 0

    def _count_death(self, streams: list[EventStream]) -> None:
        """Remember requests that were in flight at a death, and end those with too many."""
        had_too_many = self._suspects.note_death(stream.request for stream in streams)
        again = CrashSuspectError(retry_after_s=EXPIRES_S)
        suspects = [stream for stream, had in zip(streams, had_too_many, strict=True) if had]
        self._fail(suspects, again.code, str(again))

    def resume(self) -> int:
        """Another engine serves: have it go on with what waits. Returns the number of requests."""
        self.is_open, self.is_holding = True, False
        waiting = [stream for stream in self._streams.values() if stream.is_waiting]
        for stream in waiting:
            for command in stream.resumption():
                self._send(command)
        return len(waiting)

    def give_up(self) -> None:
        """End what waits for an engine, as none came in time, and hold nothing more."""
        self.is_holding = False
        waiting = [stream for stream in self._streams.values() if stream.is_waiting]
        logger.error("no engine came in time, what waits for one ends count=%d", len(waiting))
        for stream in [each for each in waiting if each.is_new]:
            self.refuse(stream.request_id, EngineDiedError(NOT_BACK_MESSAGE))
        self._fail(
            [each for each in waiting if not each.is_new], EngineDiedError.code, DIED_MESSAGE
        )

    def _fail(self, streams: Iterable[EventStream], code: str, message: str) -> None:
        for stream in streams:
            del self._streams[stream.request_id]
            stream.fail(code, message)

    def _end_calls(self, message: str) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDiedError(message))

    def _require_open(self) -> None:
        if not self.is_open:
            raise EngineDiedError(NOT_READY_MESSAGE)
