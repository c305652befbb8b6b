"""The part of an answer that its reader has, and how the next engine goes on with it."""

from dataclasses import replace

from outrider.engine.events import (
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
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.seen_work import SeenWork, joined, retracted
from outrider.gateway.engines.backends.wire import SwitchTier
from outrider.verifier.params import Tier


class ReceivedAnswer:
    """Takes one request's events in, from one engine after the other.

    stays_on_tier: the answer stays with its tier. switch: a change of tier that no event has
    confirmed. was_held: it has ended, and waits to be kept or switched.
    """

    __slots__ = (
        "_before",
        "_has_prefill",
        "_seen",
        "request",
        "stays_on_tier",
        "switch",
        "tier",
        "token_ids",
        "was_held",
    )

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.tier: Tier = request.tier
        self.token_ids = list(request.resumed_token_ids or ())
        self.switch: SwitchTier | None = None
        self.stays_on_tier = False
        self.was_held = False
        self._seen = SeenWork(request)
        self._before: RequestStats | None = None  # of engines that had it before
        self._has_prefill = False

    @property
    def is_resumed(self) -> bool:
        """True if an engine before this one had the request."""
        return self._before is not None

    @property
    def has_begun(self) -> bool:
        """True if the reader has tokens, or knows whose arithmetic they are to have."""
        return self._has_prefill or bool(self.token_ids)

    def accept(self, event: EngineEvent) -> bool:
        """Take in an event that is not the last; False if the reader has had it before."""
        self._seen.add(event)
        match event:
            case TokensEmitted():
                self.token_ids.extend(event.token_ids)
            case PrefillDone():
                was_there, self._has_prefill = self._has_prefill, True
                return not was_there
            case AnswerHeld():
                was_there, self.was_held = self.was_held, True
                return not was_there
            case TierSwitched():
                self._note_switch(event)
        return True

    def _note_switch(self, event: TierSwitched) -> None:
        self.tier, self.switch = event.tier, None
        self._has_prefill = self.was_held = False
        if event.keeps_answer:
            return
        if event.tier == "large":  # the next engine is to draft from it, as this one does
            self.request = replace(self.request, retracted_token_ids=tuple(self.token_ids))
        self.token_ids.clear()
        if self._before is not None:
            self._before = retracted(self._before)

    def ended(self, ending: Ending) -> Ending:
        """Return the last event with the work of all engines."""
        if self._before is None or ending.stats is None:
            return ending
        return replace(ending, stats=joined(self._before, ending.stats))

    def failed(self, code: str, message: str) -> Ending:
        """Return the last event of an answer whose engine can say nothing more."""
        request_id = self.request.request_id
        stats = self._seen.stats()
        return self.ended(Failed(request_id=request_id, code=code, message=message, stats=stats))

    def aborted(self) -> Ending:
        """Return the last event of an answer that was aborted while no engine had it."""
        return self.ended(
            Finished(
                request_id=self.request.request_id,
                tier=self.tier,
                finish_reason="abort",
                stats=self._seen.stats(),
            )
        )

    def resumption(self, stats: RequestStats | None = None) -> EngineRequest:
        """Return the request that goes on behind what was received.

        `stats`: the work of the engine that had it, where it has told them; else what was seen of
        it.
        """
        done = self._seen.stats() if stats is None else stats
        self._before = done if self._before is None else joined(self._before, done)
        request = replace(
            self.request,
            tier=self.tier,
            may_escalate=self.request.may_escalate and not self.stays_on_tier,
            resumed_token_ids=tuple(self.token_ids),
        )
        self._seen = SeenWork(request)
        return request
