"""The step times, the host's part and the acceptance of the models that would serve, measured."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine.request import EngineRequest, SamplingParams, SpeculationParams, Tier
from gateway.backends.step_loop import ProgressCallback
from gateway.bench.prompts import built_in_prompts
from gateway.engine_wiring import join, load_runners, measure_budget, named_models
from gateway.plan.curves import MeasuredCurve
from gateway.plan.shapes import ModelShape
from gateway.plan.simulate import Speculation, TierModel

if TYPE_CHECKING:
    from engine.core import Engine
    from engine.runner import ModelRunner
    from engine.step_times import StepTimeCurve
    from gateway.settings import Settings

_NUM_TOKENS: Final = 48
_NUM_TOGETHER: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was found out on this machine. `device` in words; tiers by their names.

    `acceptance`: the chance that a guess is right whose parents are; None without speculation.
    """

    device: str
    shapes: Mapping[Tier, ModelShape]
    tiers: Mapping[Tier, TierModel]
    acceptance: float | None

    @property
    def speculation(self) -> Speculation | None:
        """The guesses as the simulation wants them."""
        return None if self.acceptance is None else Speculation(acceptance=self.acceptance)


def measure(settings: "Settings", on_progress: ProgressCallback) -> Measurement:
    """Load the models and time them: a minute at most for small ones. Raises EngineError."""
    runners = load_runners(settings, on_progress)
    curves = {tier: _curve_of(runner) for tier, runner in runners.items()}
    budget = measure_budget(settings, runners, on_progress)
    engine = join(settings, runners, budget)
    prompts = asyncio.run(_prompts(settings))
    acceptance = _acceptance(engine, prompts) if len(runners) > 1 and budget else None
    any_runner = next(iter(runners.values()))
    return Measurement(
        device=str(any_runner.device),
        shapes={
            tier: ModelShape.of(
                runner.model.config,
                dtype=str(runner.model.dtype).removeprefix("torch."),
                kv_dtype=settings.engine.kv_cache_dtype,
            )
            for tier, runner in runners.items()
        },
        tiers={
            tier: TierModel(
                curve=curves[tier],
                num_kv_tokens=runner.pool.num_blocks * settings.engine.block_size,
                host_s=_host_s(engine, tier, prompts, curves[tier]),
            )
            for tier, runner in runners.items()
        },
        acceptance=acceptance,
    )


def _curve_of(runner: "ModelRunner") -> MeasuredCurve:
    from engine.step_times import profile_step_times

    curve: StepTimeCurve = profile_step_times(runner)
    return MeasuredCurve(
        num_rows=curve.num_rows,
        seconds=curve.seconds,
        context=curve.context,
        row_context_s=curve.row_context_s,
    )


async def _prompts(settings: "Settings") -> dict[Tier, list[tuple[int, ...]]]:
    """The prompts that come with Outrider, in each tier's tokens."""
    from gateway.chat import ChatTokenizer
    from gateway.chat_prompt import chat_prompt
    from gateway.schema.chat import ChatRequest

    prompts: dict[Tier, list[tuple[int, ...]]] = {}
    for tier, path in named_models(settings).items():
        tokenizer = ChatTokenizer.load(path)
        requests = [
            ChatRequest.model_validate({"model": tier, "messages": list(prompt.messages)})
            for prompt in built_in_prompts().prompts
        ]
        prompts[tier] = [(await chat_prompt(request, tokenizer)).token_ids for request in requests]
    return prompts


def _serve(
    engine: "Engine", tier: Tier, prompts: list[tuple[int, ...]], *, speculates: bool
) -> tuple[float, int]:
    """Write `_NUM_TOKENS` tokens behind each prompt, together; seconds and steps behind prefill."""
    for number, token_ids in enumerate(prompts):
        engine.submit(
            EngineRequest(
                request_id=f"plan-{tier}-{speculates}-{number}",
                prompt_token_ids=token_ids,
                tier=tier,
                sampling=SamplingParams(max_tokens=_NUM_TOKENS, min_tokens=_NUM_TOKENS),
                speculation=SpeculationParams(enabled=speculates),
            )
        )
    engine.step()  # the prompts
    begun_s, num_before = time.perf_counter(), engine.stats().num_steps
    while engine.has_work:
        engine.step()
    return time.perf_counter() - begun_s, engine.stats().num_steps - num_before


def _acceptance(engine: "Engine", prompts: Mapping[Tier, list[tuple[int, ...]]]) -> float:
    """Of the small model's first guesses, the share that is right."""
    _serve(engine, "large", prompts["large"][:_NUM_TOGETHER], speculates=True)
    stats = engine.stats()
    accepted, num_drafts = stats.accepted_per_depth, stats.num_drafts
    return min(accepted[0] / num_drafts, 0.99) if accepted and num_drafts else 0.0


def _host_s(
    engine: "Engine",
    tier: Tier,
    prompts: Mapping[Tier, list[tuple[int, ...]]],
    curve: MeasuredCurve,
) -> float:
    """What a step of plain decoding takes beyond its pass."""
    together = prompts[tier][:_NUM_TOGETHER]
    seconds, num_steps = _serve(engine, tier, together, speculates=False)
    context = sum(len(prompt) for prompt in together) / len(together) + _NUM_TOKENS / 2
    return max(seconds / max(num_steps, 1) - curve(len(together), context), 0.0)
