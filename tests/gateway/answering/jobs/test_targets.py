"""Which tier a request gets: what it names, what it may cost, its conversation, its length."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest

from outrider.engine.errors import EngineError, PromptTooLongError
from outrider.engine.events import EngineInfo, TierInfo
from outrider.gateway.answering.jobs.job import Answer, Job
from outrider.gateway.answering.jobs.routing_parts import RoutingParts
from outrider.gateway.answering.reading.gateway_limits import GatewayLimits
from outrider.gateway.answering.reading.local_load import LocalLoad
from outrider.gateway.answering.reading.parsed_request import RequestContext
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.completions import CompletionRequest
from outrider.gateway.contract.schema.parsing import parse
from outrider.gateway.contract.schema.routing import RouteReport
from outrider.gateway.wiring.answering import build_jobs
from outrider.gateway.wiring.gateway_parts import GatewayParts
from outrider.router.assurance import LiveAssurance
from outrider.router.calibration import Calibration
from outrider.router.costs import TokenPrices
from outrider.router.dial import Dial
from outrider.router.guard import RouteGuard
from outrider.router.policy import TrainedPolicy, WatchOptions, own_setting
from outrider.verifier.params import Tier
from tests.gateway.answers import read_answer
from tests.gateway.scripted_client import Script, ScriptedClient
from tests.router.routers import assurance_of, scorer_that_says, table

INCOMING = RequestContext(arrival_s=0.0, request_id="req-1")

PRICES = {
    "small": TokenPrices(prompt=1.0, cached_prompt=0.5, completion=2.0),
    "large": TokenPrices(prompt=10.0, cached_prompt=5.0, completion=20.0),
}


@dataclass
class World:
    """A gateway's routing without HTTP; the engine is never asked to answer."""

    tokenizers: dict[Tier, ChatTokenizer]
    quality: float = 0.5
    calibration: Calibration | None = None
    now_s: float = 0.0
    change: Callable[[TierInfo], TierInfo] = lambda info: info
    parts: dict[str, Any] = field(default_factory=dict)
    tiers: tuple[str, ...] = ("small", "large")

    def __post_init__(self) -> None:
        scorer = scorer_that_says(self.quality, self.calibration)
        setting = own_setting(scorer)
        self.guard = RouteGuard(current_setting=lambda: setting)
        policy = TrainedPolicy(
            scorer=scorer,
            current_setting=lambda: setting,
            dial=None if self.calibration is None else Dial(self.calibration),
            watch=self.parts.get("cascade", WatchOptions()),
            assured=self.parts.get("assured"),
        )
        self.engine = ChangedInfo(
            vocab_size=420,
            script=lambda _: Script(),
            tiers=self.tiers,
            change=self.change,
        )
        parts = GatewayParts(
            engine=self.engine,
            tokenizers=self.tokenizers,
            router=policy,
            limits=GatewayLimits(default_max_tokens=32),
            routing=RoutingParts(**{"guard": self.guard, **self.parts}),
            clock=lambda: self.now_s,
        )
        self.builder = build_jobs(parts)

    def job(self, messages: list[dict[str, Any]] | None = None, **fields: Any) -> Job:
        built = asyncio.run(self.builder.build(chat(messages, **fields), INCOMING))
        self.builder.count(built, INCOMING)
        return built.job

    def report(self, messages: list[dict[str, Any]] | None = None, **fields: Any) -> RouteReport:
        made = asyncio.run(self.builder.route_report(chat(messages, **fields), INCOMING))
        return read_answer(RouteReport, msgspec.json.encode(made))

    def refusal(self, **fields: Any) -> BadRequestError:
        with pytest.raises(BadRequestError) as caught:
            self.job(**fields)
        return caught.value


@dataclass
class ChangedInfo(ScriptedClient):
    change: Callable[[TierInfo], TierInfo] = lambda info: info

    async def info(self) -> EngineInfo:
        info = await super().info()
        return replace(info, tiers={tier: self.change(of) for tier, of in info.tiers.items()})


