"""A small deterministic engine: the backends are tested against it, without models.

A request's k-th token is `sum(prompt_token_ids) + k`, on the small tier `SMALL_SHIFT` more. One
step emits one token for every request. Small answers that may escalate are held at their end. Some
prompts misbehave: they begin with one of the ids below.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.engine.cache.block_news import BlockFeed
from outrider.engine.cache.extents import Extent
from outrider.engine.cache.peers import BlocksWanted
from outrider.engine.errors import (
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    TierUnavailableError,
)
from outrider.engine.events import (
    AnswerHeld,
    EngineEvent,
    EngineInfo,
    EngineStats,
    Finished,
    FinishReason,
    PrefillDone,
    RequestStats,
    TierInfo,
    TierStats,
    TierSwitched,
    TokensEmitted,
)
from outrider.engine.request import EngineRequest
from outrider.engine.sequences.pinned_prompts import PinnedPrompts
from outrider.gateway.engines.backends.seen_work import SeenWork
from outrider.gateway.engines.backends.step_loop import LoadingCallback
from outrider.verifier.params import SamplingParams, Tier

CRASH_IN_STEP = 900_001
WEDGE_IN_STEP = 900_002
EXIT_IN_STEP = 900_003
COMPUTE_IN_STEP = 900_004
REFUSE_TOO_LONG = 900_011
REFUSE_QUEUE_FULL = 900_012
REFUSE_INVALID = 900_013
REFUSE_SWITCH = 900_021

SMALL_SHIFT = 500

MAX_CONTEXT = 4096


@dataclass
class _Running:
    request: EngineRequest
    tier: Tier
    token_ids: list[int] = field(default_factory=list)
    is_new: bool = True
    is_aborted: bool = False
    switch: TierSwitched | None = None
    is_held: bool = False
    stays_on_tier: bool = False
    seen: SeenWork = field(init=False)

    def __post_init__(self) -> None:
        self.seen = SeenWork(self.request)


class ScriptedEngine:
    """See the module's docstring. `step_s` is how long a step takes."""

    def __init__(
        self,
        *,
        step_s: float = 0.0,
        overlaps: bool = False,
        tiers: Sequence[Tier] | None = None,
        model_id: str = "scripted",
        numerics: str = "",
    ) -> None:
        """`tiers`: those that it takes requests of; by default it takes any, and names one."""
        self.tiers = tiers
        self.model_id = model_id
        self.numerics = numerics
        self.running: dict[str, _Running] = {}
        self.overlaps = overlaps
        self.step_s = step_s
        self.num_steps = 0
        self.computed: set[str] = set()
        self.num_idle_steps = 0
        self.num_output_tokens = 0
        self.blocks = BlockFeed()
        self.pins = PinnedPrompts({})

    def export_blocks(self, wanted: BlocksWanted) -> list[Extent] | None:
        return None  # it has none, and never will

    @property
    def has_work(self) -> bool:
        return not all(running.is_held for running in self.running.values())

    def submit(self, request: EngineRequest) -> None:
        match request.prompt_token_ids[0]:
            case 900_011:
                raise PromptTooLongError(num_tokens=9000, max_tokens=5, max_context=MAX_CONTEXT)
            case 900_012:
                raise QueueFullError(num_waiting=7, retry_after_s=3.0)
            case 900_013:
                raise InvalidRequestError("the prompt is invalid")
        self._check_tier(request.tier)
        resumed = request.resumed_token_ids or ()
        running = _Running(request, request.tier, is_new=not resumed)
        running.token_ids.extend(resumed)
        self.running[request.request_id] = running

    def _check_tier(self, tier: Tier) -> None:
        if self.tiers is not None and tier not in self.tiers:
            raise TierUnavailableError(f"tier {tier!r} is not loaded")

    def abort(self, request_id: str) -> None:
        if running := self.running.get(request_id):
            running.is_aborted, running.is_held = True, False

    def keep_on_tier(self, request_id: str) -> None:
        if running := self.running.get(request_id):
            running.stays_on_tier, running.is_held = True, False

    def switch_tier(self, request_id: str, tier: Tier, *, keeps_answer: bool = False) -> None:
        if running := self.running.get(request_id):
            self._check_tier(tier)
            if running.request.prompt_token_ids[0] == REFUSE_SWITCH:
                raise TierUnavailableError("the tier takes nobody")
            running.tier, running.is_new, running.is_held = tier, True, False
            running.switch = TierSwitched(
                request_id=request_id, tier=tier, keeps_answer=keeps_answer
            )
            if not keeps_answer:
                running.token_ids.clear()

    def step(
        self, on_events: object = None, while_busy: Callable[[], None] | None = None
    ) -> list[EngineEvent]:
        if while_busy is not None:
            while_busy()
        if not self.running:
            self.num_idle_steps += 1
            return []
        time.sleep(self.step_s)
        self.num_steps += 1
        events: list[EngineEvent] = []
        for running in [running for running in self.running.values() if not running.is_held]:
            match running.request.prompt_token_ids[0]:
                case 900_001:
                    raise RuntimeError("scripted crash")
                case 900_002:
                    time.sleep(3600)
                case 900_003:
                    os._exit(17)
                case 900_004 if running.request.request_id not in self.computed:
                    self.computed.add(running.request.request_id)
                    ends_s = time.thread_time() + 0.8
                    while time.thread_time() < ends_s:
                        pass
            events += self._advance(running)
        return events

    def _advance(self, running: _Running) -> list[EngineEvent]:
        request, request_id = running.request, running.request.request_id
        events: list[EngineEvent] = []
        if running.is_aborted:
            return [self._finish(running, "abort")]
        if len(running.token_ids) == request.sampling.max_tokens and running.switch is None:
            # It was held and is settled, or it was resumed whole.
            return [self._end(running)]
        if running.switch is not None:
            events.append(running.switch)
            running.seen.add(running.switch)
            running.switch = None
        if running.is_new:
            running.is_new = False
            prefill = PrefillDone(
                request_id=request_id,
                tier=running.tier,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=0,
                queue_s=0.0,
                hidden_state=(0.5, -1.0) if request.return_hidden_state else None,
            )
            events.append(prefill)
            running.seen.add(prefill)
        shift = SMALL_SHIFT if running.tier == "small" else 0
        running.token_ids.append(sum(request.prompt_token_ids) + len(running.token_ids) + shift)
        self.num_output_tokens += 1
        emitted = TokensEmitted(request_id=request_id, token_ids=(running.token_ids[-1],))
        events.append(emitted)
        running.seen.add(emitted)
        if len(running.token_ids) == request.sampling.max_tokens:
            events.append(self._end(running))
        return events

    def _end(self, running: _Running) -> EngineEvent:
        request = running.request
        may_escalate = request.may_escalate and running.tier == "small"
        if not may_escalate or running.stays_on_tier:
            return self._finish(running, "length")
        running.is_held = True
        return AnswerHeld(request_id=request.request_id, finish_reason="length")

    def _finish(self, running: _Running, reason: FinishReason) -> Finished:
        del self.running[running.request.request_id]
        return Finished(
            request_id=running.request.request_id,
            tier=running.tier,
            finish_reason=reason,
            stats=RequestStats(
                num_prompt_tokens=len(running.request.prompt_token_ids),
                num_output_tokens=len(running.token_ids),
                num_steps=len(running.token_ids),
                work=running.seen.stats().work,
            ),
        )

    def stats(self) -> EngineStats:
        tier = TierStats(
            num_running=len(self.running),
            num_blocks=100,
            num_used_blocks=len(self.running),
            num_output_tokens=self.num_output_tokens,
        )
        return EngineStats(tiers={"large": tier}, num_steps=self.num_steps)

    def info(self) -> EngineInfo:
        tiers = {tier: self._tier_info(tier) for tier in self.tiers or ("large",)}
        return EngineInfo(tiers=tiers, speculation=False)

    def _tier_info(self, tier: Tier) -> TierInfo:
        return TierInfo(
            tier=tier,
            model_id=self.model_id,
            path=str(os.getpid()),
            max_context=MAX_CONTEXT,
            vocab_size=1_000_000,
            num_parameters=1,
            dtype="float32",
            device="cpu",
            numerics=self.numerics,
        )


def build(arguments: str, on_progress: LoadingCallback) -> ScriptedEngine:
    """The builder named to the engine process; `arguments` is JSON."""
    options = json.loads(arguments)
    if "fail_once" in options and not os.path.exists(options["fail_once"]):
        with open(options["fail_once"], "w", encoding="utf-8"):
            raise EngineError("the model's folder is empty")
    if "fail_without" in options and not os.path.exists(options["fail_without"]):
        raise EngineError("the model's folder is gone")
    if message := options.get("fail"):
        raise FileNotFoundError(message)
    if options.get("die"):
        os._exit(9)
    on_progress("reading weights", 0.5)
    time.sleep(options.get("load_s", 0.0))
    on_progress("reading weights", 1.0)
    print("a library that prints must not disturb anyone")  # noqa: T201
    return ScriptedEngine(step_s=options.get("step_s", 0.0))


def make_request(
    request_id: str,
    prompt: tuple[int, ...] = (10, 20),
    *,
    max_tokens: int = 5,
    may_escalate: bool = False,
) -> EngineRequest:
    """A request for the scripted engine's large tier, or one that may go there."""
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        tier="small" if may_escalate else "large",
        sampling=SamplingParams(max_tokens=max_tokens),
        may_escalate=may_escalate,
    )
