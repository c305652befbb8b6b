"""Turns a validated request into a `Job`: its tier, its tokens, its limits."""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from outrider.engine.events import TierInfo
from outrider.engine.request import EngineRequest, LatencyObjective
from outrider.gateway.answering.jobs.engine_requests import (
    Rendered,
    SharedSettings,
    choice_plans,
    engine_requests,
    escalated_requests,
    escalation_target,
    read_service_tier,
)
from outrider.gateway.answering.jobs.extras import NO_EXTRAS, read_extras
from outrider.gateway.answering.jobs.job import Answer, Job
from outrider.gateway.answering.jobs.judged import judge_options, with_judged
from outrider.gateway.answering.jobs.prompt_heads import MIN_TOKENS, PromptHeads
from outrider.gateway.answering.jobs.prompts import (
    ChatPrompts,
    CompletionPrompts,
    Prompts,
    continues_text,
)
from outrider.gateway.answering.jobs.receipt_terms import receipt_terms
from outrider.gateway.answering.jobs.route_report import describe_route
from outrider.gateway.answering.jobs.routing_parts import RoutingParts
from outrider.gateway.answering.jobs.tier_choice import CandidateTiers, TierChoice, TierChooser
from outrider.gateway.answering.reading.gateway_limits import GatewayLimits
from outrider.gateway.answering.reading.local_models import LocalModels
from outrider.gateway.answering.reading.parsed_request import ApiRequest, RequestContext, permitted
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.prompt_work import PromptSlots, PromptWork
from outrider.gateway.contract.answers.responder import StrongTier, TryNextPlace
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.kinds import ReasoningField
from outrider.gateway.contract.schema.routing import RouteReport
from outrider.gateway.experiments.slo.classes import SloClasses
from outrider.gateway.receipts.signing_keys import SigningKeys
from outrider.gateway.telemetry.spans import record_route
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from outrider.router.guard import GuardOutcome
from outrider.router.watch import WatchPlan
from outrider.verifier.params import Tier, record

# Drawn seeds stay below 2**53, so that every JSON reader gives them back unchanged.
_SEED_BITS: Final = 53


@record(frozen=True, slots=True, kw_only=True)
class BuiltJob:
    """A job, with the prompts and the choice of tier that it was built from."""

    job: Job
    prompts: Prompts
    candidates: CandidateTiers
    choice: TierChoice


