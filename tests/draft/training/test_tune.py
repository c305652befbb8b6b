"""The tuner on a tiny pair, and its choice on figures made up for it."""

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.draft.config import DraftConfig
from outrider.draft.training import tune
from outrider.draft.training.prompt_file import PromptDataError, PromptRow
from outrider.draft.training.tune import (
    DraftLimits,
    RunFigures,
    Traffic,
    Tried,
    Tuner,
    run_traffic,
    sample_traffic,
    speculation_toml,
)
from outrider.engine.core import Engine
from outrider.engine.passes.runner import ModelRunner
from outrider.verifier.params import SamplingParams, Tier
from tests.engines import assert_idle, make_engine, random_prompt, shipped_tokenizer, tiny_pair

TRAFFIC = Traffic(
    prompts=tuple(random_prompt(6 + index, seed=index) for index in range(3)),
    sampling=SamplingParams(max_tokens=12),
    concurrency=2,
)


def figures(rate: float) -> RunFigures:
    return RunFigures(
        num_tokens=100,
        elapsed_s=100 / rate,
        num_steps=10,
        num_drafts=10,
        num_draft_tokens=40,
        num_accepted_tokens=14,
        accepted_per_depth=(8, 4, 2),
        pass_s={"large": 0.01, "small": 0.001},
    )


def engine_of(choice: DraftLimits) -> Engine:
    return make_engine(
        tiny_pair(),
        draft=DraftConfig(
            max_draft_depth=choice.max_draft_depth,
            max_draft_nodes=choice.max_draft_nodes,
            max_branching=choice.max_branching,
            max_frontier=choice.max_frontier,
        ),
    )


def runners_of(engine: Engine) -> dict[Tier, ModelRunner]:
    return dict(engine._runners)


def test_figures_by_depth() -> None:
    run = figures(50.0)
    assert run.tokens_per_s == pytest.approx(50.0)
    assert run.path_acceptance == [0.8, 0.4, 0.2]
    assert run.level_acceptance == [0.8, 0.5, 0.5]
    assert run.acceptance_rate == pytest.approx(0.35)
    assert run.mean_nodes == 4.0


def test_a_run_counts_what_it_added_itself() -> None:
    engine = engine_of(DraftLimits(max_draft_depth=4, max_draft_nodes=8))
    runners = runners_of(engine)
    first = run_traffic(engine, runners, TRAFFIC, salt="a", drafts=True)
    second = run_traffic(engine, runners, TRAFFIC, salt="b", drafts=True)
    plain = run_traffic(engine, runners, TRAFFIC, salt="c", drafts=False)
    assert first.num_tokens == second.num_tokens == plain.num_tokens
    assert first.num_drafts > 0
    assert first.num_accepted_tokens == sum(first.accepted_per_depth)
    assert second.num_accepted_tokens == sum(second.accepted_per_depth)
    assert sum(run.num_drafts for run in (first, second)) == engine.stats().num_drafts
    assert plain.num_drafts == plain.num_draft_tokens == 0
    assert plain.num_steps > first.num_steps
    assert set(first.pass_s) == {"large", "small"}
    assert all(seconds > 0 for seconds in first.pass_s.values())
    assert_idle(engine)


@pytest.mark.slow
def test_all_values_and_plain_decoding_run_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[int | None, str]] = []
    run = tune.run_traffic

    def watched(engine: Engine, *args: Any, salt: str, drafts: bool) -> RunFigures:
        drafter = engine._drafter
        depth = drafter._config.max_draft_depth if drafts else None  # type: ignore[union-attr]
        order.append((depth, salt))
        return run(engine, *args, salt=salt, drafts=drafts)

    monkeypatch.setattr(tune, "run_traffic", watched)
    tuner = Tuner(build=engine_of, runners={}, traffic=TRAFFIC, rounds=2)
    standing = 2
    report = tuner.tune({"max_draft_depth": (1, 3)}, start=DraftLimits(max_draft_depth=standing))
    assert [depth for depth, _ in order] == [None, standing, 1, 3] * 3
    assert len({salt for _, salt in order}) == len(order)  # nobody finds another's prefix
    assert [tried.choice.max_draft_depth for tried in report.tried] == [standing, 1, 3]
    assert all(len(tried.runs) == len(tried.ratios) == 2 for tried in report.tried)
    assert report.best in [tried.choice for tried in report.tried]


