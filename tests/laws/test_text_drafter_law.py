"""A large model alone, with a drafter of text alone: the same answers, and fewer passes.

Its guesses are repeated text, predictions, and the answer of another engine's small model.
"""

from dataclasses import replace
from typing import Any

import pytest

from outrider.draft.budget.budget import TreeBudget
from outrider.draft.tree_drafter import TreeDrafter
from outrider.engine.core import Engine
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import EngineRequest
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.wiring.drafter import build_drafter
from tests.engines import Pair, fixed_budget, make_request, random_prompt, tiny_pair
from tests.laws.same_answers import Way, assert_same_answers, plainly

NUM_TOKENS = 24


def large_alone(of: Pair, *, drafts: bool, budget: TreeBudget | None = None) -> Engine:
    large = ModelRunner(model=of.large, num_blocks=256, block_size=16)
    drafter = TreeDrafter(runner=None, budget=budget, clock=lambda: 0.0) if drafts else None
    return Engine(runners={"large": large}, drafter=drafter)


def requests_of(temperature: float) -> list[EngineRequest]:
    """New prompts, and one that repeats itself."""
    prompts = [random_prompt(20 + n, seed=n) for n in range(3)]
    prompts.append(prompts[0] * 3)
    return [
        make_request(str(n), prompt, temperature=temperature, seed=n, max_tokens=NUM_TOKENS)
        for n, prompt in enumerate(prompts)
    ]


@pytest.mark.slow_cases
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("is_adaptive", [False, True])
def test_what_text_says_saves_passes_and_changes_no_token(
    temperature: float, is_adaptive: bool
) -> None:
    requests = requests_of(temperature)
    right = plainly(tiny_pair(), requests)
    budget = None
    if is_adaptive:  # a pass takes as long with guesses as without
        budget = fixed_budget(row=0.0, draft=1.0)
    alone = Way(make=large_alone, engine={"drafts": True, "budget": budget})

    def answers_with(guessed: str, source: str) -> None:
        asked = [
            replace(request, **{source: tuple(right[guessed or request.request_id])})
            for request in requests
        ]
        answers = assert_same_answers(asked, vary=alone).answers
        if not guessed:
            for answer in answers.values():
                assert answer.stats.num_accepted_tokens >= NUM_TOKENS // 2
                assert answer.stats.num_steps <= NUM_TOKENS // 2

    for source in ("prediction_token_ids", "retracted_token_ids"):
        answers_with("", source)  # its own answer
        answers_with("2", source)  # another one, which is mostly wrong


@pytest.mark.parametrize(
    ("flags", "drafts"),
    [
        ({}, True),
        ({"speculation.sources": ("suffix", "model")}, True),
        ({"speculation.sources": ("model", "head")}, False),
        ({"speculation.enabled": False}, False),
    ],
)
def test_a_large_model_alone_gets_the_drafter(flags: dict[str, Any], *, drafts: bool) -> None:
    settings = load_settings(flags=flags, environ={}, config_file=None)
    runner = ModelRunner(model=tiny_pair().large, num_blocks=16, block_size=16)
    assert (build_drafter(settings, {"large": runner}, None) is not None) == drafts
    assert build_drafter(settings, {"small": runner}, None) is None


def test_an_engine_that_drafts_from_text_says_so() -> None:
    info = large_alone(tiny_pair(), drafts=True).info()
    assert info.speculation
    assert info.drafters == ()
