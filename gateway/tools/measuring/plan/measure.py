"""The step times, the host's part and the acceptance of the models that would serve, measured."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from outrider.engine.model.whole_ends import whole_config
from outrider.engine.request import EngineRequest, SpeculationParams
from outrider.gateway.engines.backends.step_loop import LoadingCallback
from outrider.gateway.tools.measuring.bench.prompts import built_in_prompts
from outrider.gateway.tools.measuring.plan.curves import MeasuredCurve
from outrider.gateway.tools.measuring.plan.shapes import ModelSizes
from outrider.gateway.tools.measuring.plan.simulate import GuessedStep, Speculation, TierModel
from outrider.gateway.wiring.checkpoints import named_models
from outrider.gateway.wiring.drafter import measure_budget
from outrider.gateway.wiring.engine import join, load_runners
from outrider.verifier.params import SamplingParams, Tier

if TYPE_CHECKING:
    from outrider.engine.core import Engine
    from outrider.engine.passes.runner import ModelRunner
    from outrider.engine.passes.step_times import StepTimeCurve
    from outrider.gateway.settings.tree import Settings

_NUM_TOKENS: Final = 32
_TOGETHER: Final = (1, 2, 4, 8, 16)
_NUM_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Results of measuring this machine. `device` in words; tiers by their names."""

    device: str
    shapes: Mapping[Tier, ModelSizes]
    tiers: Mapping[Tier, TierModel]
    speculation: Speculation | None


def measure(settings: "Settings", on_progress: LoadingCallback) -> Measurement:
    """Load the models and time them: a minute at most for small ones. Raises EngineError."""
    runners = load_runners(settings, on_progress)
    curves = {tier: _curve_of(runner) for tier, runner in runners.items()}
    budget = measure_budget(settings, runners, on_progress)
    engine = join(settings, runners, budget)
    small = runners.get("small")
    lab = _Lab(
        engine,
        asyncio.run(_prompts(settings)),
        lambda: 0 if small is None else small.times.num_passes,
    )
    plain = {tier: lab.steps(tier, speculates=False) for tier in runners}
    speculation = None
    if len(runners) > 1 and budget is not None:
        guessed = lab.steps("large", speculates=True)
        speculation = Speculation(acceptance=lab.acceptance, measured=guessed)
    any_runner = next(iter(runners.values()))
    return Measurement(
        device=str(any_runner.device),
        shapes={
            tier: ModelSizes.of(
                whole_config(runner.model.config),
                dtype=str(runner.model.dtype).removeprefix("torch."),
                kv_dtype=settings.engine.kv_cache_dtype,
                scheme=settings.models.scheme(tier),
                decodes=settings.models.decodes(tier),
            )
            for tier, runner in runners.items()
        },
        tiers={
            tier: _tier(
                curves[tier], plain[tier], runner.pool.num_blocks * settings.engine.block_size
            )
            for tier, runner in runners.items()
        },
        speculation=speculation,
    )


def _curve_of(runner: "ModelRunner") -> MeasuredCurve:
    from outrider.engine.passes.step_times import profile_step_times

    curve: StepTimeCurve = profile_step_times(runner)
    return MeasuredCurve(
        num_rows=curve.num_rows,
        seconds=curve.seconds,
        context=curve.context,
        row_context_s=curve.row_context_s,
    )


async def _prompts(settings: "Settings") -> dict[Tier, list[tuple[int, ...]]]:
    """The prompts that come with Outrider, in each tier's tokens."""
    from outrider.gateway.answering.jobs.prompts import chat_prompt
    from outrider.gateway.contract.schema.chat import ChatRequest
    from outrider.gateway.wiring.chat_tokenizers import load_chat_tokenizer

    prompts: dict[Tier, list[tuple[int, ...]]] = {}
    for tier, path in named_models(settings).items():
        tokenizer = load_chat_tokenizer(settings, tier, path)
        requests = [
            ChatRequest.model_validate({"model": tier, "messages": list(prompt.messages)})
            for prompt in built_in_prompts().prompts
        ]
        prompts[tier] = [(await chat_prompt(request, tokenizer)).token_ids for request in requests]
    return prompts


def _tier(curve: MeasuredCurve, steps: tuple[GuessedStep, ...], num_kv_tokens: int) -> TierModel:
    """Return a tier fitted to plain steps: time that passes do not explain is the host's."""
    numbers = np.array([step.num_decoding for step in steps])
    left = [step.seconds - curve(int(step.num_decoding), curve.context) for step in steps]
    slope = max(float(np.polyfit(numbers, np.array(left), 1)[0]), 0.0)
    return TierModel(
        curve=curve,
        num_kv_tokens=num_kv_tokens,
        host_s=max(float(np.median(np.array(left) - slope * numbers)), 0.0),
        host_sequence_s=slope,
    )


class _Lab:
    """Has an engine write answers, and looks at its clock."""

    def __init__(
        self,
        engine: "Engine",
        prompts: Mapping[Tier, list[tuple[int, ...]]],
        num_small_passes: Callable[[], int],
    ) -> None:
        """`num_small_passes`: of the small model so far."""
        self._engine = engine
        self._num_small_passes = num_small_passes
        self._prompts = prompts
        self._num_asked = 0

    @property
    def acceptance(self) -> float:
        """Acceptance rate of the small model's first drafted token so far."""
        stats = self._engine.stats()
        if not stats.accepted_per_depth or not stats.num_drafts:
            return 0.0
        return min(stats.accepted_per_depth[0] / stats.num_drafts, 0.99)

    def steps(self, tier: Tier, *, speculates: bool) -> tuple[GuessedStep, ...]:
        """The steps of a tier by how many decode together."""
        return tuple(self._step(tier, number, speculates) for number in _TOGETHER)

    def _step(self, tier: Tier, number: int, speculates: bool) -> GuessedStep:
        """The middle one of many; whatever disturbs the machine disturbs a few of them."""
        engine, seconds = self._engine, []
        num_emitted = num_passes = 0
        for _ in range(_NUM_ROUNDS):
            self._submit(tier, number, speculates)
            engine.step()  # the prompts
            before, passes_before = engine.stats().tiers[tier], self._num_small_passes()
            now = before
            while now.num_running == number:
                begun_s = time.perf_counter()
                engine.step()
                seconds.append(time.perf_counter() - begun_s)
                now = engine.stats().tiers[tier]
            num_emitted += now.num_output_tokens - before.num_output_tokens
            num_passes += self._num_small_passes() - passes_before
            while engine.has_work:
                engine.step()
        num_steps = max(len(seconds), 1)
        return GuessedStep(
            num_decoding=number,
            seconds=float(np.median(seconds)),
            emitted=max(num_emitted / (num_steps * number), 1.0),
            num_small_passes=num_passes / num_steps if speculates else 0.0,
        )

    def _submit(self, tier: Tier, number: int, speculates: bool) -> None:
        """Answers of one length, whatever they say, so that all decode until the end."""
        prompts = self._prompts[tier]
        for _ in range(number):
            self._num_asked += 1
            self._engine.submit(
                EngineRequest(
                    request_id=f"plan-{self._num_asked}",
                    prompt_token_ids=prompts[self._num_asked % len(prompts)],
                    tier=tier,
                    sampling=SamplingParams(max_tokens=_NUM_TOKENS),
                    speculation=SpeculationParams(enabled=speculates, sources=("model",)),
                )
            )
