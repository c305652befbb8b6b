"""Builds the engine requests of a job: one for each choice of each prompt."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

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
    Verification,
)
from outrider.gateway.answering.jobs.extras import (
    check_scores,
    wanted_prompt_logprobs,
)
from outrider.gateway.answering.jobs.job import ChoicePlan, EscalationTarget
from outrider.gateway.answering.reading.parsed_request import ApiRequest
from outrider.gateway.answering.text.answer_schema import AnswerSchema
from outrider.gateway.answering.text.chat import ChatTokenizer, Prompt
from outrider.gateway.answering.text.tool_parser import ToolReading
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.common import CascadeQuality, OutriderOptions
from outrider.gateway.contract.schema.responses import ReportedServiceTier
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.verifier.params import CascadeParams, SamplingParams, ThinkingBudget

_DAY_S: Final = 86_400.0
_USUAL_S: Final = 300.0
_TTLS: Final = {"5m": _USUAL_S, "30m": 1800.0, "1h": 3600.0, "24h": _DAY_S}
_USUAL_SPECULATION: Final = SpeculationParams()


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
    """The JSON schema that a whole answer has to conform to."""
    tools: ToolReading | None = None
    """The rules for reading calls."""
    ends: tuple[int, ...] = ()
    """Tokens that end the answer beside the tokenizer's own."""
    thinking: ThinkingBudget | None = None
    """How long the answer may think."""
    verification: Verification | None = None
    """The prompts end with an answer, which is judged."""


class SharedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What all engine requests of one job have in common, for any tier."""

    job_id: str
    seed: int | None
    """None where no token is drawn and the request names none."""
    temperature: float
    arrival_s: float
    default_max_tokens: int | None
    principal: Principal
    arm: str = ""
    priority: int = 0
    """The queue's (`read_service_tier`)."""
    objective: LatencyObjective = NO_OBJECTIVE
    """The one that the queue keeps to."""
    is_watched: bool = False
    """The small model's answers are watched, and may escalate."""
    wants_hidden_states: bool = False
    """The watch reads the last prompt token's."""
    adapters: tuple[AdapterRef, ...] = ()
    """The adapters of the tiers that may answer."""


def engine_requests(
    request: ApiRequest, rendered: Rendered, shared: SharedSettings
) -> list[EngineRequest]:
    """Build one for each choice of each prompt. Raises BadRequestError or PromptTooLongError."""
    num_choices = request.n or 1
    if request.has_extras:
        check_scores(request, [len(prompt.token_ids) for prompt in rendered.prompts])
    made = []
    for prompt_index, prompt in enumerate(rendered.prompts):
        group_id = f"{shared.job_id}-{prompt_index}"
        sampling = _sampling(request, rendered, len(prompt.token_ids), shared)
        for choice_index in range(num_choices):
            params = sampling(choice_index)
            engine_request = EngineRequest(
                request_id=f"{group_id}-{choice_index}",
                prompt_token_ids=prompt.token_ids,
                tier=rendered.info.tier,
                sampling=params,
                speculation=_speculation(request.outrider),
                cascade=None
                if request.outrider is None
                else cascade_params(request.outrider.quality),
                group_id=group_id if num_choices > 1 else None,
                arrival_s=shared.arrival_s,
                prediction_token_ids=rendered.prediction[: params.max_tokens],
                grammar=rendered.grammar,
                return_hidden_state=shared.wants_hidden_states,
                may_escalate=shared.is_watched,
                cache_salt=_cache_salt(request, shared.principal),
                memory_group=shared.arm,
                tenant=shared.principal.tenant,
                weight=shared.principal.weight,
                priority=shared.priority,
                objective=shared.objective,
                adapters=shared.adapters,
                verification=rendered.verification,
                retention_s=retention_s(request),
            )
            _check_combination(request, engine_request)
            made.append(engine_request)
    return made


