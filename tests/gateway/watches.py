"""Watches that decide as a test says, jobs that are watched, and a clock that jumps."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from outrider.engine.request import EngineRequest
from outrider.gateway.answering.jobs.job import ChoicePlan, EscalationTarget, Job
from outrider.gateway.answering.streaming.delta import Delta
from outrider.gateway.answering.streaming.generation import Generation
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from outrider.router.watch import Action, Judgement, WatchPlan
from outrider.verifier.params import SamplingParams, Tier
from tests.gateway.scripted_client import ScriptedClient

Result = TypeVar("Result")


@dataclass(slots=True)
class PlannedWatch:
    """Says `action` from `at` tokens on (0: at the prompt; None: when it must).

    After a commit it says `escalate` from `continue_at` tokens on.
    """

    action: Action = "commit"
    at: int | None = None
    continue_at: int | None = None
    num_tokens: int = 0
    hidden_state: Sequence[float] | None = None
    asked: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def on_prompt(self, hidden_state: Sequence[float] | None) -> Judgement:
        self.hidden_state = hidden_state
        return self._say("prompt")

    def on_tokens(self, logprobs: Sequence[float]) -> Judgement:
        self.num_tokens += len(logprobs)
        self.logprobs += logprobs
        return self._say("tokens")

    def on_time(self) -> Judgement:
        return self._say("time", must=True)

    def on_end(self) -> Judgement:
        return self._say("end", must=True)

    def _say(self, event: str, *, must: bool = False) -> Judgement:
        self.asked.append(event)
        action: Action = "hold"
        if must or (self.at is not None and self.num_tokens >= self.at):
            action = self.action
        if self.continue_at is not None and self.num_tokens >= self.continue_at:
            action = "escalate"
        return Judgement(action=action, confidence=0.5, reason=f"cascade: {action} at {event}")


def watched_job(
    tokenizer: ChatTokenizer,
    watches: Sequence[PlannedWatch],
    *,
    hold_back_s: float | None = None,
    mid_stream: bool = False,
    other: ChatTokenizer | None = None,
    num_logprobs: int = 0,
    stops: tuple[str, ...] = (),
    **fields: Any,
) -> Job:
    """One choice for each watch, begun on the small tier. `other`: the large tier's tokenizer."""
    plans = []
    for index in range(len(watches)):
        sampling = SamplingParams(
            max_tokens=100,
            choice_index=index,
            stop_token_ids=tokenizer.stop_token_ids,
            num_logprobs=num_logprobs,
        )
        request = EngineRequest(
            request_id=f"r-{index}",
            prompt_token_ids=(5, 6),
            tier="small",
            sampling=sampling,
            return_hidden_state=True,
            may_escalate=True,
        )
        escalated = None
        if other is not None:
            escalated = replace(
                request,
                request_id=f"r-{index}-large",
                tier="large",
                sampling=replace(sampling, stop_token_ids=other.stop_token_ids),
                return_hidden_state=False,
                may_escalate=False,
            )
        plans.append(ChoicePlan(request=request, escalated=escalated))
    waiting = iter(watches)
    target = EscalationTarget(
        model_id="test/large-model", tokenizer=other or tokenizer, tools=fields.get("tools")
    )
    return Job(
        job_id="job",
        created=0,
        model_id="test/small-model",
        tier="small",
        reason="router: unsure (0.55)",
        seed=None,
        arrival_s=0.0,
        num_prompt_tokens=2,
        choices=tuple(plans),
        tokenizer=tokenizer,
        stops=stops,
        quality=0.55,
        watch=WatchPlan(
            new_watch=lambda: next(waiting), hold_back_s=hold_back_s, mid_stream=mid_stream
        ),
        escalation=target,
        **fields,
    )


def unwatched(job: Job, tier: Tier) -> Job:
    """The same request, as it would have been served by one tier alone."""
    target = job.escalation
    assert target is not None
    reader = job if tier == "small" else target
    plans = tuple(
        msgspec.structs.replace(
            plan,
            request=replace(
                (tier == "large" and plan.escalated) or plan.request, tier=tier, may_escalate=False
            ),
            escalated=None,
        )
        for plan in job.choices
    )
    return msgspec.structs.replace(
        job,
        tier=tier,
        choices=plans,
        tokenizer=reader.tokenizer,
        tools=reader.tools,
        watch=None,
        escalation=None,
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The deltas that a client got, each with its time."""

    generation: Generation
    deltas: list[Delta]
    times_s: list[float]
    error: Exception | None = None

    def content(self, index: int = 0) -> list[tuple[str, int, str]]:
        """(kind, call, text) of a choice, runs of a kind joined: however they were cut."""
        runs: list[tuple[str, int, str]] = []
        for delta in self.deltas:
            if delta.index != index or not delta.text:
                continue
            if runs and runs[-1][:2] == (delta.kind, delta.call_index):
                runs[-1] = (delta.kind, delta.call_index, runs[-1][2] + delta.text)
            else:
                runs.append((delta.kind, delta.call_index, delta.text))
        return runs

    def text(self, index: int = 0) -> str:
        """The content of a choice."""
        return "".join(text for kind, _, text in self.content(index) if kind == "content")

    def pieces(self, index: int = 0) -> list[tuple[str, bool]]:
        """The text of a choice by token, and which were drafted."""
        return [piece for d in self.deltas if d.index == index for piece in d.pieces]

    def logprobs(self, index: int = 0) -> list[int]:
        """The tokens whose log-probabilities came."""
        return [entry.token_id for d in self.deltas if d.index == index for entry in d.logprobs]

    def ends(self, index: int = 0) -> list[str]:
        """The finish reasons that came: there must be exactly one."""
        return [d.finish_reason for d in self.deltas if d.index == index and d.finish_reason]


def collect(
    engine: ScriptedClient, job: Job, metrics: GatewayMetrics | None = None, *, take: int = 10**6
) -> Outcome:
    """Run a job to its end, or hang up after `take` deltas; time stands still but for sleeps."""

    async def main() -> Outcome:
        clock = asyncio.get_running_loop().time
        generation = Generation(engine, job, metrics or GatewayMetrics(), clock)
        outcome = Outcome(generation, [], [])
        try:
            with generation:
                async with aclosing(generation.steps()) as steps:
                    while len(outcome.deltas) < take:
                        step = await anext(steps, None)
                        if step is None:
                            break
                        outcome.deltas.extend(step)
                        outcome.times_s.extend(clock() for _ in step)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            outcome = replace(outcome, error=error)
        assert len(asyncio.all_tasks()) == 1, "a task was left behind"
        return outcome

    return run_virtually(main())


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """Run with a clock that jumps to the next timer whenever nothing is left to do."""
    with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
        return runner.run(main)


class _JumpingSelector(selectors.SelectSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits, and nothing will ever happen"
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def letters(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Token ids of a text, no token longer than a character, so that it can be cut anywhere."""
    return [token_id for char in text for token_id in encode(char)]
