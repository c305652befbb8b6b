"""The gateway's own time on the live page: processor time a request, and the loop's lag."""

from functools import partial
from typing import Any

import pytest

from outrider.gateway.http.dashboard.process_figures import ProcessMoments
from outrider.gateway.http.dashboard.recent import WINDOW_S, RecentOutcomes
from tests.gateway.http.dashboard.outcomes import outcome


def told_for(what: Any, share: float) -> Any:
    return what


def no_stages(share: float) -> dict[str, float]:
    return {}


def test_processor_time_is_shared_by_the_requests_that_ended_meanwhile() -> None:
    now_s, cpu_s = 0.0, 5.0
    recent = RecentOutcomes(clock=lambda: now_s)
    process = ProcessMoments(read_cpu_s=lambda: cpu_s)
    recent.observe(outcome())
    assert (
        process.figures(recent.rows(None), lambda share: None, no_stages).cpu_ms_per_request is None
    )
    now_s = 10.0
    process.add(now_s)
    told = process.figures(
        recent.rows(None), lambda share: share / 8, lambda share: {"route": share / 100}
    )
    assert told.cpu_ms_per_request is None, "none has ended since the first sample"
    assert (told.loop_lag_p50_ms, told.loop_lag_p99_ms) == (62.5, 123.75)
    assert told.stages_p99_ms == {"route": pytest.approx(9.9)}
    now_s, cpu_s = 20.0, 5.5
    for _ in range(4):
        recent.observe(outcome())
    assert (
        process.figures(recent.rows(None), lambda share: None, no_stages).cpu_ms_per_request
        == 125.0
    )
    now_s = 20.0 + WINDOW_S
    process.add(now_s)
    now_s += 1.0
    cpu_s = 5.6
    recent.observe(outcome())
    told = process.figures(recent.rows(None), lambda share: None, no_stages)
    assert told.cpu_ms_per_request is not None
    assert 99.0 < told.cpu_ms_per_request < 101.0, "earlier samples are forgotten"


def test_of_several_processes_the_longest_times_are_shown() -> None:
    recent = RecentOutcomes(clock=lambda: 0.0)
    stages = ({"route": 0.001}, {"route": 0.003, "prompt": 0.002})
    rows, parts = recent.rows(None), []
    for lag_s, times in zip((0.5, None), stages, strict=True):
        figures = ProcessMoments().figures(rows, partial(told_for, lag_s), partial(told_for, times))
        parts.append((rows, figures))
    told = ProcessMoments.joined(parts)
    assert told.stages_p99_ms == {"route": 3.0, "prompt": 2.0}
    assert told.loop_lag_p99_ms == 500.0