def test_the_quickest_wins_unless_it_is_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {4: 150.0, 8: 200.0, 16: 199.0}
    # The machine halves its speed in every other round, which is nobody's merit.
    speeds: Iterator[float] = iter([])

    def scripted(engine: int, *_: object, salt: str, drafts: bool) -> RunFigures:
        if not drafts:
            nonlocal speeds
            speeds = iter([0.5 if int(salt.split("-")[1]) % 8 == 1 else 1.0] * 9)
        speed = next(speeds)
        return figures(speed * (rates[engine] if drafts else 100.0))

    monkeypatch.setattr(tune, "run_traffic", scripted)

    def best(standing: int, values: tuple[int, ...]) -> tune.TuneReport:
        tuner = Tuner(
            build=lambda choice: choice.max_draft_depth,  # type: ignore[arg-type,return-value]
            runners={},
            traffic=TRAFFIC,
            rounds=4,
        )
        report = tune.TuneReport(best=DraftLimits(max_draft_depth=standing))
        choices = tuner._choices(report.best, "max_draft_depth", values)
        report.tried = tuner._try(report, "max_draft_depth", choices, 0)
        report.best, report.gain = tune._best(report.tried, report.best)
        return report

    moved = best(4, (4, 8, 16))
    assert moved.best.max_draft_depth == 8
    assert moved.gain == pytest.approx(2.0)
    # 200 over 199 is less than a percent: the standing choice stays.
    assert best(16, (8, 16)).best.max_draft_depth == 16


@pytest.mark.slow
def test_full_trees_are_tried_beside_adaptive_ones() -> None:
    tuner = Tuner(build=engine_of, runners={}, traffic=TRAFFIC, rounds=1)
    start = DraftLimits(max_draft_nodes=4, max_draft_depth=3)
    report = tuner.tune({"max_draft_nodes": (2, 6)}, start=start)

    def sizes(*, adaptive: bool) -> list[int]:
        tried = report.of_limit("max_draft_nodes", adaptive=adaptive)
        return [case.choice.max_draft_nodes for case in tried]

    assert sizes(adaptive=True) == [2, 4, 6]  # where it started, too
    assert sizes(adaptive=False) == [2, 6]


def test_full_trees_are_shown_but_not_chosen() -> None:
    small, full = DraftLimits(max_draft_nodes=4), DraftLimits(max_draft_nodes=8, adaptive=False)
    tried = [
        Tried(limit="max_draft_nodes", choice=choice, runs=(figures(1.0),), ratios=(ratio,))
        for choice, ratio in ((small, 2.0), (full, 3.0))
    ]
    assert tune._best(tried, small) == (small, 2.0)


def test_prompts_that_leave_no_room_are_no_traffic() -> None:
    rows = [PromptRow(messages=(("user", "Hi " * n),)) for n in (1, 200)]
    found = sample_traffic(rows, shipped_tokenizer(), TRAFFIC.sampling, max_context=40)
    assert len(found.prompts) == 1
    with pytest.raises(PromptDataError, match=r"12 tokens in a context of 40; lower"):
        sample_traffic(rows[1:], shipped_tokenizer(), TRAFFIC.sampling, max_context=40)


def test_settings_say_what_was_found() -> None:
    choice = DraftLimits(max_draft_depth=6, max_draft_nodes=12, max_branching=2, max_frontier=1)
    tried = Tried(limit="max_frontier", choice=choice, runs=(figures(200.0),), ratios=(2.0,))
    report = tune.TuneReport(best=choice, gain=2.0, plain_runs=[figures(100.0)], tried=[tried])
    text = speculation_toml(report, conditions="on a test")
    assert "# on a test" in text
    assert "2.00 times plain decoding (100.0 tok/s)" in text
    assert text.endswith(
        "[speculation]\nenabled = true\nadaptive = true\nmax_draft_nodes = 12\n"
        "max_draft_depth = 6\nmax_branching = 2\nmax_frontier = 1\n"
    )
    report.gain = 0.9
    assert "enabled = false" in speculation_toml(report, conditions="")


def test_nothing_to_measure_is_refused() -> None:
    empty = Traffic(prompts=(), sampling=TRAFFIC.sampling)
    with pytest.raises(ValueError, match="no prompt"):
        Tuner(build=engine_of, runners={}, traffic=empty)
    with pytest.raises(ValueError, match="rounds=0"):
        Tuner(build=engine_of, runners={}, traffic=TRAFFIC, rounds=0)