def chat(messages: list[dict[str, Any]] | None = None, **fields: Any) -> ChatRequest:
    import json

    body = {"model": "auto", "messages": messages or [user("Hi")], **fields}
    return parse(ChatRequest, json.dumps(body).encode())


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture
def world(tokenizer: ChatTokenizer) -> Callable[..., World]:
    return lambda **more: World(**({"tokenizers": {"small": tokenizer, "large": tokenizer}} | more))


# ---- what the request names --------------------------------------------------------------------


def test_a_tier_can_be_named_in_the_options(world: Callable[..., World]) -> None:
    made = world(quality=0.9)
    for tier in ("small", "large"):
        job = made.job(outrider={"tier": tier})
        assert (job.tier, job.reason, job.watch) == (tier, "requested", None)
        assert made.job(model=tier, outrider={"tier": tier}).tier == tier
    error = made.refusal(model="small", outrider={"tier": "large"})
    assert error.param == "outrider.tier"
    assert "contradicts the model" in str(error)
    assert made.refusal(model="test/large-model", outrider={"tier": "small"}).param
    error = made.refusal(outrider={"tier": "medium"})
    assert error.param == "outrider.tier"
    assert "unknown tier 'medium'; available: small, large" in str(error)


def test_a_named_model_is_never_a_cascade(world: Callable[..., World]) -> None:
    made = world(calibration=table())
    assert made.job().watch is not None
    for fields in ({"model": "small"}, {"outrider": {"tier": "small"}}):
        job = made.job(**fields)
        assert (job.tier, job.watch, job.quality) == ("small", None, None)
        assert not job.choices[0].request.may_escalate


def test_min_quality_is_for_the_router(world: Callable[..., World]) -> None:
    made = world(quality=0.45, calibration=table())
    assert made.job(outrider={"min_quality": 0.68}).tier == "small"  # at a threshold of 0.04
    assert made.job(outrider={"min_quality": 0.99}).tier == "large"
    for fields in ({"model": "large"}, {}):
        options = {"min_quality": 0.5, "tier": None if fields else "small"}
        error = made.refusal(**fields, outrider=options)
        assert error.param == "outrider.min_quality"
    error = world(quality=0.5).refusal(outrider={"min_quality": 0.5})
    assert "calibration table" in str(error)


def test_a_threshold_of_the_requests_own(world: Callable[..., World]) -> None:
    made = world(quality=0.45)
    assert made.job(outrider={"threshold": 0.4}).tier == "small"
    assert made.job(outrider={"threshold": 0.5}).tier == "large"
    for options in ({"threshold": 0.5, "tier": "small"}, {"threshold": 0.5, "min_quality": 0.5}):
        assert made.refusal(outrider=options).param == "outrider.threshold"


def test_a_hold_back_of_the_requests_own(world: Callable[..., World]) -> None:
    options = {"hold_back_tokens": 3, "hold_back_ms": 40.0}
    job = world(calibration=table()).job(stream=True, outrider=options)
    assert job.watch is not None
    assert job.watch.hold_back_s == 0.04


# ---- cascades ----------------------------------------------------------------------------------


def test_a_watched_request_asks_the_engine_for_what_the_watch_needs(
    world: Callable[..., World],
) -> None:
    job = world(calibration=table()).job(n=2, stream=True)
    assert job.watch is not None
    assert job.watch.hold_back_s == 0.25
    assert job.quality == pytest.approx(0.5)
    assert job.escalation is not None
    assert (job.escalation.tier, job.escalation.model_id) == ("large", "test/large-model")
    for choice in job.choices:
        request = choice.request
        assert request.tier == "small"
        assert request.may_escalate
        assert not request.return_hidden_state  # this router has no probe
        assert request.sampling.num_logprobs == 0
        assert choice.escalated is None  # the sequence itself moves
    asked = world(calibration=table()).job(logprobs=True, top_logprobs=3).choices[0].request
    assert asked.sampling.num_logprobs == 3
    plain = world().job().choices[0].request
    assert (plain.sampling.num_logprobs, plain.may_escalate) == (None, False)


def test_unstreamed_answers_have_no_time_limit(world: Callable[..., World]) -> None:
    made = world(calibration=table())
    whole = made.job().watch
    assert whole is not None
    assert whole.hold_back_s is None


