"""From a validated request to a `Job`: which tier, which tokens, which limits."""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Final

from engine.errors import PromptTooLongError, TierUnavailableError
from engine.events import EngineInfo, TierInfo
from engine.request import (
    TIERS,
    CascadeParams,
    EngineRequest,
    GrammarSpec,
    SamplingParams,
    SpeculationParams,
    Tier,
)
from gateway.backends.client import EngineClient
from gateway.chat import ChatTokenizer, Prompt
from gateway.errors import BadRequestError, ModelNotFoundError, NotReadyError
from gateway.generation import ChoicePlan, Job
from gateway.metrics import GatewayMetrics
from gateway.schema.chat import ChatRequest
from gateway.schema.common import OutriderOptions
from gateway.schema.completions import CompletionRequest
from gateway.structured import plan_structured
from gateway.thinking import Thinking
from gateway.tool_parser import ToolReading
from gateway.tools import plan_tools
from router.policy import RoutePolicy

AUTO: Final = "auto"
# Drawn seeds stay below 2**53, so that every JSON reader gives them back unchanged.
_SEED_BITS: Final = 53


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """Bounds on what a request may ask for.

    `default_max_tokens` is used where a request sets none (or less, where the context ends sooner);
    None: all that the context leaves.
    """

    default_max_tokens: int | None = None
    max_body_bytes: int = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayContext:
    """Everything the gateway is wired to. `clock` is the machine's monotonic clock, in seconds."""

    engine: EngineClient
    tokenizers: Mapping[Tier, ChatTokenizer]
    router: RoutePolicy
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The tier that a request goes to, and why."""

    info: TierInfo
    reason: str
    tokenizer: ChatTokenizer

    @property
    def tier(self) -> Tier:
        return self.info.tier


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """What is known of an answer: a guess, what it conforms to, and how calls in it are read."""

    prediction: tuple[int, ...] = ()
    grammar: GrammarSpec | None = None
    grammar_param: str | None = None  # the field of the request that asked for it
    tools: ToolReading | None = None


_NOTHING_EXPECTED: Final = _Expected()


class JobBuilder:
    """Turns requests into jobs. Holds what the engine said about itself."""

    def __init__(self, context: GatewayContext, metrics: GatewayMetrics) -> None:
        self._context = context
        self._metrics = metrics
        self._info: EngineInfo | None = None

    async def engine_info(self) -> EngineInfo:
        """What is loaded; asked once, for an engine does not change its models.

        Raises NotReadyError while the engine is loading or being restarted.
        """
        if not self._context.engine.is_ready:
            raise NotReadyError("The engine is loading or being restarted; try again soon.")
        if self._info is None:
            self._info = await self._context.engine.info()
        return self._info

    async def names(self) -> dict[str, tuple[TierInfo, ...]]:
        """Every name that `model` accepts, with the checkpoints that may answer to it."""
        tiers = (await self.engine_info()).tiers
        ordered = [tiers[tier] for tier in TIERS if tier in tiers]
        names = {AUTO: tuple(ordered)} | {info.tier: (info,) for info in ordered}
        # A real id is an alias; should both tiers have the same, the large one has it.
        aliases = {info.model_id: (info,) for info in ordered if info.model_id not in names}
        return names | aliases

    async def chat_job(self, request: ChatRequest, arrival_s: float) -> Job:
        """A conversation. Raises GatewayError or EngineError."""
        target = await self._target(request, lambda _: request.last_user_text)
        num_bytes = sum(len(str(message.content)) for message in request.messages)
        _refuse_hopeless(num_bytes, target, request.token_limit)
        plan = plan_tools(request)
        structured = plan_structured(request.response_format, request.structured_outputs)
        if plan is not None and structured is not None:
            raise BadRequestError(
                f"{structured.param}: not supported together with tools; set tool_choice to none.",
                param=structured.param,
            )
        prompt = await target.tokenizer.render_chat(
            request.messages, request.chat_template_kwargs, plan.tools if plan else ()
        )
        prediction: tuple[int, ...] = ()
        if request.prediction is not None:
            prediction = await target.tokenizer.encode_answer(
                request.prediction.text, target.info.max_context
            )
        expected = _Expected(prediction=prediction)
        thinking = _thinking(target.tokenizer, prompt)
        if plan is not None:
            dialect = target.tokenizer.dialect
            expected = replace(
                expected,
                grammar=plan.grammar(dialect, thinking),
                tools=plan.reading(dialect),
                grammar_param="tools",
            )
        elif structured is not None:
            expected = replace(
                expected, grammar=structured.grammar(thinking), grammar_param=structured.param
            )
        return self._job(request, "chatcmpl", target, [prompt], arrival_s, expected)

    async def completion_job(self, request: CompletionRequest, arrival_s: float) -> Job:
        """One or several prompts. Raises GatewayError or EngineError."""

        def routed_text(tokenizer: ChatTokenizer) -> str:
            first = request.prompts[0]
            return first if isinstance(first, str) else tokenizer.decode(first)

        target = await self._target(request, routed_text)
        prompts = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                _refuse_hopeless(len(prompt), target, request.token_limit)
                prompts.append(await target.tokenizer.encode(prompt))
            else:
                _check_token_ids(prompt, target)
                prompts.append(Prompt(token_ids=prompt))
        structured = plan_structured(None, request.structured_outputs)
        expected = _NOTHING_EXPECTED
        if structured is not None:
            expected = _Expected(grammar=structured.grammar(), grammar_param=structured.param)
        return self._job(request, "cmpl", target, prompts, arrival_s, expected)

    async def _target(
        self, request: ChatRequest | CompletionRequest, text: Callable[[ChatTokenizer], str]
    ) -> _Target:
        """Resolve a model name; `auto` asks the router, unless both models are to answer."""
        names = await self.names()
        model = request.model
        if model not in names:
            raise ModelNotFoundError(model, list(names))
        candidates = names[model]
        info, reason = candidates[0], "requested"
        if _cascade(request.outrider) is not None:
            info = _cascade_tier(candidates, await self.engine_info())
            reason = "cascade" if model == AUTO else reason
        elif model == AUTO:
            info, reason = self._route(candidates, text)
        self._metrics.routed(info.tier, reason)
        tokenizer = self._context.tokenizers.get(info.tier)
        if tokenizer is None:
            raise TierUnavailableError(f"The {info.tier} tier has no tokenizer.")
        return _Target(info=info, reason=reason, tokenizer=tokenizer)

    def _route(
        self, candidates: tuple[TierInfo, ...], text: Callable[[ChatTokenizer], str]
    ) -> tuple[TierInfo, str]:
        tokenizer = self._context.tokenizers[candidates[0].tier]
        route = self._context.router.route(text(tokenizer))
        for info in candidates:
            if info.tier == route.tier:
                return info, route.reason
        raise TierUnavailableError(f"The router chose the {route.tier} tier, which is not loaded.")

    def _job(
        self,
        request: ChatRequest | CompletionRequest,
        prefix: str,
        target: _Target,
        prompts: list[Prompt],
        arrival_s: float,
        expected: _Expected = _NOTHING_EXPECTED,
    ) -> Job:
        """One engine request for each choice of each prompt."""
        if not all(prompt.token_ids for prompt in prompts):
            raise BadRequestError("The prompt is empty.")
        job_id = f"{prefix}-{secrets.token_hex(12)}"
        num_choices = request.n or 1
        temperature = 1.0 if request.temperature is None else request.temperature
        seed = request.seed
        if seed is None and temperature > 0:
            seed = secrets.randbits(_SEED_BITS)
        choices = []
        for prompt_index, prompt in enumerate(prompts):
            group_id = f"{job_id}-{prompt_index}"
            sampling = self._sampling(request, target, prompt, temperature, seed or 0)
            for choice_index in range(num_choices):
                parameters = sampling(choice_index)
                engine_request = EngineRequest(
                    request_id=f"{group_id}-{choice_index}",
                    prompt_token_ids=prompt.token_ids,
                    tier=target.tier,
                    sampling=parameters,
                    speculation=_speculation(request.outrider),
                    cascade=_cascade(request.outrider),
                    group_id=group_id if num_choices > 1 else None,
                    arrival_s=arrival_s,
                    prediction_token_ids=expected.prediction[: parameters.max_tokens],
                    grammar=expected.grammar,
                )
                _check_combination(request, engine_request)
                choices.append(
                    ChoicePlan(request=engine_request, opens_thinking=prompt.opens_thinking)
                )
        return Job(
            job_id=job_id,
            created=int(time.time()),
            model_id=target.info.model_id,
            tier=target.tier,
            reason=target.reason,
            seed=seed,
            arrival_s=arrival_s,
            num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            choices=tuple(choices),
            tokenizer=target.tokenizer,
            stops=request.stop_strings,
            splits_thinking=isinstance(request, ChatRequest),
            tools=expected.tools,
            grammar_param=expected.grammar_param,
        )

    def _sampling(
        self,
        request: ChatRequest | CompletionRequest,
        target: _Target,
        prompt: Prompt,
        temperature: float,
        seed: int,
    ) -> Callable[[int], SamplingParams]:
        """The sampling parameters by choice. Raises PromptTooLongError."""
        min_tokens = request.min_tokens or 0
        max_tokens = self._max_tokens(
            request.token_limit, min_tokens, len(prompt.token_ids), target
        )
        stop_token_ids = _stop_token_ids(request, target)
        logit_bias = _logit_bias(request, target)

        def of_choice(choice_index: int) -> SamplingParams:
            return SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=max(request.top_k or 0, 0),
                top_p=1.0 if request.top_p is None else request.top_p,
                min_p=request.min_p or 0.0,
                seed=seed % 2**64,
                choice_index=choice_index,
                stop_token_ids=stop_token_ids,
                num_logprobs=request.top_count,
                presence_penalty=request.presence_penalty or 0.0,
                frequency_penalty=request.frequency_penalty or 0.0,
                repetition_penalty=request.repetition_penalty or 1.0,
                logit_bias=logit_bias,
                min_tokens=min_tokens,
            )

        return of_choice

    def _max_tokens(
        self, limit: int | None, min_tokens: int, num_prompt_tokens: int, target: _Target
    ) -> int:
        """The request's own limit, or what is left of the context up to the default.

        Raises PromptTooLongError, and BadRequestError where less than `min_tokens` is allowed.
        """
        max_context = target.info.max_context
        room = max_context - num_prompt_tokens
        default = max(self._context.limits.default_max_tokens or room, min_tokens)
        wanted = limit or max(1, min(default, room))
        if wanted > room:
            raise PromptTooLongError(
                num_tokens=num_prompt_tokens, max_tokens=wanted, max_context=max_context
            )
        if min_tokens > wanted:
            limited_by = "max_tokens" if limit else f"what the context of {max_context} leaves"
            raise BadRequestError(
                f"min_tokens: {min_tokens} is more than {limited_by} ({wanted}).",
                param="min_tokens",
            )
        return wanted


def _thinking(tokenizer: ChatTokenizer, prompt: Prompt) -> Thinking:
    """Whether an answer begins with a thinking block."""
    if prompt.opens_thinking:
        return "open"
    return "possible" if tokenizer.may_think else "none"


def _refuse_hopeless(num_chars: int, target: _Target, limit: int | None) -> None:
    """Refuse a text that cannot fit however it is tokenised, before paying for tokenising it."""
    # Normalisation may shorten a text; it does not do so four times.
    at_least = ceil(num_chars / (4 * target.tokenizer.max_token_bytes))
    if at_least > target.info.max_context:
        raise PromptTooLongError(
            num_tokens=at_least, max_tokens=limit or 1, max_context=target.info.max_context
        )


def _check_token_ids(token_ids: Iterable[int], target: _Target, *, param: str = "prompt") -> None:
    largest = max(token_ids, default=0)
    if largest >= target.info.vocab_size:
        raise BadRequestError(
            f"{param}: token id {largest} is outside the vocabulary of the {target.tier} "
            f"tier ({target.info.vocab_size} ids).",
            param=param,
        )


def _stop_token_ids(request: ChatRequest | CompletionRequest, target: _Target) -> tuple[int, ...]:
    """The tokenizer's own and the request's. Raises BadRequestError outside the vocabulary."""
    own = request.stop_token_ids or []
    _check_token_ids(own, target, param="stop_token_ids")
    ends = () if request.ignore_eos else target.tokenizer.stop_token_ids
    return tuple(dict.fromkeys((*ends, *own)))


def _logit_bias(
    request: ChatRequest | CompletionRequest, target: _Target
) -> tuple[tuple[int, float], ...]:
    """(token id, bias). Raises BadRequestError outside the vocabulary."""
    biases = {int(token): float(bias) for token, bias in (request.logit_bias or {}).items()}
    _check_token_ids(biases, target, param="logit_bias")
    return tuple(biases.items())


def _check_combination(
    request: ChatRequest | CompletionRequest, engine_request: EngineRequest
) -> None:
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
        return SpeculationParams()
    inter_token_ms = None if options.slo is None else options.slo.inter_token_ms
    return SpeculationParams(
        enabled=options.speculation != "off",
        max_draft_nodes=options.max_draft_nodes,
        max_draft_depth=options.max_draft_depth,
        sources=None if options.sources is None else tuple(dict.fromkeys(options.sources)),
        inter_token_s=None if inter_token_ms is None else inter_token_ms / 1000,
    )


def _cascade(options: OutriderOptions | None) -> CascadeParams | None:
    """The speculative cascade that was asked for; None is lossless."""
    quality = None if options is None else options.quality
    if quality is None or quality == "lossless":
        return None
    return CascadeParams(alpha=quality.cascade, rule=quality.rule or "opt")


def _cascade_tier(candidates: tuple[TierInfo, ...], engine: EngineInfo) -> TierInfo:
    """The large tier, as far as the small model can follow it.

    Raises BadRequestError where one of the two models has no part in the answer.
    """
    large = next((info for info in candidates if info.tier == "large"), None)
    if large is None:
        raise BadRequestError(
            "outrider.quality: in a cascade the large model judges what the small one drafts; "
            "the model must be auto or large.",
            param="outrider.quality",
        )
    if not engine.speculation:
        raise BadRequestError(
            "outrider.quality: a cascade needs a small model that drafts for the large one; this "
            "server runs without.",
            param="outrider.quality",
        )
    tiers = engine.tiers.values()
    return replace(
        large,
        max_context=min(info.max_context for info in tiers),
        vocab_size=min(info.vocab_size for info in tiers),
    )
