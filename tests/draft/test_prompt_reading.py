"""Prompts that the small model reads beside the large one, for guesses that come later."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.request import EngineRequest, SpeculationParams
from outrider.verifier.params import CascadeParams
from tests.engines import (
    Answer,
    FixedTimes,
    assert_idle,
    drafter_of,
    finish,
    fixed_budget,
    make_engine,
    make_request,
    random_prompt,
    serve,
    step_once,
    texts,
    twins,
    watch_small_rows,
)

# To read a prompt of 60 tokens takes a third of a plain step.
_BUDGET = fixed_budget(row=0.001, draft=0.02, draft_row=0.005)
_MODEL = DraftConfig(sources=("model",))


def engine(**options: Any) -> Engine:
    return make_engine(twins(), budget=_BUDGET, draft=_MODEL, **options)


def prompts(number: int, **fields: Any) -> list[EngineRequest]:
    made = [
        make_request(str(n), random_prompt(60 + n, seed=n), max_tokens=16, seed=n)
        for n in range(number)
    ]
    return [replace(each, **fields) for each in made]


def num_read(engine: Engine) -> dict[str, int]:
    """Return how many tokens of each request the small model has read."""
    states = drafter_of(engine)._states
    found = {name: s.view.num_computed_tokens for name, s in states.items() if s.view is not None}
    return {name: number for name, number in found.items() if number}


def begin(engine: Engine, requests: list[EngineRequest]) -> dict[str, Answer]:
    """Run one step, in which all prompts are computed."""
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        engine.submit(request)
    step_once(engine, answers)
    return answers


def test_prompts_of_several_are_read_in_the_step_that_computes_them() -> None:
    own = engine()
    answers = begin(own, prompts(3))
    assert num_read(own) == {"0": 59, "1": 60, "2": 61}
    rows = watch_small_rows(own)
    step_once(own, answers)
    assert rows[0] == 6, "of each its prompt's last token and its answer's first"
    finish(own, answers)
    assert texts(answers) == texts(serve(make_engine(twins(), speculates=False), prompts(3)))
    assert_idle(own)


def test_who_is_alone_gets_the_first_token_before_the_small_model_reads() -> None:
    own = engine()
    rows = watch_small_rows(own)
    answers = begin(own, prompts(1))
    assert rows == []
    step_once(own, answers)
    assert rows[0] == 61


def test_a_prompt_beside_an_answer_is_read_along_chunk_by_chunk() -> None:
    """Up to its last tokens, which are soon read."""
    own = engine(config=EngineConfig(max_tokens_per_step=32))
    (first,) = prompts(1)
    answers = begin(own, [first])
    while not answers["0"].token_ids:
        step_once(own, answers)
    own.submit(make_request("1", random_prompt(150, seed=9)))
    answers["1"] = Answer()
    found = []
    while not answers["1"].token_ids:
        step_once(own, answers)
        found.append(num_read(own)["1"])
    assert found[:4] == [31, 62, 93, 124]
    assert found[-1] < 149
    finish(own, answers)


@pytest.mark.parametrize(
    "fields",
    [
        {"speculation": SpeculationParams(enabled=False)},
        {"speculation": SpeculationParams(max_draft_nodes=0)},
        {"speculation": SpeculationParams(sources=("suffix",))},
        {"cascade": CascadeParams(alpha=0.1)},
    ],
    ids=["off", "no nodes", "text only", "cascade"],
)
def test_nothing_is_read_for_requests_that_the_small_model_does_not_draft_for(
    fields: Mapping[str, Any],
) -> None:
    own = engine()
    begin(own, prompts(2, **fields))
    assert num_read(own) == {}


def test_nothing_is_read_where_guesses_should_not_pay() -> None:
    dear = replace(_BUDGET, target_pass_s=FixedTimes(lambda rows: 0.5 * rows))
    own = make_engine(twins(), budget=dear, draft=_MODEL)
    begin(own, prompts(3))
    assert num_read(own) == {}


def test_a_prompt_for_which_there_are_no_blocks_is_read_later_or_never() -> None:
    own = engine(small_blocks=6)
    answers = begin(own, prompts(3))
    assert len(num_read(own)) < 3
    finish(own, answers)
    assert texts(answers) == texts(serve(make_engine(twins(), speculates=False), prompts(3)))
    assert_idle(own)
