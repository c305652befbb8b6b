"""n choices of one request: their own noise, one computation of the prompt."""

import pytest

from outrider.engine.config import EngineConfig
from outrider.engine.request import EngineRequest
from outrider.verifier.params import Tier
from tests.engines import (
    make_engine,
    make_request,
    random_prompt,
    serve,
    texts,
    tiny_pair,
)
from tests.laws.same_answers import assert_same_answers, by, plainly

NUM_CHOICES = 5


def choices(prompt_length: int, *, tier: Tier = "large", **sampling: object) -> list[EngineRequest]:
    return [
        make_request(
            f"c{number}", random_prompt(prompt_length), tier=tier, seed=77, choice_index=number,
            group_id="g", temperature=1.0, **sampling,
        )
        for number in range(NUM_CHOICES)
    ]  # fmt: skip


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("tier", "speculation", "prompt_length"),
    [
        *(("large", True, length) for length in (1, 16, 31, 48, 70)),
        ("large", False, 31),
        ("small", True, 48),
        ("small", False, 70),
    ],
)
def test_choices_differ_and_the_prompt_is_computed_once(
    prompt_length: int, tier: Tier, speculation: bool
) -> None:
    requests = choices(prompt_length, tier=tier, speculation=speculation)
    served = assert_same_answers(requests)
    answers = served.answers
    assert len({tuple(answer.token_ids) for answer in answers.values()}) == NUM_CHOICES
    # Blocks are shared when they are full; at least the last prompt token is computed by each.
    shared = min(prompt_length // 16 * 16, prompt_length - 1)
    cached = [answers[f"c{number}"].stats.num_cached_tokens for number in range(NUM_CHOICES)]
    assert cached == [0] + [shared] * (NUM_CHOICES - 1)
    stats = served.engine.stats().tiers[tier]
    assert stats.num_prompt_tokens == NUM_CHOICES * prompt_length - sum(cached)
    assert stats.prefix_cache_hits == sum(cached)


def test_choices_that_are_admitted_together_do_not_compute_the_prompt_twice() -> None:
    assert assert_same_answers(choices(64)).total("num_cached_tokens") == 4 * 63


def test_without_a_group_prompts_that_come_together_are_computed_by_each() -> None:
    """What the group is for: nothing is in the cache yet when all of them start."""
    requests = [
        make_request(f"{number}", random_prompt(64), seed=number, temperature=1.0)
        for number in range(NUM_CHOICES)
    ]
    in_one_pass = EngineConfig(min_prefill_tokens=64 * NUM_CHOICES)  # however slow the machine
    served = assert_same_answers(requests, vary=by(config=in_one_pass))
    assert served.total("num_cached_tokens") == 0


def test_greedy_choices_are_equal() -> None:
    requests = [
        make_request(f"{number}", random_prompt(20), seed=1, choice_index=number, group_id="g")
        for number in range(3)
    ]
    answers = serve(make_engine(tiny_pair()), requests)
    assert len({tuple(answer.token_ids) for answer in answers.values()}) == 1


def test_a_choice_that_is_aborted_leaves_the_others_the_prompt() -> None:
    requests = choices(64)
    expected = plainly(tiny_pair(), requests)
    engine = make_engine(tiny_pair())
    answers = serve(
        engine, requests, on_step=lambda number, _: engine.abort("c0") if number == 1 else None
    )
    assert answers["c0"].finish_reason == "abort"
    assert {n: t for n, t in texts(answers).items() if n != "c0"} == {
        n: t for n, t in expected.items() if n != "c0"
    }
    assert answers["c4"].stats.num_cached_tokens == 63