def test_a_watched_request_fits_both_models(world: Callable[..., World]) -> None:
    def change(info: TierInfo) -> TierInfo:
        return replace(info, max_context=128 if info.tier == "large" else 256)

    made = world(calibration=table(), change=change)
    job = made.job(max_tokens=100)
    assert job.watch is not None
    long = made.job(max_tokens=200)
    assert (long.tier, long.watch) == ("small", None)
    assert "too long for the large model" in long.reason
    with pytest.raises(PromptTooLongError):
        made.job(max_tokens=300)


def test_prompts_too_long_for_the_small_model_go_to_the_large_one(
    world: Callable[..., World],
) -> None:
    def change(info: TierInfo) -> TierInfo:
        return replace(info, max_context=64 if info.tier == "small" else 4096)

    made = world(quality=0.9, change=change)
    assert made.job().tier == "small"
    for fields in ({"max_tokens": 100}, {"messages": [user("word " * 200)]}):
        job = made.job(**fields)
        assert job.tier == "large"
        assert job.reason == "router: too long for the small model's context"
    with pytest.raises(PromptTooLongError):
        made.job([user("x" * 1_000_000)])


@pytest.fixture
def other_tokenizer(tokenizer_folder: Any, tokenizer: ChatTokenizer) -> ChatTokenizer:
    other = ChatTokenizer.load(tokenizer_folder, "llama3")
    assert other.rendering != tokenizer.rendering
    assert ChatTokenizer.load(tokenizer_folder).rendering == tokenizer.rendering
    return other


def test_models_that_write_differently_get_requests_of_their_own(
    world: Callable[..., World], tokenizer: ChatTokenizer, other_tokenizer: ChatTokenizer
) -> None:
    made = world(calibration=table(), tokenizers={"small": tokenizer, "large": other_tokenizer})
    job = made.job(n=2, logprobs=True)
    assert job.escalation is not None
    assert job.escalation.tokenizer is other_tokenizer
    ids = [choice.request.request_id for choice in job.choices]
    for choice in job.choices:
        assert choice.escalated is not None
        assert choice.escalated.tier == "large"
        assert not choice.escalated.may_escalate
        assert choice.escalated.sampling == choice.request.sampling
        ids.append(choice.escalated.request_id)
    assert len(set(ids)) == 4
    # Token ids mean something in one of the tokenizers only.
    assert made.job(logit_bias={"5": 1}).watch is None


@pytest.mark.parametrize(("scheme", "tier"), [("int8", "small"), ("int4", "large"), ("", "small")])
def test_a_quality_is_assured_for_the_weights_that_are_loaded(
    world: Callable[..., World], caplog: pytest.LogCaptureFixture, scheme: str, tier: str
) -> None:
    made = world(
        quality=0.7,
        calibration=table(),
        change=lambda info: replace(info, scheme=scheme),
        parts={"assured": LiveAssurance([assurance_of(0.95, "int8")])},
    )
    assert made.job(outrider={"min_quality": 0.9}).tier == tier
    assert ("this one is in int4" in caplog.text) == (scheme == "int4")
    assert made.report(outrider={"min_quality": 0.9}).small_right == (
        None if scheme == "int4" else (0.6, 0.9)
    )


# ---- costs -------------------------------------------------------------------------------------


def num_prompt_tokens(made: World) -> int:
    return made.job(model="small").num_prompt_tokens


def test_a_cost_bound_leaves_the_tiers_that_cannot_cost_more(world: Callable[..., World]) -> None:
    made = world(quality=0.1, parts={"prices": PRICES})
    prompt = num_prompt_tokens(made)
    small, large = ((prompt * price + 10 * 2 * price) / 1e6 for price in (1, 10))
    assert made.job(max_tokens=10, outrider={"max_cost_usd": large}).tier == "large"
    dear = made.job(max_tokens=10, outrider={"max_cost_usd": large * 0.99})
    assert dear.tier == "small"
    assert dear.reason.startswith("max_cost_usd: large could cost too much (")
    error = made.refusal(max_tokens=10, outrider={"max_cost_usd": small * 0.99})
    assert error.param == "outrider.max_cost_usd"
    assert f"{small:.3g} USD at least" in str(error)
    # A named model has its own cost, and choices multiply the answer.
    assert made.refusal(model="large", max_tokens=10, outrider={"max_cost_usd": small})
    assert made.refusal(max_tokens=10, n=2, outrider={"max_cost_usd": small})


