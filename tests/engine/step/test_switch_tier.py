"""Changing tier in the middle of an answer: the new answer is the new tier's own."""

import pytest

from outrider.draft.config import DraftConfig
from outrider.draft.tree_drafter import TreeDrafter
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.errors import PromptTooLongError
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import EngineRequest
from outrider.verifier.params import Tier
from tests.engines import (
    Answer,
    Pair,
    assert_idle,
    finish,
    make_engine,
    make_request,
    random_prompt,
    serve,
    step_once,
    texts,
    tiny_pair,
    watch_small_rows,
)

PROMPT = random_prompt(37)


def escalating(
    tier: Tier = "small", *, request_id: str = "r", temperature: float = 0.0, **options: object
) -> EngineRequest:
    return make_request(
        request_id, PROMPT, tier=tier, max_tokens=40, temperature=temperature, seed=5, **options
    )


def own_answer(pair: Pair, tier: Tier, temperature: float = 0.0) -> list[int]:
    """Return what the tier says when it is asked from the start, plainly."""
    engine = make_engine(pair, speculates=False)
    return serve(engine, [escalating(tier, temperature=temperature)])["r"].token_ids


def serve_and_switch(engine: Engine, request: EngineRequest, switches: dict[int, Tier]) -> Answer:
    """Switch before the given steps."""

    def watch(number: int, answers: dict[str, Answer]) -> None:
        if number in switches:
            engine.switch_tier(request.request_id, switches[number])

    return serve(engine, [request], on_step=watch)[request.request_id]


