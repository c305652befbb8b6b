"""The candidate for the models of this gateway's engine, and the parts that it works with."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import msgspec

from outrider.engine.errors import EngineError
from outrider.gateway.answering.candidates.failures import after_failure, is_passing
from outrider.gateway.answering.candidates.fallback import StartTimeout, unbounded
from outrider.gateway.answering.candidates.local_responder import LocalResponder, Writing
from outrider.gateway.answering.candidates.upstream_calls import UpstreamCalls
from outrider.gateway.answering.jobs.job import Job
from outrider.gateway.answering.jobs.jobs import JobBuilder
from outrider.gateway.answering.jobs.preferences import local_outlook
from outrider.gateway.answering.jobs.thinking_budget import ignored_by
from outrider.gateway.answering.reading.local_load import LocalLoad
from outrider.gateway.answering.reading.parsed_request import (
    ApiRequest,
    LocalQuery,
    ParsedRequest,
    without_tier,
)
from outrider.gateway.answering.streaming.generation import Generation
from outrider.gateway.answering.streaming.second_look import shared_tokens
from outrider.gateway.answering.streaming.usage_summary import usage_summary
from outrider.gateway.contract.answers.responder import (
    DraftAnswer,
    Place,
    Responder,
    RouteReason,
    StrongAnswer,
    StrongTier,
    TierOutlook,
)
from outrider.gateway.contract.errors.tree import BudgetError, GatewayError, RateLimitError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.kinds import AUTO
from outrider.gateway.contract.schema.routing import RouteReport
from outrider.gateway.tenancy.metering.local_work import LocalWork
from outrider.gateway.tenancy.metering.meter import RequestMeter
from outrider.gateway.tenancy.metering.reserved_usage import UsageEstimate
from outrider.gateway.tenancy.metering.token_allowance import TokenAllowance
from outrider.gateway.upstream.mirror import MirroredAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParts:
    """The parts that every `LocalCandidate` works with."""

    jobs: JobBuilder
    load: LocalLoad
    """The measured load of the engine."""
    calls: UpstreamCalls
    """Calls of the upstream tiers that answer instead or get copies."""

    def busy_reason(self, parsed: ParsedRequest) -> str | None:
        """Return why these models would answer too late; None where they would not."""
        fleet = self.jobs.models.fleet
        if fleet is not None and fleet.is_asleep:
            fleet.wake(self.jobs.tokenizers)
            return "load: no engine runs; one is being started"
        max_queue_s = self.calls.upstreams.rules.max_queue_s
        busy = None if max_queue_s is None else self.load.queues_longer_than(max_queue_s)
        if busy is None and parsed.constraints.deadline_s is not None:
            busy = self.load.would_miss(parsed.constraints.deadline_s, self.likely_tokens(parsed))
        return busy

    def likely_tokens(self, parsed: ParsedRequest) -> int:
        """Return the likely number of tokens of the answer."""
        typical = round(self.jobs.routing.typical.num_completion_tokens.value)
        return min(parsed.most_tokens(typical), typical)


class LocalCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """This gateway's engine, which may answer one request."""

    place: ClassVar[Place] = "local"
    label: ClassVar[str] = "local models"
    tier: ClassVar[str] = "large"
    """The tier that the engine's models are where the small model is behind a server."""
    parts: LocalParts
    parsed: ParsedRequest
    query: LocalQuery
    strong_tier: StrongTier | None
    """The strong tier gets what is too hard for the local models."""
    start_timeout: StartTimeout

    @property
    def ignored_fields(self) -> Sequence[str]:
        """The client's fields that these models do not get."""
        request = self.query.request
        thinking: tuple[str, ...] = ()
        if isinstance(request, ChatRequest) and request.limits_thinking:
            tokenizers = self.parts.jobs.tokenizers
            named = [each for tier, each in tokenizers.items() if tier == request.model]
            thinking = ignored_by(request, named or tokenizers.values())
        return (*self.parsed.context.ignored_fields, *self.query.ignored_fields, *thinking)

    def expected_s(self) -> float:
        """Return the seconds of an answer; 0 while nothing was measured."""
        return self.parts.load.expected(self.parts.likely_tokens(self.parsed)).total_s

    def outlook(self) -> TierOutlook:
        """Return what may be expected of the large model; what has no price costs nothing."""
        routing = self.parts.jobs.routing
        first_token_s = self.parts.load.expected(1).first_token_s
        return local_outlook("large", first_token_s, routing.prices, routing.typical)

    async def open(self, origin: RouteReason) -> Responder:
        """Make a responder, not yet begun. Raises TryNextPlace where `strong_tier` is to answer."""
        parts, parsed, context = self.parts, self.parsed, self.parsed.context
        upstreams = parts.calls.upstreams
        if upstreams.tiers and "failure" in parsed.falls_back_on:
            parts.jobs.models.require_ready()  # the chain's next model need not wait for a restart
        request, strong_tier = self.query.request, self.strong_tier
        if origin.continues is not None:
            request, strong_tier = self.query.for_rest(parsed.rest_after(origin.continues)), None
        job = await self._admitted_job(request, strong_tier)
        if context.meter is not None and origin.continues is not None:
            context.meter.continued()
        if context.with_trace and parsed.is_streamed:
            job = job.traced()
        ticket = parts.load.admit()
        if job.watch is None:  # a watched answer may be two tiers' work
            ticket = parts.jobs.chooser.loads.admit(job.tier, ticket)
        generation = Generation(
            parts.jobs.models.engine,
            msgspec.structs.replace(job, on_prefill=ticket.began),
            parts.jobs.metrics,
            parts.jobs.clock,
        )
        if context.meter is not None and job.work is not None:
            context.meter.follow_local(job.work, partial(usage_summary, generation, origin))
        return LocalResponder(
            generation,
            Writing(
                is_streamed=parsed.is_streamed,
                with_usage=request.wants_usage_chunk,
                with_running_usage=request.wants_running_usage,
                begins_with_usage=context.begins_with_usage,
                with_trace=context.with_trace,
            ),
            origin,
            ticket,
            on_answered=partial(self._mirror, generation) if self._is_mirrored else None,
            is_continuable=parsed.continues_elsewhere(upstreams.rules),
        )

    async def _admitted_job(self, request: ApiRequest, strong_tier: StrongTier | None) -> Job:
        """Build and reserve a job; with `auto`, a tier whose own limit is used up is passed over.

        Raises RateLimitError or BudgetError.
        """
        parts, context = self.parts, self.parsed.context
        principal = context.principal
        upstream_tier = self.parsed.constraints.upstream_tier
        while True:
            if principal is not context.principal:
                context = msgspec.structs.replace(context, principal=principal)
            built = await parts.jobs.build(request, context, strong_tier)
            try:
                job = await self._admitted(built.job, context.meter, upstream_tier)
                parts.jobs.count(built, context, is_private=self.parsed.constraints.is_private)
                return job
            except (RateLimitError, BudgetError) as error:
                is_named = request.outrider is not None and request.outrider.tier is not None
                if error.tier is None or request.model != AUTO or is_named:
                    raise
                left = without_tier(principal, error.tier, parts.calls.local_tiers)
                if left is None and error.tier != upstream_tier:
                    raise
                if error.tier == upstream_tier:
                    upstream_tier = strong_tier = None
                else:
                    principal = left or principal

    async def _admitted(
        self, job: Job, meter: RequestMeter | None, upstream_tier: str | None
    ) -> Job:
        """Reserve a job. Raises RateLimitError or BudgetError."""
        if meter is None:
            return job
        allowance = await _reserved(meter, job, upstream_tier)
        return msgspec.structs.replace(
            job, allowance=allowance, work=LocalWork(self.parts.jobs.clock)
        )

    @property
    def _is_mirrored(self) -> bool:
        """Return whether it may be copied: requests for this machine only never leave it."""
        wants_local = self.parsed.options.policy == "local_only"
        is_private = self.parsed.constraints.is_private or wants_local
        return self.parts.calls.upstreams.mirror is not None and not is_private

    def _mirror(self, generation: Generation, texts: tuple[str, ...]) -> None:
        """Offer a local answer's request for a second opinion."""
        answer = MirroredAnswer(
            tier=generation.tier,
            texts=texts,
            duration_s=generation.duration_s(),
            num_completion_tokens=sum(c.usage.num_tokens for c in generation.choices),
            is_private=self.parsed.constraints.is_private,
            finish_reason=generation.choices[0].finish_reason,
        )
        self.parts.calls.mirror(self.parsed, answer)

    async def route_report(self, origin: RouteReason) -> RouteReport:
        """Report where a request would go that begins here. Raises TryNextPlace as `open` does."""
        del origin  # the report has the router's own reason
        request, context = self.query.request, self.parsed.context
        return await self.parts.jobs.route_report(request, context, self.strong_tier)

    async def escalate(self, weak: DraftAnswer) -> StrongAnswer | None:
        """Answer instead of a small model whose answer is too weak."""
        opened = partial(self.by_itself().open, weak.origin)
        return await self.parts.calls.strong_answer(self.place, self.parsed, weak, opened)

    def second_opinion(self, kept: DraftAnswer) -> None:
        """Have the large model judge an answer that is kept."""
        context = msgspec.structs.replace(self.parsed.context, meter=None)

        async def look() -> None:
            job = (await self.parts.jobs.build(self.query.request, context)).job
            token_ids = await job.tokenizer.encode_answer(kept.text, 2 * kept.num_tokens)
            share = None
            if token_ids:
                share = await shared_tokens(
                    self.parts.jobs.models.engine, job.choices[0].request, token_ids
                )
            if share is not None:
                kept.agrees(share)

        self.parts.jobs.routing.second_looks.offer(look)

    def may_try_next(self, error: GatewayError | EngineError) -> bool:
        """Return whether another candidate may answer; none accepts what these models refuse."""
        return is_passing(error)

    def after(self, origin: RouteReason, error: Exception) -> RouteReason:
        """Return why the next candidate is tried after this error."""
        return after_failure(origin, self.label, error)

    def by_itself(self) -> "LocalCandidate":
        """Return the candidate without its strong tier, for when that tier has failed."""
        return msgspec.structs.replace(self, strong_tier=None, start_timeout=unbounded)


async def _reserved(
    meter: RequestMeter, job: Job, upstream_tier: str | None
) -> TokenAllowance | None:
    """Reserve the job; `upstream_tier` answers if it is too weak or fails.

    Raises RateLimitError or BudgetError.
    """
    if not meter.principal.is_limited:
        return None
    tiers: list[str] = [job.tier]
    if job.escalation is not None:
        tiers.append(job.escalation.tier)
    if upstream_tier is not None:
        tiers.append(upstream_tier)
    return await meter.admit(
        UsageEstimate(
            tiers=tuple(tiers),
            num_prompt_tokens=job.num_prompt_tokens,
            num_choices=len(job.choices),
            max_tokens=max(c.request.sampling.max_tokens for c in job.choices),
            is_bounded=job.is_bounded,
        )
    )
