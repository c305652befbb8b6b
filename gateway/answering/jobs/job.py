"""An API request, ready for the engine: its engine requests, how to read them, and their watch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from outrider.engine.cache.block_pool import PRIVATE_SALT
from outrider.engine.errors import PromptTooLongError
from outrider.engine.events import TierInfo
from outrider.engine.request import (
    HIGH,
    LOW,
    NO_OBJECTIVE,
    NORMAL,
    AdapterRef,
    EngineRequest,
    GrammarSpec,
    LatencyObjective,
    SpeculationParams,
)
from outrider.gateway.answering.jobs.extras import (
    NO_EXTRAS,
    Extras,
    check_scores,
    wanted_prompt_logprobs,
)
from outrider.gateway.answering.jobs.second_looks import SecondLooks
from outrider.gateway.answering.reading.parsed_request import ApiRequest
from outrider.gateway.answering.text.answer_schema import AnswerSchema
from outrider.gateway.answering.text.chat import ChatTokenizer, Prompt
from outrider.gateway.answering.text.tool_parser import ToolReading
from outrider.gateway.contract.answers.responder import StrongTier
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.common import OutriderOptions
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.contract.schema.responses import ReportedServiceTier
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.metering.local_work import LocalWork
from outrider.gateway.tenancy.metering.token_allowance import TokenAllowance
from outrider.router.watch import WatchPlan
from outrider.verifier.params import CascadeParams, SamplingParams, ThinkingBudget, Tier

_USUAL_SPECULATION: Final = SpeculationParams()


class ChoicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One choice to generate."""

    request: EngineRequest
    opens_thinking: bool = False
    """Its prompt ends inside a thinking block."""
    prompt_text: str = ""
    """The text that it begins with, where it echoes its prompt."""
    escalated: EngineRequest | None = None
    """Where the large tier has another tokenizer, the same choice for that one, under another
    `request_id`. None where the sequence itself can move to the large tier."""


class EscalationTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The tier that takes a weak answer over, and how its answer is read (see `Job`).

    With the same tokenizer, `tokenizer` and `tools` are the job's own.
    """

    model_id: str
    tokenizer: ChatTokenizer
    tier: Tier = "large"
    tools: ToolReading | None = None
    opens_thinking: bool = False
    """The prompt ends inside a thinking block, as this tier's template writes it."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A choice that ended by itself, for the parts that learn from answers."""

    tier: Tier
    text: str
    """Content without thinking and calls."""
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments), in order."""
    escalated: bool = False
    confidence: float | None = None
    """The watch's last one; None without a watch."""
    num_tokens: int = 0
    num_retracted_tokens: int = 0
    """Tokens of the small model that were not delivered."""
    num_reused_tokens: int = 0
    """Those of them that the large answer had at the same places."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """An API request, ready for the engine: what to generate and how to read it.

    Raises ValueError for a watch without a tier to escalate to.
    """

    job_id: str
    created: int
    """Seconds since 1970, for the response."""
    model_id: str
    """The checkpoint that it begins on."""
    tier: Tier
    """The tier that it begins on."""
    reason: str
    """Why that tier, in one line."""
    seed: int | None
    """The one that is reported."""
    arrival_s: float
    """On the gateway's clock."""
    num_prompt_tokens: int
    """Each prompt counts once, however many choices it has."""
    choices: tuple[ChoicePlan, ...]
    tokenizer: ChatTokenizer
    endpoint: Endpoint = "chat"
    """Gives the response its form."""
    num_top_logprobs: int | None = None
    """Alternatives to write beside each token; None: no log-probabilities at all."""
    extras: Extras = NO_EXTRAS
    stops: tuple[str, ...] = ()
    continues_text: bool = False
    """The answer goes on with the prompt's own text, so no thinking begins it."""
    tools: ToolReading | None = None
    """The rules for reading calls, where there may be some."""
    grammar_param: str | None = None
    """The field that brought a grammar."""
    schema: AnswerSchema | None = None
    """What a whole answer is checked against."""
    second_looks: SecondLooks | None = None
    """Has the large model judge the small one's answer, though it may be kept."""
    quality: float | None = None
    """The predicted quality of the small answer; None if the router did not judge."""
    watch: WatchPlan | None = None
    """The watch of the small answers. Their requests say `may_escalate` and have log-probabilities.

    With it goes one of `escalation` and `strong_tier`."""
    escalation: EscalationTarget | None = None
    strong_tier: StrongTier | None = None
    """An upstream tier in the large model's part; there is one choice then."""
    on_prefill: Callable[[float], None] | None = None
    """Called with the seconds that a choice queued; must not block."""
    on_answer: Callable[[Answer], None] | None = None
    """Called once for each choice that ended by itself; must not block."""
    is_bounded: bool = False
    """The client has set the answer's length."""
    service_tier: ReportedServiceTier | None = None
    """The one named in the response, where the request named one."""
    arm: str = ""
    """The arms of experiments, as text."""
    allowance: TokenAllowance | None = None
    """The tokens that its tenant has left for it; None where they are not counted."""
    work: LocalWork | None = None
    """Receives the engine's account of what it did."""

    def traced(self) -> "Job":
        """Return the same job with the engine telling where each token came from."""
        return msgspec.structs.replace(self, choices=tuple(map(_traced, self.choices)))

    def __post_init__(self) -> None:
        if self.watch is not None and self.escalation is None and self.strong_tier is None:
            raise ValueError("a job with a watch needs an escalation target")


