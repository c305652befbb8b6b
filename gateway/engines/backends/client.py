"""The one seam between HTTP and engines."""

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from outrider.engine.errors import EngineDiedError, InvalidRequestError
from outrider.engine.events import (
    AdapterInfo,
    EngineEvent,
    EngineInfo,
    EngineStats,
    Failed,
    Finished,
)
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.verifier.params import Tier

logger = logging.getLogger(__name__)

OnEnd = Callable[[Finished | Failed | None], None]
"""Told how a request ended: the engine's last word, or None where it refused the request."""


LOADING_REASON = "The engine is loading, being restarted or does not answer; try again soon."


def tell_end(on_end: OnEnd | None, request_id: str, ending: Finished | Failed | None) -> None:
    """Call `on_end`, if there is one; the caller goes on whatever it raises."""
    if on_end is None:
        return
    try:
        on_end(ending)
    except Exception:
        # It is called by the reader of the engine's events, which all other streams need.
        logger.exception("on_end failed request_id=%s", request_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class PausedRequests:
    """New requests that wait for an engine: how many do now, and how many have so far."""

    num_now: int = 0
    num_ever: int = 0


class EngineClient(Protocol):
    """An engine as the gateway sees it: in this process, in its own one, or on another machine."""

    async def start(self) -> None:
        """Load the engine and return when it can take requests."""

    async def close(self) -> None:
        """Stop the engine and wait until it has gone. In-flight requests end with `Failed`."""

    @property
    def is_ready(self) -> bool:
        """True if a request submitted now would be served."""

    @property
    def is_paused(self) -> bool:
        """True if the engine is lost and a request submitted now waits for the next one."""

    @property
    def paused(self) -> PausedRequests:
        """Requests that came while no engine served, and wait for one."""

    @property
    def not_ready_reason(self) -> str:
        """Message for clients while the engine is not ready."""

    async def info(self) -> EngineInfo:
        """Return the loaded models."""

    def submit(
        self, request: EngineRequest, on_end: OnEnd | None = None
    ) -> AsyncIterator[EngineEvent]:
        """Queue a request and stream its events; the last one is `Finished` or `Failed`.

        Closing the iterator early aborts the request. Raises an `EngineError` (at the first
        `__anext__`) when the engine refuses it.

        `on_end` is called once, in the event loop, for every iterator that was started: with the
        engine's last word, also where the iterator was closed long before it came; with `Failed`
        where the engine died; with None where the request was refused. It must be quick. What it
        raises is logged.
        """

    async def switch_tier(self, request_id: str, tier: Tier, *, keeps_answer: bool = False) -> None:
        """Switch a running request to another tier. Unknown ids are ignored.

        The answer so far is retracted, or with `keeps_answer` continued; `TierSwitched` says when.
        Where the other tier cannot take the request there is no such event: the answer stays with
        its tier, as after `keep_on_tier`.
        """

    async def keep_on_tier(self, request_id: str) -> None:
        """The answer stays with its tier: it is no longer held at its end. Unknown: ignored."""

    async def abort(self, request_id: str) -> None:
        """End a request and free its blocks. Unknown ids are ignored."""

    async def prepare_adapter(self, ref: AdapterRef) -> AdapterInfo:
        """Have an adapter read, checked and made resident, beside the steps.

        Raises InvalidAdapterError, and EngineDiedError where no engine serves.
        """

    async def pin(self, request: EngineRequest) -> None:
        """Have the prompt of a request with a `pin` computed and kept, by each engine of its tier.

        Raises the EngineError of the first engine that does not.
        """

    async def unpin(self, tenant: str, name: str) -> None:
        """Have a tenant's prompt of this name kept no longer. Unknown names are ignored."""

    async def stats(self) -> EngineStats:
        """A snapshot of gauges and counters."""


async def until_read(events: AsyncIterator[EngineEvent]) -> None:
    """Return once a request has ended whose prompt is all that matters.

    Raises EngineError where it was not computed.
    """
    async for event in events:
        if isinstance(event, Failed):
            if event.code == EngineDiedError.code:
                raise EngineDiedError(event.message)
            raise InvalidRequestError(event.message)