@dataclass(slots=True, kw_only=True, eq=False)
class JobBuilder:
    """Turns requests into jobs."""

    models: LocalModels
    tokenizers: Mapping[Tier, ChatTokenizer]
    chooser: TierChooser
    routing: RoutingParts
    limits: GatewayLimits
    classes: SloClasses
    metrics: GatewayMetrics
    clock: Callable[[], float]
    prompt_slots: PromptSlots
    """Threads for long prompts."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Values of sampling fields, by name, for requests that set none."""
    prompt_heads: PromptHeads = field(default_factory=PromptHeads)
    reasoning_field: ReasoningField = "reasoning_content"
    keys: SigningKeys = field(default_factory=partial(SigningKeys, None))
    """They sign receipts."""

    def prompt_work(self, tenant: str) -> PromptWork:
        """Return the way to build a tenant's prompts."""
        return PromptWork(
            slots=self.prompt_slots,
            tenant=tenant,
            max_chars=self.limits.max_prompt_chars,
            json_bounds=self.limits.json_bounds,
            on_held=partial(self.metrics.stages.observe, "prompt"),
        )

    async def build(
        self,
        request: ApiRequest,
        context: RequestContext,
        strong_tier: StrongTier | None = None,
    ) -> BuiltJob:
        """Build the job of a conversation or of prompts.

        `strong_tier` plays the large model's part. Raises GatewayError or EngineError, and
        TryNextPlace where the upstream tier is to answer.
        """
        try:
            return await self._build(request, context, strong_tier)
        except TryNextPlace as signal:
            self._count_hand_off(signal)
            raise

    async def route_report(
        self,
        request: ApiRequest,
        context: RequestContext,
        strong_tier: StrongTier | None = None,
    ) -> RouteReport:
        """Return the request's route; nothing is counted or remembered.

        Raises what the request itself would raise.
        """
        built = await self._build(request, context, strong_tier)
        costs = await self.chooser.costs_usd(built.prompts, built.candidates)
        return describe_route(
            request.model, built.candidates, built.choice, built.job, costs, self.routing
        )

    def _prompts(self, request: ApiRequest, principal: Principal) -> Prompts:
        work = self.prompt_work(principal.tenant)
        if not isinstance(request, ChatRequest):
            return CompletionPrompts(request, self.tokenizers, work)
        memory, salt = self.routing.memory, principal.cache_salt
        return ChatPrompts(request, self.tokenizers, work, memory, salt)

    async def _build(
        self, request: ApiRequest, context: RequestContext, strong_tier: StrongTier | None
    ) -> BuiltJob:
        """Choose a tier and make its job."""
        request = request.with_defaults(self.sampling_defaults)
        prompts = self._prompts(request, context.principal)
        await self.models.until_known()
        named = await self.models.tiers_named(request.model, context.principal.scopes)
        candidates = prompts.able(permitted(context.principal, named, prompts.options.tier))
        chosen_from_s = self.clock()
        info = await self.models.engine_info()
        choice = await self.chooser.choose(
            prompts, candidates, strong_tier, info, context.principal
        )
        self._trace_route(context, choice, chosen_from_s)
        job = await self._assemble(prompts, choice, context, strong_tier)
        return BuiltJob(job=job, prompts=prompts, candidates=candidates, choice=choice)

    def _objective(
        self, request: ApiRequest, num_prompt_tokens: int, context: RequestContext
    ) -> LatencyObjective:
        """Return the request's latency objective. Raises BadRequestError.

        `num_prompt_tokens`: of its longest prompt.
        """
        resolved = self.classes.resolve(
            request.outrider,
            has_tools=isinstance(request, ChatRequest) and bool(request.tools),
            service_tier=request.service_tier,
            num_prompt_tokens=num_prompt_tokens,
            is_arms=context.has_arms_slo,
        )
        if context.meter is not None:
            context.meter.serve_under(resolved.class_name, resolved.objective)
        return resolved.objective

    def _trace_route(self, context: RequestContext, choice: TierChoice, start_s: float) -> None:
        if context.span.is_recording:
            record_route(
                context.span,
                start_s=start_s,
                end_s=self.clock(),
                tier=choice.tier,
                reason=choice.reason,
                quality=None if choice.route is None else choice.route.quality,
            )

    async def _assemble(
        self,
        prompts: Prompts,
        choice: TierChoice,
        context: RequestContext,
        strong_tier: StrongTier | None,
    ) -> Job:
        """Build one engine request for each choice of each prompt."""
        request = prompts.request
        service_tier = read_service_tier(request.service_tier)
        rendered = await prompts.rendered(choice.info)
        if has_extras := request.has_extras:
            rendered = with_judged(request, rendered)
        lengths = [len(prompt.token_ids) for prompt in rendered.prompts]
        if not all(lengths):
            raise BadRequestError("The prompt is empty.")
        plan = _watch_plan(request, choice)
        shared = self._shared_settings(prompts, choice, context, max(lengths), plan)
        requests = engine_requests(request, rendered, shared)
        echoed = await prompts.echoed(rendered.tokenizer)
        escalation = escalated = None
        if plan is not None and choice.escalation is not None:
            other, escalated = await self._escalated(prompts, rendered, choice.escalation, shared)
            escalation = escalation_target(choice.escalation, other)
        num_prompt_tokens = sum(lengths)
        return Job(
            job_id=shared.job_id,
            created=int(time.time()),
            model_id=choice.info.model_id,
            tier=choice.tier,
            reason=choice.reason,
            seed=shared.seed,
            arrival_s=context.arrival_s,
            num_prompt_tokens=num_prompt_tokens,
            choices=choice_plans(rendered, echoed, requests, escalated),
            endpoint=prompts.endpoint,
            tokenizer=rendered.tokenizer,
            num_top_logprobs=request.top_count,
            extras=read_extras(request) if has_extras else NO_EXTRAS,
            receipt=receipt_terms(
                request,
                context,
                (choice.info, choice.escalation, choice.mixed_with),
                self.keys,
            )
            if has_extras
            else None,
            stops=request.stop_strings,
            continues_text=continues_text(request, rendered.tokenizer),
            tools=rendered.tools,
            reasoning_field=self.reasoning_field,
            names_functions=prompts.names_functions,
            grammar_param=rendered.grammar_param,
            schema=rendered.schema,
            quality=None if choice.route is None else choice.route.quality,
            watch=plan,
            escalation=escalation,
            strong_tier=strong_tier if choice.escalates_upstream else None,
            second_looks=self.routing.second_looks if plan and plan.is_explored else None,
            on_answer=None
            if has_extras and judge_options(request)
            else self._learner(prompts, num_prompt_tokens, plan),
            is_bounded=request.token_limit is not None,
            service_tier=None if request.service_tier is None else service_tier.reported,
            arm=context.arm,
        )

    async def _escalated(
        self, prompts: Prompts, rendered: Rendered, info: TierInfo, shared: SharedSettings
    ) -> tuple[Rendered, list[EngineRequest] | None]:
        """Return how a tier that takes answers over reads the prompts.

        With them come its requests, where its tokenizer is another.
        """
        if self.chooser.renders_alike:
            return rendered, None
        other = await prompts.rendered(info)
        return other, escalated_requests(prompts.request, other, shared)

    def _shared_settings(
        self,
        prompts: Prompts,
        choice: TierChoice,
        context: RequestContext,
        num_prompt_tokens: int,
        plan: WatchPlan | None,
    ) -> SharedSettings:
        """Return what the job's engine requests share. Raises BadRequestError.

        `num_prompt_tokens`: of the longest prompt.
        """
        request = prompts.request
        temperature = 1.0 if request.temperature is None else request.temperature
        seed = request.seed
        if seed is None and temperature > 0:
            seed = secrets.randbits(_SEED_BITS)
        infos = (choice.info, choice.escalation)
        return SharedSettings(
            job_id=f"{prompts.id_prefix}-{secrets.token_hex(12)}",
            seed=seed,
            temperature=temperature,
            arrival_s=context.arrival_s,
            default_max_tokens=self.limits.default_max_tokens,
            principal=context.principal,
            arm=context.arm,
            priority=read_service_tier(request.service_tier).priority,
            objective=self._objective(request, num_prompt_tokens, context),
            is_watched=plan is not None,
            wants_hidden_states=plan is not None and plan.wants_hidden_state,
            adapters=tuple(info.adapter for info in infos if info and info.adapter is not None),
        )

    def count(self, built: BuiltJob, context: RequestContext, *, is_private: bool = False) -> None:
        """Count a job that is admitted: in the metrics, for the guard, and among its client's."""
        job, route, parts = built.job, built.choice.route, self.routing
        tokens = job.choices[0].request.prompt_token_ids
        if len(tokens) >= MIN_TOKENS and not is_private:
            principal, agent = context.principal, context.headers.get("user-agent", "")
            self.prompt_heads.note(principal.key_id, principal.tenant, agent, tokens, self.clock())
        self.metrics.routed(job.tier, job.reason)
        if route is not None and route.is_busy:
            self.metrics.routed_busy(job.tier)
        if any(choice.request.adapters for choice in job.choices):
            self.metrics.adapted(built.prompts.request.model)
        parts.typical.num_prompt_tokens.add(job.num_prompt_tokens)
        # A watched answer is reported by its watch.
        if parts.guard and route and route.is_own and not job.watch and route.quality is not None:
            is_strong = job.tier == "large"
            for _ in job.choices:
                parts.guard.saw(GuardOutcome(quality=route.quality, is_strong=is_strong))

    def _count_hand_off(self, signal: TryNextPlace) -> None:
        """Tell the router's guard of requests that leave as well."""
        guard, quality = self.routing.guard, signal.origin.quality
        if guard is not None and signal.is_own and quality is not None:
            guard.saw(GuardOutcome(quality=quality, is_strong=True))

    def _learner(
        self, prompts: Prompts, num_prompt_tokens: int, plan: WatchPlan | None
    ) -> Callable[[Answer], None]:
        """Make a callback that learns an answer's length, its conversation, the watch's worth."""
        parts, clock, dialogue = self.routing, self.clock, prompts.dialogue

        def learn(answer: Answer) -> None:
            parts.typical.num_completion_tokens.add(answer.num_tokens)
            if dialogue is not None:
                dialogue.remember(answer, num_prompt_tokens, clock())
            num_retracted = answer.num_retracted_tokens
            if not answer.escalated or answer.confidence is None or not num_retracted:
                return
            agreement = answer.num_reused_tokens / num_retracted
            if parts.guard is not None:
                parts.guard.saw_escalated(answer.confidence, agreement)
            if plan is not None and plan.on_agreement is not None:
                plan.on_agreement(answer.confidence, agreement)

        return learn


def _watch_plan(request: ApiRequest, choice: TierChoice) -> WatchPlan | None:
    """Return the router's plan to watch the answers, where another tier could take them over."""
    if choice.route is None or (choice.escalation is None and not choice.escalates_upstream):
        return None
    # An answer without tokens cannot be judged: the tier that was chosen gives it.
    return None if request.token_limit == 0 else choice.route.watch