def _traced(plan: ChoicePlan) -> ChoicePlan:
    escalated = None if plan.escalated is None else replace(plan.escalated, traces=True)
    request = replace(plan.request, traces=True)
    return msgspec.structs.replace(plan, request=request, escalated=escalated)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTier:
    """A request's priority, by its `service_tier`."""

    priority: int
    """The queue's."""
    reported: ReportedServiceTier
    """The response's `service_tier`."""


_DEFAULT: Final = ServiceTier(priority=NORMAL, reported="default")
_TIERS: Final = {
    None: _DEFAULT,
    "auto": _DEFAULT,
    "default": _DEFAULT,
    "priority": ServiceTier(priority=HIGH, reported="priority"),
    "flex": ServiceTier(priority=LOW, reported="flex"),
}


def read_service_tier(value: object) -> ServiceTier:
    """Read the requested tier. Raises BadRequestError for one that is not known."""
    if value is None or isinstance(value, str):
        tier = _TIERS.get(value)
        if tier is not None:
            return tier
    known = ", ".join(repr(name) for name in _TIERS if name)
    raise BadRequestError(f"service_tier: must be null or one of {known}.", param="service_tier")


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """A request as one tier reads it: its prompts, and the facts known of the answers."""

    info: TierInfo
    tokenizer: ChatTokenizer
    prompts: tuple[Prompt, ...]
    prediction: tuple[int, ...] = ()
    """The client's guess at the answer."""
    grammar: GrammarSpec | None = None
    grammar_param: str | None = None
    """The field of the request that gives the answer its grammar."""
    schema: AnswerSchema | None = None
    """What a whole answer is checked against."""
    tools: ToolReading | None = None
    """The rules for reading calls."""
    thinking: ThinkingBudget | None = None
    """How long the answer may think."""


class EngineRequestDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that the engine requests of one job share, for any tier."""

    job_id: str
    seed: int
    temperature: float
    arrival_s: float
    default_max_tokens: int | None
    principal: Principal
    arm: str = ""
    priority: int = 0
    """The queue's (`read_service_tier`)."""
    objective: LatencyObjective = NO_OBJECTIVE
    """The one that the queue keeps to."""
    watch: bool | None = None
    """True if the watch wants hidden states; None if the answers are not watched."""
    adapters: tuple[AdapterRef, ...] = ()
    """The adapters of the tiers that may answer."""


def engine_requests(
    request: ApiRequest, rendered: Rendered, frame: EngineRequestDefaults
) -> list[EngineRequest]:
    """Build one for each choice of each prompt. Raises BadRequestError or PromptTooLongError."""
    num_choices = request.n or 1
    if request.has_extras:
        check_scores(request, [len(prompt.token_ids) for prompt in rendered.prompts])
    made = []
    for prompt_index, prompt in enumerate(rendered.prompts):
        group_id = f"{frame.job_id}-{prompt_index}"
        sampling = _sampling(request, rendered, len(prompt.token_ids), frame)
        for choice_index in range(num_choices):
            params = sampling(choice_index)
            engine_request = EngineRequest(
                request_id=f"{group_id}-{choice_index}",
                prompt_token_ids=prompt.token_ids,
                tier=rendered.info.tier,
                sampling=params,
                speculation=_speculation(request.outrider),
                cascade=cascade_params(request.outrider),
                group_id=group_id if num_choices > 1 else None,
                arrival_s=frame.arrival_s,
                prediction_token_ids=rendered.prediction[: params.max_tokens],
                grammar=rendered.grammar,
                return_hidden_state=bool(frame.watch),
                may_escalate=frame.watch is not None,
                cache_salt=_cache_salt(request, frame.principal),
                memory_group=frame.arm,
                tenant=frame.principal.tenant,
                weight=frame.principal.weight,
                priority=frame.priority,
                objective=frame.objective,
                adapters=frame.adapters,
            )
            _check_combination(request, engine_request)
            made.append(engine_request)
    return made


def _cache_salt(request: ApiRequest, principal: Principal) -> str:
    """Return what separates the request's prefix cache: by tenant, and private texts from others.

    News of a cache may be published (engine.kv_events); those of private texts are not.
    """
    is_private = request.outrider is not None and request.outrider.privacy == "private"
    return PRIVATE_SALT + principal.cache_salt if is_private else principal.cache_salt


def escalated_requests(
    request: ApiRequest, rendered: Rendered, frame: EngineRequestDefaults
) -> list[EngineRequest]:
    """Build the same choices for a tier with another tokenizer, under ids of their own."""
    job_id = f"{frame.job_id}-{rendered.info.tier}"
    other = msgspec.structs.replace(frame, job_id=job_id, watch=None)
    return engine_requests(request, rendered, other)


