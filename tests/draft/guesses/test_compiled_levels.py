"""Levels that the compiled library grows are those that the host grows one by one."""

from dataclasses import replace
from typing import Any

import pytest

from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from outrider.engine.passes.runner import ModelRunner
from outrider.kernels.cpu.tree_library import tree_library
from outrider.kernels.layers.compiled_pass import WholePass
from outrider.verifier.params import CascadeParams
from tests.engines import (
    Answer,
    fixed_budget,
    heldout_prompts,
    make_engine,
    make_request,
    serve,
    shipped_pair,
    watch_small_rows,
)
from tests.grammars import schema_spec, shipped_compiler

pytestmark = pytest.mark.skipif(tree_library() is None, reason="the library was not built")

SAMPLED = {"temperature": 0.8, "seed": 3}
# Some levels are worth their pass, and some are not.
BUDGET = fixed_budget(target=0.03, row=0.0003, draft=0.002, max_stretch=3.0)


def refuse(runner: ModelRunner) -> WholePass | None:
    """Stand for `ModelRunner.whole_pass` of a model that is not compiled."""
    return None


def stopped() -> float:
    """Stand for a clock: what pays on this machine is not to decide."""
    return 0.0


def what_was_drafted(answer: Answer) -> Any:
    """Return what depends on trees, which the text does not."""
    events = [
        (event.token_ids, event.num_drafted_tokens, event.num_accepted_tokens)
        for event in answer.emitted
    ]
    return events, {work.tier: work.num_draft_rows for work in answer.stats.work}


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        ({}, {}),
        ({}, {"budget": BUDGET}),
        (SAMPLED, {"budget": BUDGET}),
        (SAMPLED | {"frequency_penalty": 0.7}, {}),
        ({}, {"small_blocks": 40}),
        (SAMPLED, {"draft": DraftConfig(max_frontier=9, max_branching=5)}),
    ],
    ids=["greedy", "a budget", "sampled", "penalised", "few blocks", "wide"],
)
def test_trees_are_those_that_the_host_grows(
    sampling: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = shipped_pair("bfloat16")
    requests = [
        make_request(str(number), prompt, max_tokens=40, **sampling)
        for number, prompt in enumerate(heldout_prompts(3))
    ]
    compiled = serve(make_engine(pair, drafter_clock=stopped, **options), requests)
    monkeypatch.setattr(ModelRunner, "whole_pass", refuse)
    by_host = serve(make_engine(pair, drafter_clock=stopped, **options), requests)
    for name, answer in compiled.items():
        assert what_was_drafted(answer) == what_was_drafted(by_host[name])
    assert any(event.num_drafted_tokens for event in compiled["0"].emitted)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "changes",
    [
        {"grammar": schema_spec({"type": "object", "properties": {"a": {"type": "integer"}}})},
        {"cascade": CascadeParams(alpha=0.5)},
        {"tier": "small"},
    ],
    ids=["a grammar", "a cascade", "a small answer"],
)
def test_what_only_the_host_can_rank_is_drafted_as_by_the_host(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, prompts = shipped_pair("bfloat16"), heldout_prompts(2)
    requests = [replace(make_request("own", prompts[0], max_tokens=40, **SAMPLED), **changes)]
    if "grammar" not in changes:  # it is made ready in a thread, and who would be first?
        requests.append(make_request("other", prompts[1], max_tokens=40))
    options: dict[str, Any] = {
        "grammars": {"large": shipped_compiler()},
        "config": EngineConfig(min_small_passes=1, max_small_passes=1),
    }
    compiled = serve(make_engine(pair, drafter_clock=stopped, **options), requests)
    monkeypatch.setattr(ModelRunner, "whole_pass", refuse)
    by_host = serve(make_engine(pair, drafter_clock=stopped, **options), requests)
    for name, answer in compiled.items():
        assert what_was_drafted(answer) == what_was_drafted(by_host[name])


def test_one_call_runs_the_passes_of_a_draft() -> None:
    engine = make_engine(shipped_pair("bfloat16"))
    forward_rows = watch_small_rows(engine)
    answer = serve(engine, [make_request("r", heldout_prompts(1)[0], max_tokens=24)])["r"]
    (small,) = [work for work in answer.stats.work if work.tier == "small"]
    num_levels = small.num_draft_rows - sum(forward_rows)
    assert num_levels > 3 * len(forward_rows), "only the first pass of a draft is the host's"
