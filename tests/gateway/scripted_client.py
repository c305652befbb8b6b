"""An EngineClient that emits what a test tells it to, and remembers what was asked of it."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.engine.errors import InvalidAdapterError
from outrider.engine.events import (
    AdapterInfo,
    AnswerHeld,
    EngineEvent,
    EngineInfo,
    EngineStats,
    Failed,
    Finished,
    FinishReason,
    PinInfo,
    PrefillDone,
    RequestStats,
    StoreStats,
    TierInfo,
    TierStats,
    TierSwitched,
    TokensEmitted,
)
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.engine.trace import StepTrace, TokenOrigin
from outrider.gateway.engines.backends.client import OnEnd, PausedRequests, tell_end
from outrider.gateway.engines.backends.seen_work import SeenWork
from outrider.verifier.params import Tier
from outrider.verifier.token_logprobs import PromptLogprobs, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Tokens of one engine step; the first `num_accepted` had been drafted, of `num_drafted`.

    `num_unratified` of them the large model alone would not have chosen; `num_reused` the retracted
    answer held. `logprobs`, where they are asked for: one a token; empty: -0.25 each.
    `trace`, where it is asked for; None: what the numbers say, without a tree.
    """

    token_ids: tuple[int, ...]
    num_drafted: int = 0
    num_accepted: int = 0
    num_unratified: int = 0
    num_predicted: int = 0
    num_reused: int = 0
    logprobs: tuple[float, ...] = ()
    trace: StepTrace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The script of one request.

    `refusal` is raised at once. After the steps: `failure` is sent, or the request hangs until it
    is closed, or it finishes. A small answer that may escalate is held first, until it is settled
    or switched. `gap_s` is waited before each step, `prefill_s` before the first event; `top_ids`
    are offered as alternatives where log-probabilities are asked for.

    `escalated`: how it goes on from the first step after `switch_tier`, whether or not the answer
    is kept; None: the other tier refuses, which settles the answer.
    """

    steps: Sequence[Step] = ()
    finish_reason: FinishReason = "stop"
    refusal: Exception | None = None
    failure: tuple[str, str] | None = None
    hangs: bool = False
    breaks_off: bool = False
    gap_s: float = 0.0
    prefill_s: float = 0.0
    num_cached_tokens: int = 0
    num_restored_tokens: int = 0
    num_pulled_tokens: int = 0
    top_ids: tuple[int, ...] = ()
    hidden_state: tuple[float, ...] | None = None
    escalated: "Script | None" = None


@dataclass(slots=True)
class _Playing:
    """A request in flight. `was_told` wakes it up where it is held or hangs."""

    request: EngineRequest
    tier: Tier
    switch: TierSwitched | None = None
    stays_on_tier: bool = False
    was_told: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class ScriptedClient:
    """Holds no tokens and no model: it plays scripts.

    `switched` holds what `switch_tier` was asked for: (request id, tier, whether the answer stays).
    """

    vocab_size: int
    script: Callable[[EngineRequest], Script]
    max_context: int = 256
    tiers: tuple[Tier, ...] = ("small", "large")
    is_ready: bool = True
    is_paused: bool = False
    paused: PausedRequests = field(default_factory=PausedRequests)
    not_ready_reason: str = "The engine is loading; try again soon."
    start_error: Exception | None = None
    current: EngineStats = field(default_factory=EngineStats)
    submitted: list[EngineRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    switched: list[tuple[str, Tier, bool]] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)
    running: dict[str, _Playing] = field(default_factory=dict)
    was_closed: bool = False
    pinned: list[EngineRequest] = field(default_factory=list)
    prepared: list[AdapterRef] = field(default_factory=list)
    broken_adapters: set[str] = field(default_factory=set)

    async def start(self) -> None:
        if self.start_error is not None:
            self.is_ready = False
            raise self.start_error

    async def close(self) -> None:
        self.was_closed = True

    async def info(self) -> EngineInfo:
        return EngineInfo(
            tiers={tier: self._tier_info(tier) for tier in self.tiers},
            speculation=True,
            drafters=("small",),
        )

    async def submit(
        self, request: EngineRequest, on_end: OnEnd | None = None
    ) -> AsyncGenerator[EngineEvent]:
        self.submitted.append(request)
        script = self.script(request)
        request_id = request.request_id
        if script.refusal is not None:
            tell_end(on_end, request_id, None)
            raise script.refusal
        playing = self.running[request_id] = _Playing(request, request.tier)
        seen = SeenWork(request)
        is_over = False
        try:
            async for event in self._play(playing, script):
                is_over = isinstance(event, Finished | Failed)
                if isinstance(event, Finished | Failed):
                    self.running.pop(request_id, None)
                    event = replace(event, stats=seen.stats())
                    tell_end(on_end, request_id, event)
                else:
                    seen.add(event)
                yield event
        finally:
            self.running.pop(request_id, None)
            if not is_over:
                self.aborted.append(request_id)
                ended = Finished(
                    request_id=request_id,
                    tier=playing.tier,
                    finish_reason="abort",
                    stats=seen.stats(),
                )
                # An engine's last word comes after the iterator was closed.
                loop = asyncio.get_running_loop()
                loop.call_soon(tell_end, on_end, request_id, ended)

    async def switch_tier(self, request_id: str, tier: Tier, *, keeps_answer: bool = False) -> None:
        self.switched.append((request_id, tier, keeps_answer))
        if playing := self.running.get(request_id):
            playing.switch = TierSwitched(
                request_id=request_id, tier=tier, keeps_answer=keeps_answer
            )
            playing.was_told.set()

    async def keep_on_tier(self, request_id: str) -> None:
        self.settled.append(request_id)
        if playing := self.running.get(request_id):
            playing.stays_on_tier = True
            playing.was_told.set()

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def prepare_adapter(self, ref: AdapterRef) -> AdapterInfo:
        self.prepared.append(ref)
        if ref.name in self.broken_adapters:
            raise InvalidAdapterError(f"{ref.folder}: it is broken")
        return AdapterInfo(digest=ref.version, num_bytes=1, max_rank=8, num_modules=2)

    async def pin(self, request: EngineRequest) -> None:
        if (refusal := self.script(request).refusal) is not None:
            raise refusal
        assert request.pin is not None
        await self.unpin(request.tenant, request.pin.name, request.tier)
        pin = PinInfo(
            name=request.pin.name,
            tenant=request.tenant,
            tier=request.tier,
            num_tokens=len(request.prompt_token_ids) // 16 * 16,
            left_s=request.pin.ttl_s,
        )
        self.pinned.append(request)
        self.current = replace(self.current, pins=[*self.current.pins, pin])

    async def unpin(self, tenant: str, name: str, tier: Tier | None = None) -> None:
        left = [
            each
            for each in self.current.pins
            if (each.tenant, each.name) != (tenant, name) or tier not in (None, each.tier)
        ]
        self.current = replace(self.current, pins=left)

    async def stats(self) -> EngineStats:
        return self.current

    async def _play(self, playing: _Playing, script: Script) -> AsyncGenerator[EngineEvent]:
        request, tier = playing.request, playing.tier
        request_id = request.request_id
        num_prompt = len(request.prompt_token_ids)
        await asyncio.sleep(script.prefill_s)
        yield PrefillDone(
            request_id=request_id,
            tier=tier,
            num_prompt_tokens=num_prompt,
            num_cached_tokens=script.num_cached_tokens,
            num_restored_tokens=script.num_restored_tokens,
            num_pulled_tokens=script.num_pulled_tokens,
            queue_s=0.25,
            hidden_state=script.hidden_state if request.return_hidden_state else None,
            numerics=f"scripted-{tier}",
            prompt_logprobs=_prompt_logprobs(request, script),
        )
        for step in script.steps:
            await asyncio.sleep(script.gap_s)
            if _is_leaving(playing, script):
                break
            yield TokensEmitted(
                request_id=request_id,
                token_ids=step.token_ids,
                num_drafted_tokens=step.num_drafted,
                num_accepted_tokens=step.num_accepted,
                num_unratified_tokens=step.num_unratified,
                num_predicted_tokens=step.num_predicted,
                num_reused_tokens=step.num_reused,
                logprobs=self._logprobs(request, script, step),
                trace=(step.trace or _plain_trace(step, tier)) if request.traces else None,
            )
        if script.breaks_off:
            return
        while script.hangs and not _is_leaving(playing, script):
            await _told(playing)
        is_watched = request.may_escalate and tier == "small" and script.failure is None
        if is_watched and not _is_decided(playing):
            yield AnswerHeld(request_id=request_id, finish_reason=script.finish_reason)
            while not _is_decided(playing):
                await _told(playing)
        if _is_leaving(playing, script):
            assert playing.switch is not None
            assert script.escalated is not None
            switch, playing.switch = playing.switch, None
            yield switch
            playing.tier = switch.tier
            async for event in self._play(playing, script.escalated):
                yield event
            return
        if script.failure is not None:
            code, message = script.failure
            yield Failed(request_id=request_id, code=code, message=message)
            return
        yield Finished(
            request_id=request_id,
            tier=tier,
            finish_reason=script.finish_reason,
            stats=RequestStats(num_prompt_tokens=num_prompt),
        )

    def _logprobs(
        self, request: EngineRequest, script: Script, step: Step
    ) -> tuple[TokenLogprobs, ...]:
        if request.sampling.num_logprobs is None:
            return ()
        top = tuple((i, -0.5 * (rank + 1)) for rank, i in enumerate(script.top_ids))
        logprobs = step.logprobs or (-0.25,) * len(step.token_ids)
        return tuple(
            TokenLogprobs(token_id=i, logprob=logprob, top=top[: request.sampling.num_logprobs])
            for i, logprob in zip(step.token_ids, logprobs, strict=True)
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


def _plain_trace(step: Step, tier: Tier) -> StepTrace:
    own: TokenOrigin = "small" if tier == "small" else "target"
    num_own = len(step.token_ids) - step.num_accepted
    return StepTrace(origins=("model",) * step.num_accepted + (own,) * num_own)


def _is_leaving(playing: _Playing, script: Script) -> bool:
    """Return whether the request was switched to a tier that takes it."""
    return playing.switch is not None and script.escalated is not None


def _is_decided(playing: _Playing) -> bool:
    """Return whether a held answer may end, or go."""
    return playing.stays_on_tier or playing.switch is not None


async def _told(playing: _Playing) -> None:
    """Wait for the next command."""
    await playing.was_told.wait()
    playing.was_told.clear()


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
                num_held_newcomers=1,
                num_newcomer_holds=9,
                newcomer_held_s=2.5,
            ),
        },
        num_steps=500,
        step_host_s=1.25,
        step_forward_s=8.5,
        num_drafts=11,
        num_draft_tokens=130,
        num_accepted_tokens=70,
        accepted_per_depth=(40, 30),
        drafted_by_source={"model": (50, 45), "suffix": (20,), "prediction": (16, 15)},
        accepted_by_source={"model": (33, 22), "suffix": (9,), "prediction": (14, 12)},
        num_unratified_tokens=6,
        num_stretched_steps=300,
        stretch_plain_steps=390.0,
        store=StoreStats(
            num_bytes=9000, num_restored_tokens=320, saved_s=4.5, num_damaged=1, num_dropped=12
        ),
    )


def _prompt_logprobs(request: EngineRequest, script: Script) -> tuple[PromptLogprobs, ...]:
    """The n-th token of a prompt has -n / 8, and is the likeliest but two."""
    num_top = request.sampling.num_prompt_logprobs
    if num_top is None:
        return ()
    top = tuple((i, -0.0625 * (rank + 1)) for rank, i in enumerate(script.top_ids))
    return tuple(
        PromptLogprobs(token_id=token_id, logprob=-number / 8, top=top[:num_top], rank=3)
        for number, token_id in enumerate(request.prompt_token_ids[1:], start=1)
    )
