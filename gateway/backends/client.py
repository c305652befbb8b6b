"""The one seam between HTTP and engines."""

from collections.abc import AsyncIterator
from typing import Protocol

from engine.events import EngineEvent, EngineInfo, EngineStats
from engine.request import EngineRequest, Tier


class EngineClient(Protocol):
    """An engine as the gateway sees it: in this process, in its own one, or on another machine."""

    async def start(self) -> None:
        """Load the engine and return when it can take requests."""

    async def close(self) -> None:
        """Stop the engine and wait until it has gone. In-flight requests end with `Failed`."""

    @property
    def is_ready(self) -> bool:
        """Whether a request submitted now would be served."""

    async def info(self) -> EngineInfo:
        """What is loaded."""

    def submit(self, request: EngineRequest) -> AsyncIterator[EngineEvent]:
        """Queue a request and stream its events; the last one is `Finished` or `Failed`.

        Closing the iterator early aborts the request. Raises an `EngineError` (at the first
        `__anext__`) when the engine refuses it.
        """

    async def switch_tier(self, request_id: str, tier: Tier, *, keeps_answer: bool = False) -> None:
        """Hand a running request to another tier. Unknown ids are ignored.

        The answer so far is retracted, or with `keeps_answer` continued; `TierSwitched` says when.
        Where the other tier cannot take the request there is no such event: the answer stays with
        its tier, as after `settle`.
        """

    async def settle(self, request_id: str) -> None:
        """The answer stays with its tier: it is no longer held at its end. Unknown: ignored."""

    async def abort(self, request_id: str) -> None:
        """End a request and free its blocks. Unknown ids are ignored."""

    async def stats(self) -> EngineStats:
        """A snapshot of gauges and counters."""
