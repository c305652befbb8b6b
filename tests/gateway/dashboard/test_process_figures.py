"""The gateway's own time on the live page: processor time a request, and the loop's lag."""

from gateway.dashboard.process_figures import ProcessMoments
from gateway.dashboard.recent import WINDOW_S, RecentOutcomes
from tests.gateway.dashboard.outcomes import outcome


def test_processor_time_is_shared_by_the_requests_that_ended_meanwhile() -> None:
    now_s, cpu_s = 0.0, 5.0
    recent = RecentOutcomes(clock=lambda: now_s)
    process = ProcessMoments(read_cpu_s=lambda: cpu_s)
    recent.observe(outcome())
    assert process.figures(recent.rows(None), lambda share: None).cpu_ms_per_request is None
    now_s = 10.0
    process.add(now_s)
    told = process.figures(recent.rows(None), lambda share: share / 8)
    assert told.cpu_ms_per_request is None, "none has ended since the first sample"
    assert (told.loop_lag_p50_ms, told.loop_lag_p99_ms) == (62.5, 123.75)
    now_s, cpu_s = 20.0, 5.5
    for _ in range(4):
        recent.observe(outcome())
    assert process.figures(recent.rows(None), lambda share: None).cpu_ms_per_request == 125.0
    now_s = 20.0 + WINDOW_S
    process.add(now_s)
    now_s += 1.0
    cpu_s = 5.6
    recent.observe(outcome())
    told = process.figures(recent.rows(None), lambda share: None)
    assert told.cpu_ms_per_request is not None
    assert 99.0 < told.cpu_ms_per_request < 101.0, "earlier samples are forgotten"
