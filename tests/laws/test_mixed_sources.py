"""Guesses of all sources in one tree: never another text, and each of use where it should be."""

import itertools

import pytest

from outrider.draft.budget.budget import TreeBudget
from outrider.draft.config import DraftConfig
from outrider.draft.tree_drafter import TreeDrafter
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.passes.runner import ModelRunner
from outrider.verifier.params import SOURCES, Source
from tests.engines import (
    FixedTimes,
    assert_idle,
    heldout_prompts,
    make_engine,
    make_request,
    random_prompt,
    serve,
    shipped_pair,
    texts,
    tiny_pair,
)
from tests.laws.mixed import plainly, total
from tests.laws.predicted import requests_with_predictions, with_prediction
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
    right = plainly(tiny_pair(), requests)
    engine = make_engine(tiny_pair())
    answers = serve(engine, requests)
    assert texts(answers) == right
    alone = {r.request_id: serve(make_engine(tiny_pair()), [r])[r.request_id] for r in requests}
    assert texts(alone) == right
    used = set(engine.stats().drafted_by_source)
    assert used <= set(sources)
    assert "suffix" in sources or "suffix" not in used
    if "prediction" in sources:
        assert total(answers, "num_accepted_tokens") > 20
    assert_idle(engine)


def test_an_engine_without_a_source_never_uses_it() -> None:
    requests = requests_with_predictions(None)
    engine = make_engine(tiny_pair(), draft=DraftConfig(sources=("suffix",)))
    assert texts(serve(engine, requests)) == plainly(tiny_pair(), requests)
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


def test_the_shipped_pair_says_the_same_whatever_guesses_for_it() -> None:
    prompts = heldout_prompts(repeats(8, 4))
    requests = [
        make_request(f"r{n}", prompt, max_tokens=40, temperature=0.8 * (n % 2), seed=n)
        for n, prompt in enumerate(prompts)
    ]
    right = plainly(shipped_pair(), requests)
    engine = make_engine(shipped_pair())
    first = serve(engine, requests)
    assert texts(first) == right
    # Asked again, the answers are remembered and most of them need no draft pass.
    again = serve(engine, requests)
    assert texts(again) == right
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
    small = ModelRunner(model=pair.small, num_blocks=1024)
    # A compute-bound target: beyond a few rows every further one costs as much as it can give.
    budget = TreeBudget(
        target_pass_s=FixedTimes(lambda rows: 1.0 if rows <= 16 else rows / 16),
        draft_pass_s=FixedTimes(lambda rows: 0.02 + 0.001 * rows),
    )
    drafter = TreeDrafter(
        runner=small,
        budget=budget,
        config=DraftConfig(sources=("model",)),
        clock=lambda: 0.0,  # the budget decides, not how long these steps take
    )
    engine = Engine(
        runners={"large": ModelRunner(model=pair.large, num_blocks=1024), "small": small},
        drafter=drafter,
        config=EngineConfig(max_sequences=80),
    )
    long = make_request("long", random_prompt(20), max_tokens=400)
    crowd = [make_request(f"c{n}", random_prompt(8, seed=n), max_tokens=30) for n in range(63)]
    answers = serve(engine, [long, *crowd], arrivals={r.request_id: 40 for r in crowd})
    assert texts(answers) == plainly(pair, [long, *crowd])
    events = answers["long"].emitted
    drafted = [event.num_drafted_tokens for event in events]
    accepted = [event.num_accepted_tokens for event in events]
    before, after = slice(5, 38), slice(-35, -2)
    assert min(drafted[before]) > 0
    assert sum(accepted[after]) > 0.75 * sum(accepted[before])
    # While the batch was full, hardly anything was drafted.
    busy = drafted[42:60]
    assert sum(busy) < 0.2 * sum(drafted[5:23])
