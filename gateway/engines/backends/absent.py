"""The engine of a gateway without local models: all answers come from upstream tiers."""

from collections.abc import AsyncIterator

from outrider.engine.errors import InvalidAdapterError, TierUnavailableError
from outrider.engine.events import AdapterInfo, EngineEvent, EngineInfo, EngineStats
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.gateway.engines.backends.client import (
    LOADING_REASON,
    OnEnd,
    PausedRequests,
    tell_end,
    until_read,
)
from outrider.verifier.params import Tier


class AbsentEngine:
    """An `EngineClient` with nothing loaded.

    It is ready as soon as it is started, for there is nothing to wait for; every request is refused
    with TierUnavailableError.
    """

    def __init__(self) -> None:
        self._is_started = False

    async def start(self) -> None:
        """Be ready."""
        self._is_started = True

    async def close(self) -> None:
        """Be ready no more."""
        self._is_started = False

    @property
    def is_ready(self) -> bool:
        """True once started."""
        return self._is_started

    @property
    def is_paused(self) -> bool:
        """False: there is no engine that could come back."""
        return False

    @property
    def paused(self) -> PausedRequests:
        """None."""
        return PausedRequests()

    @property
    def not_ready_reason(self) -> str:
        """Message for clients while the engine is not ready."""
        return LOADING_REASON

    async def info(self) -> EngineInfo:
        """Return no tier."""
        return EngineInfo(tiers={}, speculation=False)

    async def submit(
        self, request: EngineRequest, on_end: OnEnd | None = None
    ) -> AsyncIterator[EngineEvent]:
        """Raises TierUnavailableError."""
        tell_end(on_end, request.request_id, None)
        raise TierUnavailableError(
            f"The {request.tier} tier is not loaded: no model runs on this machine."
        )
        yield  # what makes this function a generator, which raises where it is iterated

    async def switch_tier(self, request_id: str, tier: Tier, *, keeps_answer: bool = False) -> None:
        """Do nothing: every id is unknown."""

    async def keep_on_tier(self, request_id: str) -> None:
        """Do nothing: every id is unknown."""

    async def abort(self, request_id: str) -> None:
        """Do nothing: every id is unknown."""

    async def prepare_adapter(self, ref: AdapterRef) -> AdapterInfo:
        """Raises InvalidAdapterError: there is no model to change."""
        raise InvalidAdapterError(f"{ref.name}: no model runs on this machine")

    async def pin(self, request: EngineRequest) -> None:
        """Raises TierUnavailableError."""
        await until_read(self.submit(request))

    async def unpin(self, tenant: str, name: str) -> None:
        """Do nothing: every name is unknown."""

    async def stats(self) -> EngineStats:
        """Return zeros."""
        return EngineStats()