def test_a_cascade_must_be_affordable_when_both_models_write(
    world: Callable[..., World],
) -> None:
    made = world(calibration=table(), parts={"prices": PRICES})
    report = made.report(max_tokens=10)
    assert report.cost_usd is not None
    costs = [report.cost_usd, *(option.cost_usd for option in report.alternatives)]
    both = sum(cost for cost in costs if cost is not None)
    assert made.job(max_tokens=10, outrider={"max_cost_usd": both * 1.001}).watch is not None
    assert made.job(max_tokens=10, outrider={"max_cost_usd": both * 0.999}).watch is None


def test_the_length_of_an_answer_is_the_default_or_what_was_learnt(
    world: Callable[..., World],
) -> None:
    made = world(parts={"prices": PRICES})
    prompt = num_prompt_tokens(made)
    assert made.report(model="small").cost_usd == pytest.approx((prompt + 2 * 32) / 1e6)


def test_without_prices_a_cost_bound_names_the_setting(world: Callable[..., World]) -> None:
    error = world().refusal(outrider={"max_cost_usd": 1.0})
    assert "routing.prices.small" in str(error)
    report = world().report()
    assert (report.cost_usd, report.alternatives[0].cost_usd) == (None, None)


def test_max_cost_contradicts_min_quality(world: Callable[..., World]) -> None:
    made = world(quality=0.1, calibration=table(), parts={"prices": PRICES})
    cheap = {"max_cost_usd": 0.0002, "min_quality": 0.9}
    error = made.refusal(max_tokens=10, outrider=cheap)
    assert error.param == "outrider.min_quality"


# ---- conversations -----------------------------------------------------------------------------

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": "{}"},
}


def answer(tier: Tier, text: str = "Yes.", **more: Any) -> Answer:
    return Answer(tier=tier, text=text, num_tokens=500, **more)


def learnt(job: Job, said: Answer) -> None:
    assert job.on_answer is not None
    job.on_answer(said)


def test_a_conversation_stays_on_the_model_that_has_it_in_its_cache(
    world: Callable[..., World],
) -> None:
    made = world(quality=0.49, parts={"prices": PRICES})  # just too weak
    first = [user("Is it so?")]
    assert made.job(first).tier == "large"
    learnt(made.job(first, model="small"), answer("small"))
    turns = [*first, {"role": "assistant", "content": "Yes. "}, user("Sure?")]
    job = made.job(turns)
    assert job.tier == "small"
    assert "stays on small" in job.reason
    assert made.report(turns).sticky == "small"
    # Other messages are another conversation; an idle one has lost its cache.
    assert made.job([user("Was it so?"), *turns[1:]]).tier == "large"
    made.now_s = 3600.0
    assert made.job(turns).tier == "large"


def test_a_conversation_on_large_stays_there_too(world: Callable[..., World]) -> None:
    def change(info: TierInfo) -> TierInfo:
        return replace(info, num_parameters=10**9 if info.tier == "large" else 10**8)

    # Without prices the models' sizes stand for them.
    made = world(quality=0.55, change=change)
    first = [user("Is it so?")]
    learnt(made.job(first), answer("large"))
    turns = [*first, {"role": "assistant", "content": "Yes."}, user("Sure?")]
    assert made.job(first).tier == "small"
    assert made.job(turns).tier == "large"
    free = world(quality=0.55, change=change, parts={"is_sticky": False})
    learnt(free.job(first), answer("large"))
    assert free.job(turns).tier == "small"


