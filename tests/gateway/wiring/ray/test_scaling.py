"""The number of replicas follows the work, and the seconds that prompts wait."""

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engine.events import EngineStats, TierStats
from outrider.gateway.wiring.ray.scaling import OPEN, WAIT, WORK, LoadMeter, ObjectivePolicy


def stats(*, prompt: int, computed: int, written: int = 0, running: int = 0) -> EngineStats:
    tier = TierStats(
        num_prompt_tokens=prompt,
        num_computed_tokens=computed,
        num_output_tokens=written,
        num_running=running,
    )
    return EngineStats(tiers={"large": tier})


def test_work_is_a_share_of_the_fastest_rate_and_waits_are_at_that_rate() -> None:
    meter = LoadMeter()
    assert meter.figures(stats(prompt=1000, computed=0, running=3), 0.0) == {
        WORK: 0.0,
        WAIT: 0.0,
        OPEN: 3.0,
    }
    found = meter.figures(stats(prompt=2000, computed=500, running=2), 1.0)
    assert found == {WORK: 1.0, WAIT: pytest.approx(3.0), OPEN: 2.0}
    found = meter.figures(stats(prompt=2000, computed=600, written=50), 2.0)
    assert found[WORK] == 1.0  # of answers, though few of prompts
    found = meter.figures(stats(prompt=2000, computed=700, written=75), 3.0)
    assert found[WORK] == pytest.approx(0.5, rel=0.01)
    assert meter.figures(stats(prompt=2000, computed=700, written=75), 4.0)[WORK] == 0.0


def context(now_s: float, *, work: float, wait_s: float = 0.0, ready: int = 2) -> Any:
    return SimpleNamespace(
        current_time=now_s,
        current_num_replicas=ready,
        target_num_replicas=ready,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        aggregated_metrics={
            WORK: dict.fromkeys(range(ready), work / ready),
            WAIT: {0: wait_s, 1: 0.0},
            OPEN: {0: 3.0},
        },
    )


@pytest.mark.parametrize(
    ("work", "wait_s", "number"),
    [(1.3, 0.0, 2), (0.2, 0.0, 1), (2.0, 0.0, 3), (1.3, 9.0, 4), (40.0, 90.0, 8)],
)
def test_decisions(work: float, wait_s: float, number: int) -> None:
    policy = ObjectivePolicy(first_token_s=1.0, start_s=10.0)
    assert policy(context(100.0, work=work, wait_s=wait_s)) == (2, {})  # nothing is known yet
    assert policy(context(100.5, work=work, wait_s=wait_s)) == (2, {})
    assert policy(context(103.0, work=work, wait_s=wait_s)) == (number, {})
    assert policy(context(103.1, work=9.0)) == (number, {})


def test_without_figures_the_least_number_is_wanted() -> None:
    policy = ObjectivePolicy(first_token_s=1.0, start_s=10.0)
    empty = context(0.0, work=0.0)
    empty.aggregated_metrics = None
    policy(empty)
    empty.current_time = 5.0
    assert policy(empty) == (1, {})