def choice_plans(
    rendered: Rendered,
    prompt_texts: Sequence[str],
    requests: Sequence[EngineRequest],
    escalated: Sequence[EngineRequest] | None,
) -> tuple[ChoicePlan, ...]:
    """Return the plan of each choice of each prompt.

    `prompt_texts`: what answers echo, by prompt. `escalated`: the requests to a tier with another
    tokenizer, by choice.
    """
    num_choices = len(requests) // len(rendered.prompts)
    return tuple(
        ChoicePlan(
            request=request,
            opens_thinking=rendered.prompts[index // num_choices].opens_thinking,
            prompt_text=prompt_texts[index // num_choices],
            escalated=None if escalated is None else escalated[index],
        )
        for index, request in enumerate(requests)
    )


def _cache_salt(request: ApiRequest, principal: Principal) -> str:
    """Return what separates the request's prefix cache: by tenant and its own salt, and by privacy.

    News of a cache may be published (engine.kv_events); those of private texts are not.
    """
    is_private = request.outrider is not None and request.outrider.privacy == "private"
    own = f"/{request.cache_salt}" if request.cache_salt else ""
    return (PRIVATE_SALT if is_private else "") + principal.cache_salt + own


def retention_s(request: ApiRequest) -> float:
    """Return how long a request hints that its text will be wanted: the longest of its hints."""
    options, retention = request.outrider, request.prompt_cache_retention
    hints = [0.0 if options is None else options.retention_s or 0.0]
    if request.prompt_cache_key is not None or retention is not None:
        hints.append(_DAY_S if retention == "24h" else _USUAL_S)
    if isinstance(request, ChatRequest):
        if request.prompt_cache_options is not None and request.prompt_cache_options.ttl:
            hints.append(_TTLS.get(request.prompt_cache_options.ttl, _USUAL_S))
        hints += _marked(request)
    return max(hints)


def mark_s(mark: object) -> float:
    """Return how long Anthropic's `cache_control` asks to keep a prompt; 0 for none."""
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral":
        return 0.0
    return _TTLS.get(str(mark.get("ttl")), _USUAL_S)


def _marked(request: ChatRequest) -> Iterator[float]:
    """Yield what the marks of messages, their parts and tools ask for."""
    for message in request.messages:
        yield mark_s(getattr(message, "cache_control", None))
        if isinstance(message.content, list):
            for part in message.content:
                yield mark_s(part.cache_control)
                if part.prompt_cache_breakpoint is not None:
                    yield _TTLS.get(str(part.prompt_cache_breakpoint.ttl), _USUAL_S)
    for tool in request.tools or ():
        yield mark_s(tool.cache_control)


def escalation_target(info: TierInfo, rendered: Rendered) -> EscalationTarget:
    """Return the target of a tier, from the prompts as it reads them."""
    return EscalationTarget(
        model_id=info.model_id,
        tokenizer=rendered.tokenizer,
        tier=info.tier,
        tools=rendered.tools,
        opens_thinking=rendered.prompts[0].opens_thinking,
    )


def escalated_requests(
    request: ApiRequest, rendered: Rendered, shared: SharedSettings
) -> list[EngineRequest]:
    """Build the same choices for a tier with another tokenizer, under ids of their own."""
    job_id = f"{shared.job_id}-{rendered.info.tier}"
    other = msgspec.structs.replace(
        shared, job_id=job_id, is_watched=False, wants_hidden_states=False
    )
    return engine_requests(request, rendered, other)


def _sampling(
    request: ApiRequest, rendered: Rendered, num_prompt_tokens: int, shared: SharedSettings
) -> Callable[[int], SamplingParams]:
    """Return the sampling parameters by choice. Raises PromptTooLongError."""
    min_tokens = request.min_tokens or 0
    max_tokens = _max_tokens(request, num_prompt_tokens, rendered.info, shared.default_max_tokens)
    stop_token_ids = _stop_token_ids(request, rendered)
    logit_bias = _logit_bias(request, rendered.info)
    num_scores = wanted_prompt_logprobs(request)[0] if request.has_extras else None
    num_logprobs = request.top_count
    if num_logprobs is None and shared.is_watched:
        num_logprobs = 0  # the watch's; the client does not get to see them

    def of_choice(choice_index: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=shared.temperature,
            top_k=max(request.top_k or 0, 0),
            top_p=1.0 if request.top_p is None else request.top_p,
            min_p=request.min_p or 0.0,
            seed=(shared.seed or 0) % 2**64,
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
    ends = () if request.ignore_eos else (*rendered.tokenizer.stop_token_ids, *rendered.ends)
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


def cascade_params(quality: Literal["lossless"] | CascadeQuality | None) -> CascadeParams | None:
    """Return the speculative cascade that was asked for; None: lossless."""
    if quality is None or quality == "lossless":
        return None
    return CascadeParams(alpha=quality.cascade, rule=quality.rule or "opt")
