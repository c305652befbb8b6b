"""Sources of the tokens of a traced answer, on the shipped pair; the answer never changes."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from outrider.engine.core import Engine
from outrider.engine.events import TokensEmitted
from outrider.engine.grammar.grammar import GrammarCompiler
from outrider.engine.protocols import Trees
from outrider.engine.request import EngineRequest, GrammarSpec, SpeculationParams
from outrider.engine.trace import StepTrace
from outrider.verifier.params import CascadeParams, Source, Tier
from tests.engine.grammar.compiling import allowed_after, compiled
from tests.engines import (
    Answer,
    assert_idle,
    heldout_prompts,
    make_engine,
    make_request,
    serve,
    shipped_pair,
    shipped_tokenizer,
    texts,
)
from tests.grammars import shipped_compiler, text_of

MAX_TOKENS = 32
GRAMMAR = GrammarSpec(kind="regex", text=r"\{ü{4}[a-z ]{1,20}ü{4}\}")
COMPILERS: dict[Tier, GrammarCompiler] = {"large": shipped_compiler(), "small": shipped_compiler()}


def engine_of(*, on_device: bool = False) -> Engine:
    return make_engine(shipped_pair(), on_device=on_device, grammars=COMPILERS)


def traced(request_id: str = "r", number: int = 0, **options: object) -> EngineRequest:
    settings: dict[str, Any] = {"max_tokens": MAX_TOKENS, "seed": 3, **options}
    prompt = heldout_prompts(6)[number]
    return replace(make_request(request_id, prompt, **settings), traces=True)


def answered(request: EngineRequest, engine: Engine | None = None) -> Answer:
    engine = engine or engine_of()
    answer = serve(engine, [request])[request.request_id]
    check(request, answer)
    assert_idle(engine)
    return answer


def origins_of(answer: Answer) -> list[str]:
    return [origin for event in answer.emitted for origin in _trace(event).origins]


def _trace(event: TokensEmitted) -> StepTrace:
    assert event.trace is not None
    return event.trace


def check(request: EngineRequest, answer: Answer) -> None:
    """Every token has an origin, and the accepted nodes of a tree spell what was emitted."""
    before = request.prompt_token_ids[-1]
    for event in answer.emitted:
        trace = _trace(event)
        assert len(trace.origins) == len(event.token_ids)
        assert max(len(trace.nodes) - 1, 0) == event.num_drafted_tokens
        if trace.nodes:
            _check_tree(event, before)
        else:
            assert set(trace.origins) <= {"target", "small", "grammar"}
        before = event.token_ids[-1]


def _check_tree(event: TokensEmitted, root_token: int) -> None:
    trace = _trace(event)
    root, *guesses = trace.nodes
    assert (root.token_id, root.parent, root.sources, root.is_accepted) == (
        root_token, -1, (), True,
    )  # fmt: skip
    assert all(node.parent < place for place, node in enumerate(trace.nodes))
    assert all(node.sources for node in guesses), "somebody has guessed it"
    path = [place for place, node in enumerate(trace.nodes) if node.is_accepted]
    assert [trace.nodes[place].parent for place in path] == [-1, *path[:-1]]
    spelt = [trace.nodes[place].token_id for place in path[1:]]
    assert spelt == list(event.token_ids[: len(spelt)])
    assert len(spelt) == event.num_accepted_tokens
    for place, origin in enumerate(trace.origins):
        sources = trace.nodes[path[place + 1]].sources if place < len(spelt) else ()
        assert origin in {*sources, "small", "grammar"} if sources else origin not in (
            "model", "suffix", "prediction", "reused",
        )  # fmt: skip


@cache
def own_answer(tier: Tier, number: int = 0) -> tuple[int, ...]:
    """Return what the tier says by itself."""
    request = replace(traced(tier=tier, number=number, speculation=False), traces=False)
    return tuple(serve(engine_of(), [request])["r"].token_ids)


# ---- one origin at a time -------------------------------------------------------------------


def test_without_drafts_the_large_model_says_it_all() -> None:
    answer = answered(traced(speculation=False))
    assert origins_of(answer) == ["target"] * len(answer.token_ids)
    assert all(not _trace(event).nodes for event in answer.emitted)


def test_a_small_answer_is_the_small_models() -> None:
    answer = answered(traced(tier="small"))
    assert origins_of(answer) == ["small"] * len(answer.token_ids)
    assert tuple(answer.token_ids) == own_answer("small")


@pytest.mark.slow_cases
@pytest.mark.parametrize("on_device", [False, True])
def test_drafted_by_the_small_model(on_device: bool) -> None:
    engine = engine_of(on_device=on_device)
    speculation = SpeculationParams(sources=("model",))
    answer = answered(traced(speculation=speculation), engine)
    found = Counter(origins_of(answer))
    assert found.keys() == {"model", "target"}
    assert found["model"] == answer.stats.num_accepted_tokens > MAX_TOKENS // 3
    assert tuple(answer.token_ids) == own_answer("large")


def test_drafted_from_a_prediction() -> None:
    request = traced(speculation=SpeculationParams(sources=("prediction",)))
    answer = answered(replace(request, prediction_token_ids=own_answer("large")))
    found = Counter(origins_of(answer))
    assert found.keys() == {"prediction", "target"}
    assert found["prediction"] == sum(event.num_predicted_tokens for event in answer.emitted)
    assert found["prediction"] > found["target"]


def test_drafted_from_text_that_repeats() -> None:
    engine = engine_of()
    first, again = (
        answered(traced(name, speculation=SpeculationParams(sources=("suffix",))), engine)
        for name in ("first", "again")
    )
    found = Counter(origins_of(again))
    assert found.keys() == {"suffix", "target"}
    assert found["suffix"] == again.stats.num_accepted_tokens > origins_of(first).count("suffix")


def test_sources_take_turns() -> None:
    """Where the prediction is wrong, the small model guesses."""
    both: tuple[Source, ...] = ("model", "prediction")
    prediction = [token if place % 9 else 7 for place, token in enumerate(own_answer("large"))]
    request = traced(speculation=SpeculationParams(sources=both))
    answer = answered(replace(request, prediction_token_ids=tuple(prediction)))
    assert tuple(answer.token_ids) == own_answer("large")
    assert set(origins_of(answer)) == {"model", "prediction", "target"}
    nodes = [node for event in answer.emitted for node in _trace(event).nodes if node.is_accepted]
    assert sum(event.num_predicted_tokens for event in answer.emitted) == sum(
        "prediction" in node.sources for node in nodes
    )


@pytest.mark.slow_cases
@pytest.mark.parametrize("tier", ["large", "small"])
@pytest.mark.parametrize("speculation", [True, False])
def test_forced_by_the_grammar(tier: Tier, speculation: bool) -> None:
    request = traced(tier=tier, speculation=speculation, max_tokens=48)
    answer = answered(replace(request, grammar=GRAMMAR))
    assert text_of(answer.token_ids).startswith("{")
    grammar = compiled(GRAMMAR)
    is_forced = [
        len(allowed_after(grammar, answer.token_ids[:place]) or ()) == 1
        for place in range(len(answer.token_ids))
    ]
    assert [origin == "grammar" for origin in origins_of(answer)] == is_forced
    assert 1 < sum(is_forced) < len(is_forced)


@pytest.mark.slow_cases
@pytest.mark.parametrize("on_device", [False, True])
def test_reused_at_an_escalation(on_device: bool) -> None:
    engine = engine_of(on_device=on_device)
    number = next(n for n in range(6) if own_answer("small", n)[:4] == own_answer("large", n)[:4])
    request = traced(number=number, tier="small", may_escalate=True)

    def watch(step: int, answers: dict[str, Answer]) -> None:
        if step == 12:
            engine.switch_tier("r", "large")

    answer = serve(engine, [request], on_step=watch)["r"]
    assert tuple(answer.token_ids) == own_answer("large", number)
    small = [event for event in answer.emitted if "small" in _trace(event).origins]
    large = answer.emitted[len(small) :]
    assert len(small) == 12
    check(request, replace(answer, emitted=large))
    reused = [origin for event in large for origin in _trace(event).origins].count("reused")
    assert reused == sum(event.num_reused_tokens for event in large) > 0


def test_tokens_kept_by_a_cascade_are_the_small_models() -> None:
    answer = answered(replace(traced(), cascade=CascadeParams(alpha=0.9)))
    found = Counter(origins_of(answer))
    unratified = sum(event.num_unratified_tokens for event in answer.emitted)
    assert found["small"] == unratified > 0
    assert found["model"] > 0, "what both models say was drafted"


# ---- the same text --------------------------------------------------------------------------


def mixed() -> list[EngineRequest]:
    """Make requests of every kind, greedy and sampled."""
    prediction = own_answer("large")
    return [
        traced("plain"),
        traced("sampled", number=1, temperature=0.8),
        traced("cut", number=2, max_tokens=7),
        traced("small", number=3, tier="small"),
        replace(traced("predicted"), prediction_token_ids=prediction),
        replace(traced("json", number=4, temperature=0.7), grammar=GRAMMAR),
        replace(traced("cascade", number=5), cascade=CascadeParams(alpha=0.6)),
        traced("stops", stop_token_ids=(shipped_tokenizer().eos_token_id, prediction[9])),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True])
def test_traced_and_untraced_answers_are_equal(on_device: bool) -> None:
    requests = mixed()
    engine = engine_of(on_device=on_device)
    forests: list[int] = []
    launch = engine._large.launch

    def watched(plan: Any, trees: Trees) -> object:
        forests.append(trees.forest.num_trees if trees.forest is not None else 0)
        return launch(plan, trees)

    engine._large.launch = watched  # type: ignore[assignment, method-assign]
    answers = serve(engine, requests)
    for request in requests:
        check(request, answers[request.request_id])
    assert (max(forests) > 1) == on_device, "trees that only the device knows have sources too"
    plain = serve(
        engine_of(on_device=on_device), [replace(request, traces=False) for request in requests]
    )
    assert texts(answers) == texts(plain)
    assert all(event.trace is None for answer in plain.values() for event in answer.emitted)
