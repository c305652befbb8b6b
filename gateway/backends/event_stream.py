"""One request in flight: its events on their way to a reader, and what it takes to resume it."""

import asyncio
from dataclasses import replace

from engine.errors import EngineError
from engine.events import (
    AnswerHeld,
    Ending,
    EngineEvent,
    Failed,
    Finished,
    PrefillDone,
    RequestStats,
    TierSwitched,
    TokensEmitted,
)
from engine.request import EngineRequest
from gateway.backends.client import OnEnd, tell_end
from gateway.backends.seen_work import SeenWork, joined, retracted
from gateway.backends.wire import Command, Submit, SwitchTier


class EventStream:
    """Passes one request's events on, and knows the answer that its reader has.

    is_waiting: its engine died, and the next one is to go on with it. is_settled: the answer stays
    with its tier. switch: a change of tier that no event has confirmed.
    """

    __slots__ = (
        "_before",
        "_has_prefill",
        "_on_end",
        "_resumed",
        "_seen",
        "_tier",
        "_token_ids",
        "_was_held",
        "is_followed",
        "is_settled",
        "is_waiting",
        "queue",
        "request",
        "request_id",
        "switch",
    )

    def __init__(self, request: EngineRequest, on_end: OnEnd | None) -> None:
        self.request = request
        self.request_id = request.request_id
        self.queue: asyncio.Queue[EngineEvent | EngineError] = asyncio.Queue()
        self.is_followed = True
        self.is_waiting = False
        self.is_settled = False
        self.switch: SwitchTier | None = None
        self._on_end = on_end
        self._seen = SeenWork(request)
        self._before: RequestStats | None = None  # of engines that died
        self._resumed = False
        self._tier = request.tier
        self._token_ids: list[int] = []
        self._has_prefill = False
        self._was_held = False

    def add(self, event: EngineEvent) -> None:
        """Pass on an event that is not the last; not twice what a resumed request repeats."""
        self._seen.add(event)
        match event:
            case TokensEmitted():
                self._token_ids.extend(event.token_ids)
            case PrefillDone():
                if self._has_prefill:
                    return
                self._has_prefill = True
            case AnswerHeld():
                if self._was_held:
                    return
                self._was_held = True
            case TierSwitched():
                self._note_switch(event)
        if self.is_followed:
            self.queue.put_nowait(event)

    def _note_switch(self, event: TierSwitched) -> None:
        self._tier, self.switch = event.tier, None
        self._has_prefill = self._was_held = False
        if not event.keeps_answer:
            self._token_ids.clear()
            if self._before is not None:
                self._before = retracted(self._before)

    def end(self, ending: Ending | None) -> None:
        """Pass on the last event; None where there was none before the refusal."""
        if ending is not None:
            if self._before is not None and ending.stats is not None:
                ending = replace(ending, stats=joined(self._before, ending.stats))
            if self.is_followed:
                self.queue.put_nowait(ending)
        on_end, self._on_end = self._on_end, None
        tell_end(on_end, self.request_id, ending)

    def refuse(self, error: EngineError) -> None:
        """End with the engine's refusal; where events came before it, it is the last of them."""
        if self._resumed:
            self.fail(error.code, str(error))
        else:
            self.queue.put_nowait(error)
            self.end(None)

    def fail(self, code: str, message: str) -> None:
        """End with what was seen of the engine's work."""
        stats = self._seen.stats()
        self.end(Failed(request_id=self.request_id, code=code, message=message, stats=stats))

    def abort(self) -> None:
        """End while no engine has the request."""
        self.end(
            Finished(
                request_id=self.request_id,
                tier=self._tier,
                finish_reason="abort",
                stats=self._seen.stats(),
            )
        )

    def resumption(self) -> list[Command]:
        """Return the commands with which the next engine goes on behind what was received."""
        stats = self._seen.stats()
        self._before = stats if self._before is None else joined(self._before, stats)
        request = replace(
            self.request,
            tier=self._tier,
            may_escalate=self.request.may_escalate and not self.is_settled,
            resumed_token_ids=tuple(self._token_ids),
        )
        self._seen = SeenWork(request)
        self._resumed, self.is_waiting = True, False
        return [Submit(request), *([] if self.switch is None else [self.switch])]
