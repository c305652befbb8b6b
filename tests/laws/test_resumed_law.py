"""A resumed answer goes on as it would have done, wherever it was cut, whatever shapes it.

An engine answers whole; others are given a beginning of the answer as `resumed_token_ids` and must
come to the same tokens, reasons and log-probabilities behind it. On the bundled pair in float32.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.errors import InvalidRequestError, QueueFullError
from outrider.engine.events import AnswerHeld
from outrider.engine.grammar.grammar import GrammarCompiler
from outrider.engine.request import EngineRequest, GrammarSpec, LatencyObjective
from outrider.verifier.params import CascadeParams, Tier
from tests.engines import (
    Answer,
    assert_idle,
    finish,
    heldout_prompts,
    make_engine,
    make_request,
    serve,
    shipped_pair,
    shipped_tokenizer,
    step_once,
    texts,
)
from tests.grammars import schema_spec, shipped_compiler
from tests.laws.options import OPTIONS
from tests.laws.same_answers import Way, assert_same_answers, by, logprobs

LOGPROB_ERROR = 1e-4
COMPILERS: dict[Tier, GrammarCompiler] = {"large": shipped_compiler(), "small": shipped_compiler()}
CALL = schema_spec(
    {
        "type": "object",
        "properties": {"name": {"enum": ["search", "send"]}, "to": {"type": "string"}},
        "required": ["name", "to"],
    }
)


def requests_of() -> list[EngineRequest]:
    """Every option on both tiers, grammars, cascades, a prediction, and n choices."""
    prompts = heldout_prompts(6, seed=6)
    stop = shipped_tokenizer().eos_token_id
    requests = [
        make_request(
            f"{tier}/{name}",
            prompts[place % len(prompts)],
            tier=tier,
            max_tokens=21 + place % 5,
            **{"seed": place, "stop_token_ids": (stop,), **options},
        )
        for tier in ("large", "small")
        for place, (name, options) in enumerate(OPTIONS.items())
    ]
    for number, grammar in enumerate((GrammarSpec(kind="json"), CALL)):
        for temperature in (0.0, 0.9):
            named = f"grammar/{number}/{temperature}"
            request = make_request(
                named, prompts[number], max_tokens=30, seed=5, temperature=temperature
            )
            requests.append(replace(request, grammar=grammar))
    for number, cascade in enumerate(
        (CascadeParams(alpha=0.3), CascadeParams(alpha=0.5, rule="token_specific"))
    ):
        request = make_request(f"cascade/{number}", prompts[2], temperature=0.8, seed=number)
        requests.append(replace(request, cascade=cascade))
    guessed = make_request("prediction", prompts[3], max_tokens=30, seed=4)
    requests.append(replace(guessed, prediction_token_ids=prompts[3][-20:]))
    requests += [
        make_request(
            f"choice/{n}", prompts[4], temperature=1.0, seed=9, choice_index=n, group_id="g"
        )
        for n in range(3)
    ]
    return requests


def engine_of(**options: Any) -> Engine:
    return make_engine(shipped_pair(), grammars=COMPILERS, **options)


def from_place(turn: int, number: int, length: int) -> int:
    """Nothing, the first token, the middle, all but one, all of it; others in each turn."""
    places = sorted({0, 1, length // 2, length - 1, length})
    return places[(number + turn) % len(places)]


@pytest.fixture(scope="module")
def right() -> dict[str, Answer]:
    return serve(engine_of(), requests_of())


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(5))
def test_answers_go_on_from_any_place(right: dict[str, Answer], turn: int) -> None:
    # Some are pre-empted.
    few = by(grammars=COMPILERS, large_blocks=90, small_blocks=300)
    served = assert_same_answers(
        requests_of(),
        of=shipped_pair(),
        vary=few | Way(resume=partial(from_place, turn)),
        right=right,
        within=logprobs(LOGPROB_ERROR),
    )
    for name, answer in served.answers.items():
        assert answer.stats.num_prompt_tokens == right[name].stats.num_prompt_tokens


# ---- answers under watch ---------------------------------------------------------------------


def watched(**sampling: object) -> EngineRequest:
    return make_request(
        "w", heldout_prompts(1)[0], tier="small", max_tokens=12, may_escalate=True, **sampling
    )


@pytest.mark.slow_cases
@pytest.mark.parametrize("at", [0, 5, 12])
def test_a_resumed_small_answer_is_held_and_may_be_escalated(at: int) -> None:
    request = watched(temperature=0.8, seed=3)
    whole = serve(engine_of(), [replace(request, may_escalate=False)])["w"]
    large = serve(engine_of(), [replace(request, tier="large", may_escalate=False)])
    for action in ("keep_on_tier", "switch"):
        engine = engine_of()
        head = tuple(whole.token_ids[:at])
        answers = serve(engine, [replace(request, resumed_token_ids=head)])
        assert answers["w"].held == AnswerHeld(request_id="w", finish_reason=whole.finish_reason)
        if action == "keep_on_tier":
            engine.keep_on_tier("w")
            step_once(engine, answers)
            assert answers["w"].token_ids == whole.token_ids[at:]
            assert answers["w"].stats.num_output_tokens == len(whole.token_ids)
        else:
            engine.switch_tier("w", "large")
            finish(engine, answers)
            assert texts(answers) == texts(large)
            assert answers["w"].stats.num_output_tokens == len(large["w"].token_ids)
        assert_idle(engine)


def test_the_large_tier_goes_on_behind_a_resumed_small_answer() -> None:
    """A change of tier that keeps the answer, before and after a death."""
    request = watched()
    small = serve(engine_of(), [replace(request, may_escalate=False)])["w"].token_ids
    engine = engine_of()
    kept: dict[str, Answer] = serve(
        engine,
        [replace(request, resumed_token_ids=tuple(small[:4]))],
        on_step=lambda step, _: (
            engine.switch_tier("w", "large", keeps_answer=True) if step == 0 else None
        ),
    )
    answer = kept["w"].token_ids
    for at in (0, 3):
        tier: Tier = "large"
        again = replace(
            request, tier=tier, may_escalate=False, resumed_token_ids=(*small[:4], *answer[:at])
        )
        assert serve(engine_of(), [again])["w"].token_ids == answer[at:]


def test_an_answer_of_another_engines_small_tier_is_drafted_from() -> None:
    """It changes no token, is counted as reused, and saves large passes."""
    request = make_request("r", heldout_prompts(1)[0], max_tokens=20, temperature=0.8, seed=2)
    alone = serve(engine_of(), [request])["r"]
    wrong = alone.token_ids[:12] + alone.token_ids[:4]
    for retracted in (alone.token_ids, wrong):
        told = replace(request, retracted_token_ids=tuple(retracted), resumed_token_ids=())
        answer = serve(engine_of(), [told])["r"]
        assert answer.token_ids == alone.token_ids
        assert answer.stats.num_reused_tokens >= 11
        assert answer.stats.num_steps < alone.stats.num_steps


# ---- at the door -----------------------------------------------------------------------------


def test_a_resumed_request_is_not_refused_for_want_of_room_or_time() -> None:
    engine = engine_of(config=EngineConfig(max_waiting=1))
    late = LatencyObjective(ttft_s=1e-9, refuses=True)
    for number in range(4):
        request = make_request(f"{number}", heldout_prompts(1)[0], max_tokens=2)
        engine.submit(replace(request, objective=late, resumed_token_ids=()))
    with pytest.raises(QueueFullError):
        engine.submit(make_request("new", heldout_prompts(1)[0]))


def test_what_cannot_be_resumed_is_refused() -> None:
    request = make_request("r", heldout_prompts(1)[0], max_tokens=2)
    with pytest.raises(ValueError, match="resumed_token_ids has 3 tokens, more than max_tokens=2"):
        replace(request, resumed_token_ids=(1, 2, 3))
    with pytest.raises(InvalidRequestError, match="resumed token ids must lie in"):
        engine_of().submit(replace(request, resumed_token_ids=(10**6,)))
