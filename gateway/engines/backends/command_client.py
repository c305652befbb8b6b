"""The part of an `EngineClient` that is the same wherever the engine runs: commands and streams."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable

from outrider.engine.errors import EngineDiedError
from outrider.engine.events import AdapterInfo, EngineEvent, EngineInfo, EngineStats
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.gateway.engines.backends.client import OnEnd, PausedRequests, until_read
from outrider.gateway.engines.backends.streams import NOT_READY_MESSAGE, EventStreams
from outrider.gateway.engines.backends.wire import (
    AdapterReply,
    BlocksChanged,
    BlocksReset,
    Command,
    Events,
    GetBlocks,
    Refused,
    Reply,
    StatsReply,
    Unpin,
)
from outrider.verifier.params import Tier

OnBlocks = Callable[[BlocksChanged | BlocksReset], None]
"""Told the news of an engine's prefix cache, in the event loop; it must be quick."""


class CommandClient(ABC):
    """Sends an engine commands, and follows its requests. Subclasses start and end the engine."""

    def __init__(self, max_waiting: int = 0) -> None:
        """`max_waiting`: so many requests may wait for an engine's restart."""
        self._streams = EventStreams(self._send, max_waiting=max_waiting)
        self._info: EngineInfo | None = None  # None: no engine was started, or it was closed
        self._on_blocks: OnBlocks | None = None

    @property
    def is_paused(self) -> bool:
        """True if the engine is lost and a request submitted now waits for the next one."""
        return self._streams.is_holding

    @property
    def paused(self) -> PausedRequests:
        """Requests that came while no engine served, and wait for one."""
        return self._streams.paused

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Send a command; must not block. Without an engine it may be dropped."""

    async def info(self) -> EngineInfo:
        """Return the loaded models. Raises EngineDiedError before `start`."""
        if self._info is None:
            raise EngineDiedError(NOT_READY_MESSAGE)
        return self._info

    def submit(
        self, request: EngineRequest, on_end: OnEnd | None = None
    ) -> AsyncIterator[EngineEvent]:
        """Queue a request and stream its events."""
        return self._streams.follow(request, on_end)

    async def switch_tier(self, request_id: str, tier: Tier, *, keeps_answer: bool = False) -> None:
        """Switch a running request to another tier. Unknown ids are ignored."""
        self._streams.switch_tier(request_id, tier, keeps_answer=keeps_answer)

    async def keep_on_tier(self, request_id: str) -> None:
        """Leave the answer with its tier. Unknown ids are ignored."""
        self._streams.keep_on_tier(request_id)

    async def abort(self, request_id: str) -> None:
        """End a request. Unknown ids are ignored."""
        self._streams.abort(request_id)

    async def prepare_adapter(self, ref: AdapterRef) -> AdapterInfo:
        """Have an adapter read and checked. Raises InvalidAdapterError, EngineDiedError."""
        return await self._streams.call_adapter(ref)

    async def pin(self, request: EngineRequest) -> None:
        """Have a prompt computed and kept. Raises EngineError where it is not."""
        await until_read(self.submit(request))

    async def unpin(self, tenant: str, name: str) -> None:
        """Have a tenant's prompt of this name kept no longer. Unknown names are ignored."""
        self._send(Unpin(tenant, name))

    async def stats(self) -> EngineStats:
        """Return a snapshot, taken between two steps. Raises EngineDiedError when nothing runs."""
        return await self._streams.call_stats()

    def follow_block_events(self, on_blocks: OnBlocks) -> None:
        """Have the news of the prefix cache told, beginning with all that is kept (`BlocksReset`).

        Called again, the engine begins anew: for where a message is missing.
        """
        self._on_blocks = on_blocks
        self._ask_for_blocks()

    def _ask_for_blocks(self) -> None:
        """Ask an engine that has just come for its news, if they are wanted."""
        if self._on_blocks is not None:
            self._send(GetBlocks())

    def _handle(self, reply: Reply) -> None:
        """Hand a reply of the engine on, in the event loop."""
        match reply:
            case Events() | Refused() | StatsReply() | AdapterReply():
                self._streams.receive(reply)
            case BlocksChanged() | BlocksReset() if self._on_blocks is not None:
                self._on_blocks(reply)
