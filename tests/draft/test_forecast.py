"""The host's forecast of trees that stay on the device."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.draft.budget.budget import StepBudget
from outrider.draft.forecast import Grower, TreeForecast, num_levels, share_nodes
from tests.engines import FixedTimes


def test_a_forecast_learns_by_rank_and_by_depth() -> None:
    forecast = TreeForecast()
    probs = np.array([0.2, 0.9, 0.5, 0.1])
    depths = np.array([1, 1, 2, 2])
    for _ in range(60):
        forecast.observe(probs, depths, num_levels=2)
    assert np.allclose(forecast.by_rank[:5], [0.9, 0.5, 0.2, 0.1, 0.0], atol=1e-4)
    assert np.allclose(forecast.by_depth[:2], [1.1, 0.6], atol=1e-4)
    # Deeper than it was asked for it goes on as from the first level to the second.
    assert np.allclose(forecast.by_depth[2:4], [0.6 * 0.6 / 1.1, 0.6 * (0.6 / 1.1) ** 2], atol=1e-3)
    copy = forecast.copy()
    copy.observe(probs * 0, depths, num_levels=2)
    assert forecast.by_rank[0] > 0.89


def grower(*chances: float, max_depth: int = 8, max_nodes: int = 8, urgency: float = 1.0) -> Grower:
    forecast = TreeForecast()
    for values in (forecast.by_rank, forecast.by_depth):
        values[:] = 0.0
        values[: len(chances)] = chances
    return Grower(forecast=forecast, urgency=urgency, max_depth=max_depth, max_nodes=max_nodes)


def step_of(*, row: float = 0.0, draft: float = 0.1, longest_s: float = np.inf) -> StepBudget:
    return StepBudget(
        target_pass_s=FixedTimes(lambda rows: 1.0 + row * rows),
        draft_pass_s=FixedTimes(lambda rows: draft),
        num_rows=2,
        context=100.0,
        base_tokens=2.0,
        longest_s=longest_s,
        passes_s=0.1,
    )


def levels(growers: list[Grower], step: StepBudget | None, **options: Any) -> int:
    settings: dict[str, Any] = {"width": 4, "min_gain": 0.1} | options
    return num_levels(growers, step, **settings)


def test_levels_are_made_while_they_pay() -> None:
    sure = grower(0.9, 0.8, 0.7, 0.1, 0.05)
    assert levels([sure], None) == 3
    assert levels([sure], None, min_gain=0.2) == 2
    assert levels([grower(0.9, max_depth=1)], None, min_gain=0.0) == 0
    assert levels([grower(0.9, max_depth=5)], None, min_gain=0.0) == 4
    assert levels([sure], None, min_gain=0.0, width=128) == 1  # a view's masks have 255 places
    # A level that brings 0.7 tokens takes a tenth of a step that brings 3.7; the next does not pay.
    assert levels([sure], step_of()) == 2
    assert levels([sure], step_of(draft=0.9)) == 0
    assert levels([sure, grower(*[0.9] * 8)], step_of()) == 7
    assert levels([sure, grower(*[0.9] * 8, max_depth=3)], step_of()) == 2
    assert levels([sure], step_of(longest_s=1.25)) == 1


def test_nodes_are_shared_between_trees_here_and_there() -> None:
    growers = [grower(0.9, 0.5, 0.1), grower(0.6, 0.4, urgency=2.0), grower(0.3, max_nodes=1)]
    everything, floor = share_nodes(growers, np.array([0.7]), None)
    assert (everything, floor) == (8 + 8 + 1, 0.0)
    # Rows cost nothing: all guesses that may come true are judged.
    number, _ = share_nodes(growers, np.array([0.7]), step_of())
    assert number >= 6
    # 5.85 tokens in 4.1 s with four guesses; the fifth, of 0.7, would bring them to 6.55 in 4.6 s.
    number, floor = share_nodes(growers, np.array([0.95, 0.7]), step_of(row=0.5))
    assert (number, floor) == (3, pytest.approx(0.8))
    # Where nothing pays, what was drafted has at least its best guess judged.
    cliff = replace(step_of(), target_pass_s=FixedTimes(lambda rows: 1.0 if rows <= 2 else 99.0))
    number, floor = share_nodes(growers, np.array([0.7]), cliff)
    assert (number, floor) == (3, np.inf)