def _sampling(
    request: ApiRequest, rendered: Rendered, num_prompt_tokens: int, frame: EngineRequestDefaults
) -> Callable[[int], SamplingParams]:
    """Return the sampling parameters by choice. Raises PromptTooLongError."""
    min_tokens = request.min_tokens or 0
    max_tokens = _max_tokens(request, num_prompt_tokens, rendered.info, frame.default_max_tokens)
    stop_token_ids = _stop_token_ids(request, rendered)
    logit_bias = _logit_bias(request, rendered.info)
    num_scores = wanted_prompt_logprobs(request)[0] if request.has_extras else None
    num_logprobs = request.top_count
    if num_logprobs is None and frame.watch is not None:
        num_logprobs = 0  # the watch's; the client does not get to see them

    def of_choice(choice_index: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=frame.temperature,
            top_k=max(request.top_k or 0, 0),
            top_p=1.0 if request.top_p is None else request.top_p,
            min_p=request.min_p or 0.0,
            seed=frame.seed % 2**64,
            choice_index=choice_index,
            stop_token_ids=stop_token_ids,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_scores,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=request.repetition_penalty or 1.0,
            logit_bias=logit_bias,
            min_tokens=min_tokens,
            thinking=rendered.thinking,
        )

    return of_choice


def _max_tokens(
    request: ApiRequest, num_prompt_tokens: int, info: TierInfo, default_max_tokens: int | None
) -> int:
    """The request's own limit, or the room left in the context, up to the default.

    With `outrider.fit_context` every limit is cut to the room that the context leaves. Raises
    PromptTooLongError, and BadRequestError where less than `min_tokens` is allowed.
    """
    limit, min_tokens, max_context = request.token_limit, request.min_tokens or 0, info.max_context
    room = max_context - num_prompt_tokens
    default = max(default_max_tokens or room, min_tokens)
    wanted = max(1, min(default, room)) if limit is None else limit
    if wanted and request.outrider is not None and request.outrider.fit_context:
        wanted = max(1, min(wanted, room))
    if wanted > room:
        raise PromptTooLongError(
            num_tokens=num_prompt_tokens, max_tokens=wanted, max_context=max_context
        )
    if min_tokens > wanted:
        limited_by = (
            "max_tokens" if limit is not None else f"the rest of the context of {max_context}"
        )
        raise BadRequestError(
            f"min_tokens: {min_tokens} is more than {limited_by} ({wanted}).", param="min_tokens"
        )
    return wanted


def check_token_ids(token_ids: Iterable[int], info: TierInfo, *, param: str = "prompt") -> None:
    """Raise BadRequestError for an id outside of a tier's vocabulary."""
    largest = max(token_ids, default=0)
    if largest >= info.vocab_size:
        raise BadRequestError(
            f"{param}: token id {largest} is outside the vocabulary of the {info.tier} "
            f"tier ({info.vocab_size} ids).",
            param=param,
        )


def _stop_token_ids(request: ApiRequest, rendered: Rendered) -> tuple[int, ...]:
    """The tokenizer's own and the request's. Raises BadRequestError outside the vocabulary."""
    own = request.stop_token_ids or []
    check_token_ids(own, rendered.info, param="stop_token_ids")
    ends = () if request.ignore_eos else rendered.tokenizer.stop_token_ids
    return tuple(dict.fromkeys((*ends, *own)))


def _logit_bias(request: ApiRequest, info: TierInfo) -> tuple[tuple[int, float], ...]:
    """The pairs (token id, bias). Raises BadRequestError outside the vocabulary."""
    biases = {int(token): float(bias) for token, bias in (request.logit_bias or {}).items()}
    check_token_ids(biases, info, param="logit_bias")
    return tuple(biases.items())


def _check_combination(request: ApiRequest, engine_request: EngineRequest) -> None:
    """Refuse options that contradict each other: a grammar may allow nothing but the end."""
    if engine_request.grammar is None:
        return
    for param, is_set in (("min_tokens", request.min_tokens), ("ignore_eos", request.ignore_eos)):
        if is_set:
            raise BadRequestError(
                f"{param}: not supported together with a grammar (response_format, tools or "
                "structured_outputs).",
                param=param,
            )


def _speculation(options: OutriderOptions | None) -> SpeculationParams:
    if options is None:
        return _USUAL_SPECULATION
    inter_token_ms = None if options.slo is None else options.slo.inter_token_ms
    return SpeculationParams(
        enabled=options.speculation != "off",
        max_draft_nodes=options.max_draft_nodes,
        max_draft_depth=options.max_draft_depth,
        sources=None if options.sources is None else tuple(dict.fromkeys(options.sources)),
        inter_token_s=None if inter_token_ms is None else inter_token_ms / 1000,
    )


def cascade_params(options: OutriderOptions | None) -> CascadeParams | None:
    """Return the speculative cascade that was asked for; None: lossless."""
    quality = None if options is None else options.quality
    if quality is None or quality == "lossless":
        return None
    return CascadeParams(alpha=quality.cascade, rule=quality.rule or "opt")
