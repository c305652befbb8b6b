"""Scaling to the latency objective: up at once, down late, to zero and back."""

import pytest

from outrider.gateway.engines.fleet.autoscaling import FleetFigures, ScaleToLatency, ScalingLimits


def figures(
    work_s: float, *, wait_s: float = 0.0, num_open: int = 1, num_ready: int = 4
) -> FleetFigures:
    return FleetFigures(
        interval_s=10.0, work_s=work_s, wait_s=wait_s, num_open=num_open, num_ready=num_ready
    )


def test_replicas_follow_the_work_up_at_once_and_down_late() -> None:
    policy = ScaleToLatency(ScalingLimits(utilisation=0.5, down_after_s=60.0))
    assert policy.decide(figures(10.0)) == 2
    assert policy.decide(figures(40.0)) == 8
    later = [policy.decide(figures(4.0)) for _ in range(30)]
    assert later[4] == 8
    assert later[-1] == 1
    assert later == sorted(later, reverse=True)


def test_a_queue_that_is_too_long_is_cleared_by_more_replicas() -> None:
    limits = ScalingLimits(ttft_s=2.0, start_s=10.0)
    short = ScaleToLatency(limits).decide(figures(7.0, wait_s=0.9))
    long = ScaleToLatency(limits).decide(figures(7.0, wait_s=30.0))
    assert (short, long) == (1, 13)


def test_to_zero_and_back_with_the_first_request_waiting() -> None:
    policy = ScaleToLatency(ScalingLimits(least=0, down_after_s=20.0))
    assert policy.decide(figures(0.001)) == 1
    assert policy.decide(figures(6.0)) == 1
    idle = [policy.decide(figures(0.0, num_open=0)) for _ in range(4)]
    assert idle == [1, 1, 0, 0]  # as soon as down_after_s allows it
    assert policy.decide(figures(0.0, num_open=1, num_ready=0)) == 1


def test_never_outside_its_bounds() -> None:
    policy = ScaleToLatency(ScalingLimits(least=2, most=5))
    assert policy.decide(figures(0.0, num_open=0)) == 2
    assert policy.decide(figures(1e6, wait_s=1e6)) == 5
    with pytest.raises(ValueError, match="least=3"):
        ScalingLimits(least=3, most=2)
    with pytest.raises(ValueError, match="utilisation"):
        ScalingLimits(utilisation=0.0)