def test_a_tool_loop_stays_with_the_model_that_made_the_calls(
    world: Callable[..., World],
) -> None:
    made = world(quality=0.5, calibration=table())
    first = [user("Look it up.")]
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "42"}
    loop = [*first, called, result]
    unknown = made.job(loop)
    assert (unknown.tier, unknown.watch) == ("large", None)
    assert unknown.reason == "tool loop: large, the tier that made the calls is unknown"
    learnt(made.job(first), answer("small", "", calls=(("f", "{}"),)))
    job = made.job(loop)
    assert (job.tier, job.watch, job.reason) == (
        "small",
        None,
        "tool loop: small, made the calls",
    )
    made.now_s = 1e6  # who made the calls does not grow cold
    assert made.job(loop).tier == "small"
    # Once it has been answered the loop is over, and the router is asked again.
    over = [*loop, {"role": "assistant", "content": "It is 42."}, user("Thanks.")]
    assert made.job(over).watch is not None
    assert made.job(loop, outrider={"tier": "large"}).tier == "large"


def test_a_tool_loop_that_is_too_dear_is_refused(world: Callable[..., World]) -> None:
    made = world(quality=0.9, parts={"prices": PRICES})
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "42"}
    with pytest.raises(BadRequestError, match="on the large tier, whose tool calls it answers"):
        made.job([user("x"), called, result], max_tokens=9, outrider={"max_cost_usd": 2e-4})


# ---- what is counted ---------------------------------------------------------------------------


def test_the_guard_hears_of_requests_under_the_servers_own_setting(
    world: Callable[..., World],
) -> None:
    made = world(quality=0.1)
    made.job(n=3)
    made.job(model="large")
    made.report()
    numbers = made.guard.numbers()
    assert (numbers.num_outcomes, numbers.strong_share) == (3, 1.0)
    watched = world(calibration=table())
    watched.job()  # its watch will tell
    assert watched.guard.numbers().num_outcomes == 0


def test_escalated_answers_are_held_against_what_was_reused(world: Callable[..., World]) -> None:
    made = world()
    job = made.job()
    learnt(job, answer("small", confidence=0.9))
    learnt(
        job,
        answer(
            "large", escalated=True, confidence=0.3, num_retracted_tokens=16, num_reused_tokens=12
        ),
    )
    numbers = made.guard.numbers()
    assert numbers.escalated_confidence == pytest.approx(0.3)
    assert numbers.escalated_agreement == pytest.approx(0.75)


def test_a_router_of_another_pair_is_refused_when_the_engine_is_up(
    world: Callable[..., World],
) -> None:
    def change(info: TierInfo) -> TierInfo:
        return replace(info, fingerprint="aa" if info.tier == "small" else "cc")

    made = world(parts={"pair": "aa-bb"}, change=change)
    with pytest.raises(EngineError, match="another pair"):
        made.job()
    assert world(parts={"pair": "aa-cc"}, change=change).report().pair == "aa-cc"
    assert world(parts={"pair": "aa-bb"}).job()  # nobody knows the fingerprints


def test_several_prompts_cost_together(world: Callable[..., World]) -> None:
    made = world(quality=0.1, parts={"prices": PRICES})
    one = CompletionRequest(model="auto", prompt="one two", max_tokens=5)
    two = CompletionRequest(model="auto", prompt=["one two", "one two"], max_tokens=5)
    costs = [
        asyncio.run(made.builder.route_report(request, INCOMING)).cost_usd for request in (one, two)
    ]
    assert costs[1] == pytest.approx(2 * costs[0])


def test_a_queue_of_the_large_model_raises_the_bar_and_is_counted(
    world: Callable[..., World],
) -> None:
    routed = world(calibration=table(0.7, "text"))

    def clock() -> float:
        return routed.now_s

    assert routed.job().tier == "large"
    loads = routed.builder.chooser.loads
    token_times: dict[Tier, float] = {"small": 0.01, "large": 0.1}
    for tier, token_s in token_times.items():
        ticket = loads.admit(tier, LocalLoad(clock).admit())
        ticket.began(0.0)
        routed.now_s += token_s
        ticket.first_text()
        routed.now_s += 10 * token_s
        ticket.ended(11)
    assert routed.job().tier == "large"
    loads.admit("large", LocalLoad(clock).admit())
    routed.now_s += 1000.0
    busy = routed.job()
    assert busy.tier == "small"
    assert busy.reason.startswith("router: large model busy, small model likely right")
    counted = generate_latest(routed.builder.metrics.registry).decode()
    assert 'outrider_router_busy_decisions_total{tier="small"} 1.0' in counted
    assert routed.job(outrider={"min_quality": 0.99}).tier == "large"
