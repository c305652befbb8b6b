"""Guesses of all sources in one tree: never another text, and each of use where it should be."""

import itertools

import pytest

from outrider.draft.budget.budget import TreeBudget
from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.verifier.params import SOURCES, Source
from tests.engines import (
    FixedTimes,
    heldout_prompts,
    make_engine,
    make_request,
    random_prompt,
    serve,
    shipped_pair,
    tiny_pair,
)
from tests.laws.predicted import requests_with_predictions, with_prediction
from tests.laws.same_answers import WARM, Way, assert_same_answers, by, plainly, total
from tests.sizes import repeats

SUBSETS: list[tuple[Source, ...]] = [
    subset for size in range(1, 4) for subset in itertools.combinations(SOURCES[:3], size)
]


# One source each, and all of them; pairs of sources are slow.
SUBSETS_BY_COST = [
    pytest.param(subset, marks=pytest.mark.slow) if len(subset) == 2 else subset
    for subset in SUBSETS
]


@pytest.mark.parametrize("sources", SUBSETS_BY_COST, ids="+".join)
def test_sources_do_not_change_the_text(sources: tuple[Source, ...]) -> None:
    requests = requests_with_predictions(sources)
    served = assert_same_answers(requests)
    for request in requests:
        assert_same_answers([request])
    used = set(served.engine.stats().drafted_by_source)
    assert used <= set(sources)
    assert "suffix" in sources or "suffix" not in used
    if "prediction" in sources:
        assert served.total("num_accepted_tokens") > 20


def test_an_engine_without_a_source_never_uses_it() -> None:
    vary = by(draft=DraftConfig(sources=("suffix",)))
    engine = assert_same_answers(requests_with_predictions(None), vary=vary).engine
    assert set(engine.stats().drafted_by_source) <= {"suffix"}
    assert engine._runners["small"].times.num_passes == 0


def test_a_right_prediction_is_taken_in_few_steps() -> None:
    (plain,) = [make_request("r", random_prompt(20), max_tokens=120)]
    right = plainly(tiny_pair(), [plain])["r"]
    engine = make_engine(tiny_pair(), draft=DraftConfig(sources=("prediction",)))
    answer = serve(engine, [with_prediction(plain, right)])["r"]
    assert answer.token_ids == right
    assert answer.stats.num_steps <= 6
    predicted = sum(event.num_predicted_tokens for event in answer.emitted)
    assert predicted == answer.stats.num_accepted_tokens >= 114


def test_a_prediction_with_edits_is_found_again() -> None:
    (plain,) = [make_request("r", random_prompt(20), max_tokens=160)]
    right = plainly(tiny_pair(), [plain])["r"]
    edited = [*right[:40], 5, 6, *right[44:90], *right[95:130], 9, 9, 9, *right[130:]]
    engine = make_engine(tiny_pair(), draft=DraftConfig(sources=("prediction",)))
    answer = serve(engine, [with_prediction(plain, edited)])["r"]
    assert answer.token_ids == right
    assert sum(event.num_predicted_tokens for event in answer.emitted) > 100


@pytest.mark.slow
def test_the_shipped_pair_says_the_same_whatever_guesses_for_it() -> None:
    prompts = heldout_prompts(repeats(8, 4))
    requests = [
        make_request(f"r{n}", prompt, max_tokens=40, temperature=0.8 * (n % 2), seed=n)
        for n, prompt in enumerate(prompts)
    ]
    first, again = assert_same_answers(requests, of=shipped_pair(), vary=WARM).turns
    # Asked again, the answers are remembered and most of them need no draft pass.
    assert total(again, "num_steps") <= total(first, "num_steps")


def test_one_tenants_answers_are_no_guesses_for_another() -> None:
    def ask(engine: Engine, tenant: str) -> int:
        request = make_request("r", random_prompt(20), max_tokens=60, cache_salt=tenant)
        return serve(engine, [request])["r"].stats.num_steps

    engine = make_engine(tiny_pair(), draft=DraftConfig(sources=("suffix",)))
    alone = ask(engine, "a")
    assert ask(engine, "b") == alone
    assert ask(engine, "a") < alone / 3


@pytest.mark.slow
def test_acceptance_returns_after_a_spell_of_load() -> None:
    """One stream, then sixty-four, then the one again: no stale draft KV, no collapse."""

    pair = tiny_pair(drift=0.05)
    # A compute-bound target: beyond a few rows every further one costs as much as it can give.
    budget = TreeBudget(
        target_pass_s=FixedTimes(lambda rows: 1.0 if rows <= 16 else rows / 16),
        draft_pass_s=FixedTimes(lambda rows: 0.02 + 0.001 * rows),
    )
    vary = by(
        budget=budget,
        draft=DraftConfig(sources=("model",)),
        drafter_clock=lambda: 0.0,  # the budget decides, not how long these steps take
        large_blocks=1024,
        small_blocks=1024,
        config=EngineConfig(max_sequences=80),
    )
    long = make_request("long", random_prompt(20), max_tokens=400)
    crowd = [make_request(f"c{n}", random_prompt(8, seed=n), max_tokens=30) for n in range(63)]
    late = Way(arrive=lambda number: 40 if number else 0)
    served = assert_same_answers([long, *crowd], of=pair, vary=vary | late)
    events = served.answers["long"].emitted
    drafted = [event.num_drafted_tokens for event in events]
    accepted = [event.num_accepted_tokens for event in events]
    before, after = slice(5, 38), slice(-35, -2)
    assert min(drafted[before]) > 0
    assert sum(accepted[after]) > 0.75 * sum(accepted[before])
    # While the batch was full, hardly anything was drafted.
    busy = drafted[42:60]
    assert sum(busy) < 0.2 * sum(drafted[5:23])