@pytest.mark.slow_cases
@pytest.mark.parametrize("speculation", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("step", [0, 1, 7, 39])
def test_an_escalated_answer_is_the_large_tiers_own(
    step: int, temperature: float, speculation: bool
) -> None:
    pair = tiny_pair()
    engine = make_engine(pair, block_size=4)
    request = escalating(temperature=temperature, speculation=speculation)
    answer = serve_and_switch(engine, request, {step: "large"})
    assert [(event.request_id, event.tier) for event in answer.switches] == [("r", "large")]
    assert answer.token_ids == own_answer(pair, "large", temperature)
    assert answer.finished is not None
    assert answer.finished.tier == "large"
    last = answer.prefills[-1]
    assert (last.tier, last.num_prompt_tokens) == ("large", len(PROMPT))
    assert_idle(engine)


@pytest.mark.slow_cases
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("step", [0, 1, 5])
def test_a_request_can_switch_to_the_small_tier(step: int, temperature: float) -> None:
    pair = tiny_pair()
    engine = make_engine(pair)
    answer = serve_and_switch(engine, escalating("large", temperature=temperature), {step: "small"})
    assert answer.token_ids == own_answer(pair, "small", temperature)
    assert [event.tier for event in answer.switches] == ["small"]
    assert answer.stats.num_accepted_tokens == 0  # small answers are not drafted
    assert_idle(engine)


def test_back_and_forth_ends_at_the_last_tier() -> None:
    engine = make_engine(tiny_pair())
    tiers: dict[int, Tier] = {2: "large", 5: "small", 9: "large", 10: "small", 12: "large"}
    answer = serve_and_switch(engine, escalating(), tiers)
    assert answer.token_ids == own_answer(tiny_pair(), "large")
    assert [event.tier for event in answer.switches] == list(tiers.values())
    assert_idle(engine)


def test_equal_answers_are_accepted_as_written() -> None:
    """Both tiers are the same model: every proposed token is right, checked as the prompt is."""
    pair = tiny_pair()
    twins = Pair(
        large=pair.large,
        small=pair.large,
        large_reference=pair.large_reference,
        small_reference=pair.large_reference,
    )
    chains = DraftConfig(max_branching=1, max_frontier=1, sources=("model", "prediction"))
    engine = make_engine(twins, draft=chains)
    answer = serve_and_switch(engine, escalating(), {31: "large"})
    assert answer.token_ids == own_answer(pair, "large")
    # 31 tokens were written; the pass that ends the prefill judges them and adds one.
    first = answer.emitted[31]
    assert first.num_accepted_tokens == first.num_drafted_tokens == first.num_reused_tokens == 31
    assert len(first.token_ids) == 32
    assert first.num_predicted_tokens == 0  # the client predicted nothing
    assert answer.stats.num_reused_tokens == 31
    assert answer.stats.num_steps <= 4


def test_after_the_first_difference_the_drafter_goes_on() -> None:
    engine = make_engine(tiny_pair())
    answer = serve_and_switch(engine, escalating(), {20: "large"})
    written = sum(len(event.token_ids) for event in answer.emitted) - len(answer.token_ids)
    assert written == 20
    mine = answer.emitted[20:]
    assert sum(event.num_drafted_tokens > 0 for event in mine) > 5
    assert sum(event.num_accepted_tokens for event in mine[2:]) > 0


def test_the_small_view_lives_on_as_the_draft_view() -> None:
    """Escalating computes the prompt once more in the large model, and not in the small one."""
    engine = make_engine(tiny_pair(), prefix_caching=False)
    request = escalating(temperature=0.9)
    engine.submit(request)
    answers: dict[str, Answer] = {}
    for _ in range(6):
        step_once(engine, answers)
    rows = watch_small_rows(engine)
    engine.switch_tier("r", "large")
    finish(engine, answers)
    assert rows
    assert max(rows) < len(PROMPT)
    assert answers["r"].token_ids == own_answer(tiny_pair(), "large", 0.9)


def test_without_speculation_no_small_block_is_kept() -> None:
    engine = make_engine(tiny_pair())
    engine.submit(escalating(speculation=False))
    answers: dict[str, Answer] = {}
    for _ in range(4):
        step_once(engine, answers)
    engine.switch_tier("r", "large")
    assert engine.stats().tiers["small"].num_used_blocks == 0
    finish(engine, answers)
    assert answers["r"].stats.num_drafted_tokens == 0


def test_the_numbers_of_an_escalated_answer_are_its_own() -> None:
    """What was retracted is not counted, or tokens per pass would make no sense."""
    engine = make_engine(tiny_pair(), block_size=4)
    serve(engine, [escalating("large", request_id="warm")])
    answer = serve_and_switch(engine, escalating(), {10: "large"})
    kept = answer.emitted[10:]
    assert answer.stats.num_output_tokens == 40
    assert answer.stats.num_steps == len(kept)
    assert answer.stats.num_drafted_tokens == sum(event.num_drafted_tokens for event in kept)
    assert answer.stats.num_accepted_tokens == sum(event.num_accepted_tokens for event in kept)
    small, large = answer.prefills
    assert (small.num_cached_tokens, large.num_cached_tokens) == (36, 36)
    assert answer.stats.num_cached_tokens == 36


@pytest.mark.slow
def test_cached_tokens_are_those_of_the_new_tier() -> None:
    engine = make_engine(tiny_pair(), block_size=4)
    serve(engine, [escalating("small", request_id="warm")])
    small, large = serve_and_switch(engine, escalating(), {10: "large"}).prefills
    assert (small.num_cached_tokens, large.num_cached_tokens) == (36, 0)


def test_a_switch_to_where_it_is_changes_nothing() -> None:
    engine = make_engine(tiny_pair())
    answer = serve_and_switch(engine, escalating(), {3: "small"})
    assert answer.switches == []
    assert answer.token_ids == own_answer(tiny_pair(), "small")


@pytest.mark.slow
def test_a_switch_beside_other_requests_under_block_pressure() -> None:
    pair = tiny_pair()
    requests = [
        make_request(
            f"r{n}", random_prompt(20 + n, seed=n), tier="small", max_tokens=30, temperature=0.8,
            seed=n,
        )
        for n in range(6)
    ]  # fmt: skip
    expected = {}
    for number, request in enumerate(requests):
        tier: Tier = "large" if number % 2 else "small"
        own = make_request(
            request.request_id, request.prompt_token_ids, tier=tier, max_tokens=30,
            temperature=0.8, seed=number,
        )  # fmt: skip
        expected |= texts(serve(make_engine(pair, speculates=False), [own]))
    engine = make_engine(
        pair, block_size=4, large_blocks=24, small_blocks=24,
        config=EngineConfig(max_tokens_per_step=12, min_prefill_tokens=1),
    )  # fmt: skip

    def watch(number: int, answers: dict[str, Answer]) -> None:
        if number % 2 and number < 6:
            engine.switch_tier(f"r{number}", "large")

    answers = serve(engine, requests, on_step=watch)
    assert texts(answers) == expected
    assert_idle(engine)


def test_an_abort_after_a_switch_frees_both_tiers() -> None:
    for num_steps in (0, 1, 4):
        engine = make_engine(tiny_pair())
        engine.submit(escalating())
        answers: dict[str, Answer] = {}
        for _ in range(5):
            step_once(engine, answers)
        engine.switch_tier("r", "large")
        for _ in range(num_steps):
            step_once(engine, answers)
        engine.abort("r")
        assert all(stats.num_used_blocks == 0 for stats in engine.stats().tiers.values())
        step_once(engine, answers)
        assert answers["r"].finish_reason == "abort"
        assert_idle(engine)


def test_a_tier_without_room_refuses_and_the_answer_goes_on() -> None:
    pair = tiny_pair()
    small = ModelRunner(model=pair.small, num_blocks=64)
    large = ModelRunner(model=pair.large, num_blocks=64, max_context=64)
    engine = Engine(
        runners={"large": large, "small": small},
        drafter=TreeDrafter(runner=small),
    )
    engine.submit(escalating())
    answers: dict[str, Answer] = {}
    for _ in range(3):
        step_once(engine, answers)
    with pytest.raises(PromptTooLongError):
        engine.switch_tier("r", "large")
    finish(engine, answers)
    assert answers["r"].token_ids == own_answer(pair, "small")
    assert_idle(engine)
