"""An engine without models, whose answers are there at once: what is left is the gateway's time."""

import asyncio
from collections.abc import AsyncGenerator

from outrider.engine.errors import InvalidAdapterError
from outrider.engine.events import (
    AdapterInfo,
    EngineEvent,
    EngineInfo,
    EngineStats,
    Finished,
    FinishReason,
    PrefillDone,
    RequestStats,
    TierInfo,
    TierWork,
    TokensEmitted,
)
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.gateway.engines.backends.client import OnEnd, PausedRequests, tell_end
from outrider.verifier.params import Tier

_TOKEN_ID = 20
_VOCAB_SIZE = 512
_TOKENS_A_STEP = 4


class MockEngine:
    """An `EngineClient` whose answers have `max_tokens` tokens without delay.

    A step emits four of them, about as many as steps with drafts do.
    """

    def __init__(
        self, tiers: tuple[Tier, ...] = ("small", "large"), *, max_context: int = 8192
    ) -> None:
        self._tiers = tiers
        self._max_context = max_context
        self.is_ready = False

    async def start(self) -> None:
        """There is nothing to load."""
        self.is_ready = True

    async def close(self) -> None:
        """There is nothing to stop."""
        self.is_ready = False

    @property
    def is_paused(self) -> bool:
        """False: it does not restart."""
        return False

    @property
    def paused(self) -> PausedRequests:
        """None."""
        return PausedRequests()

    @property
    def not_ready_reason(self) -> str:
        """The sentence for clients while it is not ready."""
        return "the mock engine was not started"

    async def info(self) -> EngineInfo:
        """Return what it claims to be."""
        tiers = {
            tier: TierInfo(
                tier=tier,
                model_id=f"mock-{tier}",
                path="",
                max_context=self._max_context,
                vocab_size=_VOCAB_SIZE,
                num_parameters=1,
                dtype="float32",
                device="cpu",
            )
            for tier in self._tiers
        }
        return EngineInfo(tiers=tiers, speculation=False)

    async def submit(
        self, request: EngineRequest, on_end: OnEnd | None = None
    ) -> AsyncGenerator[EngineEvent]:
        """Answer at once; other requests have their turn between two tokens."""
        request_id, tier = request.request_id, request.tier
        num_prompt = len(request.prompt_token_ids)
        num_output = 0
        finish_reason: FinishReason = "abort"

        def ended() -> Finished:
            work = TierWork(
                tier=tier,
                num_prompt_tokens=num_prompt,
                num_computed_tokens=num_prompt,
                num_output_tokens=num_output,
                num_steps=num_output,
            )
            stats = RequestStats(
                num_prompt_tokens=num_prompt, num_output_tokens=num_output, work=(work,)
            )
            return Finished(
                request_id=request_id, tier=tier, finish_reason=finish_reason, stats=stats
            )

        try:
            yield PrefillDone(
                request_id=request_id,
                tier=tier,
                num_prompt_tokens=num_prompt,
                num_cached_tokens=0,
                queue_s=0.0,
            )
            while num_output < request.sampling.max_tokens:
                await asyncio.sleep(0)
                num_new = min(_TOKENS_A_STEP, request.sampling.max_tokens - num_output)
                num_output += num_new
                yield TokensEmitted(request_id=request_id, token_ids=(_TOKEN_ID,) * num_new)
            finish_reason = "length"
            last = ended()
            tell_end(on_end, request_id, last)
            yield last
        finally:
            if finish_reason == "abort":
                tell_end(on_end, request_id, ended())

    async def switch_tier(self, request_id: str, tier: Tier, *, keeps_answer: bool = False) -> None:
        """Nothing here is watched."""

    async def keep_on_tier(self, request_id: str) -> None:
        """Nothing here is watched."""

    async def abort(self, request_id: str) -> None:
        """Answers are over before that."""

    async def prepare_adapter(self, ref: AdapterRef) -> AdapterInfo:
        """It has no model."""
        raise InvalidAdapterError(f"{ref.name}: there is no model")

    async def pin(self, request: EngineRequest) -> None:
        """It keeps nothing."""

    async def unpin(self, tenant: str, name: str) -> None:
        """It keeps nothing."""

    async def stats(self) -> EngineStats:
        """It counts nothing."""
        return EngineStats()
