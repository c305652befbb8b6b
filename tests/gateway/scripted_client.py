"""An EngineClient that emits what a test tells it to, and remembers what was asked of it."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from engine.events import (
    EngineEvent,
    EngineInfo,
    EngineStats,
    Failed,
    Finished,
    FinishReason,
    PrefillDone,
    RequestStats,
    TierInfo,
    TierStats,
    TokenLogprobs,
    TokensEmitted,
)
from engine.request import EngineRequest, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Tokens of one engine step; the first `num_accepted` had been drafted, of `num_drafted`.

    `num_unratified` of them the large model alone would not have chosen.
    """

    token_ids: tuple[int, ...]
    num_drafted: int = 0
    num_accepted: int = 0
    num_unratified: int = 0
    num_predicted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How one request goes.

    `refusal` is raised at once. After the steps: `failure` is sent, or the request hangs until it
    is closed, or it finishes. `gap_s` is waited before each step; `top_ids` are offered as
    alternatives where log-probabilities are asked for.
    """

    steps: Sequence[Step] = ()
    finish_reason: FinishReason = "stop"
    refusal: Exception | None = None
    failure: tuple[str, str] | None = None
    hangs: bool = False
    breaks_off: bool = False
    gap_s: float = 0.0
    num_cached_tokens: int = 0
    top_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class ScriptedClient:
    """Holds no tokens and no model: it plays scripts."""

    vocab_size: int
    script: Callable[[EngineRequest], Script]
    max_context: int = 256
    tiers: tuple[Tier, ...] = ("small", "large")
    is_ready: bool = True
    start_error: Exception | None = None
    current: EngineStats = field(default_factory=EngineStats)
    submitted: list[EngineRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    was_closed: bool = False

    async def start(self) -> None:
        if self.start_error is not None:
            self.is_ready = False
            raise self.start_error

    async def close(self) -> None:
        self.was_closed = True

    async def info(self) -> EngineInfo:
        return EngineInfo(
            tiers={tier: self._tier_info(tier) for tier in self.tiers}, speculation=True
        )

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent]:
        self.submitted.append(request)
        script = self.script(request)
        if script.refusal is not None:
            raise script.refusal
        self.running.add(request.request_id)
        is_over = False
        try:
            async for event in self._play(request, script):
                is_over = isinstance(event, Finished | Failed)
                if is_over:
                    self.running.discard(request.request_id)
                yield event
        finally:
            self.running.discard(request.request_id)
            if not is_over:
                self.aborted.append(request.request_id)

    async def switch_tier(self, request_id: str, tier: Tier) -> None:
        raise NotImplementedError

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def stats(self) -> EngineStats:
        return self.current

    async def _play(self, request: EngineRequest, script: Script) -> AsyncGenerator[EngineEvent]:
        request_id = request.request_id
        num_prompt = len(request.prompt_token_ids)
        yield PrefillDone(
            request_id=request_id,
            tier=request.tier,
            num_prompt_tokens=num_prompt,
            num_cached_tokens=script.num_cached_tokens,
            queue_s=0.25,
        )
        for step in script.steps:
            await asyncio.sleep(script.gap_s)
            yield TokensEmitted(
                request_id=request_id,
                token_ids=step.token_ids,
                num_drafted_tokens=step.num_drafted,
                num_accepted_tokens=step.num_accepted,
                num_unratified_tokens=step.num_unratified,
                num_predicted_tokens=step.num_predicted,
                logprobs=self._logprobs(request, script, step),
            )
        if script.hangs:
            await asyncio.Event().wait()
        if script.breaks_off:
            return
        if script.failure is not None:
            code, message = script.failure
            yield Failed(request_id=request_id, code=code, message=message)
            return
        yield Finished(
            request_id=request_id,
            tier=request.tier,
            finish_reason=script.finish_reason,
            stats=RequestStats(num_prompt_tokens=num_prompt),
        )

    def _logprobs(
        self, request: EngineRequest, script: Script, step: Step
    ) -> tuple[TokenLogprobs, ...]:
        if request.sampling.num_logprobs is None:
            return ()
        top = tuple((i, -0.5 * (rank + 1)) for rank, i in enumerate(script.top_ids))
        return tuple(
            TokenLogprobs(token_id=i, logprob=-0.25, top=top[: request.sampling.num_logprobs])
            for i in step.token_ids
        )

    def _tier_info(self, tier: Tier) -> TierInfo:
        return TierInfo(
            tier=tier,
            model_id=f"test/{tier}-model",
            path=f"/nowhere/{tier}",
            max_context=self.max_context,
            vocab_size=self.vocab_size,
            num_parameters=1000,
            dtype="float32",
            device="cpu",
        )


def some_stats() -> EngineStats:
    """Numbers that are all different, so that a mix-up shows."""
    return EngineStats(
        tiers={
            "small": TierStats(num_running=1, num_waiting=2, num_blocks=8, num_used_blocks=2),
            "large": TierStats(
                num_running=3,
                num_waiting=4,
                num_blocks=10,
                num_used_blocks=5,
                prefix_cache_queries=60,
                prefix_cache_hits=48,
                num_preemptions=7,
            ),
        },
        num_drafts=11,
        num_draft_tokens=130,
        num_accepted_tokens=70,
        accepted_per_depth=(40, 30),
        drafted_by_source={"model": (50, 45), "suffix": (20,), "prediction": (16, 15)},
        accepted_by_source={"model": (33, 22), "suffix": (9,), "prediction": (14, 12)},
        num_unratified_tokens=6,
    )
