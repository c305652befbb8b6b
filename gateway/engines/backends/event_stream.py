"""One request in flight: its events on their way to a reader, and what it takes to resume it."""

import asyncio

from outrider.engine.errors import EngineError
from outrider.engine.events import Ending, EngineEvent
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.client import OnEnd, tell_end
from outrider.gateway.engines.backends.received_answer import ReceivedAnswer
from outrider.gateway.engines.backends.wire import Command, Submit


class EventStream:
    """Passes one request's events on, and knows the answer that its reader has.

    is_waiting: its engine died, and the next one is to go on with it. is_new: no engine had it.
    """

    __slots__ = (
        "_on_end",
        "answer",
        "is_followed",
        "is_new",
        "is_waiting",
        "queue",
        "request",
        "request_id",
    )

    def __init__(self, request: EngineRequest, on_end: OnEnd | None) -> None:
        self.request = request
        self.request_id = request.request_id
        self.answer = ReceivedAnswer(request)
        self.queue: asyncio.Queue[EngineEvent | EngineError] = asyncio.Queue()
        self.is_followed = True
        self.is_waiting = False
        self.is_new = False
        self._on_end = on_end

    def add(self, event: EngineEvent) -> None:
        """Pass on an event that is not the last; not twice what a resumed request repeats."""
        if self.answer.accept(event) and self.is_followed:
            self.queue.put_nowait(event)

    def end(self, ending: Ending | None) -> None:
        """Pass on the last event, of the last engine; None where the request was refused."""
        self._end(None if ending is None else self.answer.ended(ending))

    def refuse(self, error: EngineError) -> None:
        """End with the engine's refusal; where events came before it, it is the last of them."""
        if self.answer.is_resumed:
            self.fail(error.code, str(error))
        else:
            self.queue.put_nowait(error)
            self._end(None)

    def fail(self, code: str, message: str) -> None:
        """End with what was seen of the engine's work."""
        self._end(self.answer.failed(code, message))

    def abort(self) -> None:
        """End while no engine has the request."""
        self._end(self.answer.aborted())

    def resumption(self) -> list[Command]:
        """Return the commands with which the next engine goes on behind what was received."""
        self.is_waiting = False
        if self.is_new:
            self.is_new = False
            return [Submit(self.request)]
        request, switch = self.answer.resumption(), self.answer.switch
        return [Submit(request), *([] if switch is None else [switch])]

    def _end(self, ending: Ending | None) -> None:
        if ending is not None and self.is_followed:
            self.queue.put_nowait(ending)
        on_end, self._on_end = self._on_end, None
        tell_end(on_end, self.request_id, ending)
