"""Drafters side by side on a tiny pair, and what is made of figures."""

from dataclasses import replace

import pytest

from outrider.draft.config import DraftConfig
from outrider.draft.training.compare import Compared, measure_drafter, plain_tokens_per_s
from outrider.draft.training.tune import DraftLimits, RunFigures, Traffic
from outrider.engine.core import Engine
from outrider.engine.passes.runner import ModelRunner
from outrider.gateway.tools.learning.drafters.drafter_tables import print_comparison
from outrider.verifier.params import SamplingParams, Tier
from tests.engines import make_engine, random_prompt, tiny_pair

FIGURES = RunFigures(
    num_tokens=100,
    elapsed_s=1.0,
    num_steps=10,
    num_drafts=10,
    num_draft_tokens=40,
    num_accepted_tokens=14,
    accepted_per_depth=(8, 4, 2),
    pass_s={"large": 0.01, "small": 0.001},
)


def compared(name: str, pace: float, gain: float) -> Compared:
    plain = replace(FIGURES, elapsed_s=1 / pace)
    faster = replace(FIGURES, elapsed_s=1 / pace / gain)
    return Compared(
        name=name,
        kind="small",
        num_parameters=1000,
        plain=(plain, plain),
        chains=(FIGURES, FIGURES),
        trees=(faster, faster),
    )


def test_acceptance_is_of_chains_that_were_right_so_far() -> None:
    found = compared("a", 1.0, 2.0)
    assert found.level_acceptance == pytest.approx([0.8, 0.5, 0.5])
    assert found.tree_ratio == pytest.approx(2.0)
    assert found.level_s == 0.001


def test_drafters_are_told_at_one_pace(capsys: pytest.CaptureFixture[str]) -> None:
    """The second one met a machine at half of the speed, and gains as much."""
    found = [compared("a", 1.0, 2.0), compared("b", 0.5, 2.0), compared("c", 1.0, 1.5)]
    assert plain_tokens_per_s(found) == pytest.approx(100.0)
    print_comparison(found)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if line.split()[:1] in (["a"], ["b"])] == ["200"] * 2


@pytest.mark.slow
def test_chains_and_trees_run_in_turn_with_plain_decoding() -> None:
    engine = make_engine(tiny_pair(), draft=DraftConfig())
    runners: dict[Tier, ModelRunner] = dict(engine._runners)
    asked: list[DraftLimits] = []

    def build(choice: DraftLimits) -> Engine:
        asked.append(choice)
        return make_engine(
            tiny_pair(),
            draft=DraftConfig(
                max_draft_depth=choice.max_draft_depth,
                max_draft_nodes=choice.max_draft_nodes,
                max_branching=choice.max_branching,
                max_frontier=choice.max_frontier,
            ),
        )

    traffic = Traffic(
        prompts=tuple(random_prompt(6 + index, seed=index) for index in range(3)),
        sampling=SamplingParams(max_tokens=12),
    )
    labels: list[str] = []
    found = measure_drafter(
        "a",
        kind="small",
        build=build,
        runners=runners,
        traffic=traffic,
        rounds=2,
        depth=3,
        on_run=labels.append,
    )
    assert [choice.adaptive for choice in asked] == [False, True]
    assert len(labels) == 9
    assert [len(runs) for runs in (found.plain, found.chains, found.trees)] == [2, 2, 2]
    assert all(run.num_drafts == 0 for run in found.plain)
    assert len(found.level_acceptance) <= 3
    assert sum(run.num_accepted_tokens for run in found.chains) > 0
    assert all(run.num_tokens == 36 for run in (*found.plain, *found.chains, *found.trees))
