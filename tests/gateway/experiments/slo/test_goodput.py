"""Goodput: what counts as attained, as missed, and as neither; and over which time."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from outrider.gateway.contract.answers.outcomes import RequestOutcome
from outrider.gateway.experiments.slo.goodput import GoodputSink, attained
from outrider.gateway.experiments.slo.slo_parts import SloParts, build_slo
from outrider.gateway.settings.slo import SloSettings
from tests.gateway.waiting import HandClock


def outcome(**fields: Any) -> RequestOutcome:
    made: dict[str, Any] = {
        "request_id": "r",
        "client_request_id": "c",
        "slo_class": "short-chat",
        "ttft_s": 0.1,
        "inter_token_s": 0.02,
        "slo_ttft_s": 0.5,
        "slo_inter_token_s": 0.05,
    }
    return RequestOutcome(**(made | fields))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"ttft_s": 0.51}, False),
        ({"inter_token_s": 0.051}, False),
        ({"ttft_s": 0.5, "inter_token_s": 0.05}, True),
        ({"ttft_s": 9.0, "slo_ttft_s": None}, True),
        ({"inter_token_s": None}, True),
        ({"ending": "failed", "status": 500}, False),
        ({"ending": "refused", "status": 429, "error_code": "queue_full"}, False),
        ({"ending": "refused", "status": 429, "error_code": "infeasible_objective"}, False),
        ({"ending": "refused", "status": 503, "error_code": "engine_not_ready"}, False),
        ({"ending": "refused", "status": 429, "error_code": "rate_limit_exceeded"}, None),
        ({"ending": "refused", "status": 429, "error_code": "insufficient_quota"}, None),
        ({"ending": "refused", "status": 400}, None),
        ({"ending": "cancelled"}, None),
    ],
)
def test_goodput_counts_requests_that_meet_their_objectives(
    fields: dict[str, Any], expected: bool | None
) -> None:
    assert attained(outcome(**fields)) is expected


def test_goodput_is_what_attained_over_the_window() -> None:
    clock = HandClock()
    sink = GoodputSink(("short-chat", "batch"), clock=clock, window_s=10.0)
    clock.now_s += 100.5
    for _ in range(6):
        sink.observe(outcome())
    sink.observe(outcome(ttft_s=2.0))
    sink.observe(outcome(ending="cancelled"))
    sink.observe(outcome(slo_class="batch", ttft_s=60.0, slo_ttft_s=None))
    sink.observe(outcome(slo_class="a class of yesterday"))
    clock.now_s += 4.5  # the window reaches back 9 seconds and what has begun of this one
    short, batch, none = sink.goodputs()
    assert (short.name, short.num_requests, short.num_attained) == ("short-chat", 7, 6)
    assert short.goodput == pytest.approx(6 / 9.0)
    assert short.attainment == pytest.approx(6 / 7)
    assert batch.attainment == 1.0
    assert (none.name, none.num_requests) == ("none", 1)
    clock.now_s += 6.0
    assert all(one.num_requests == 0 for one in sink.goodputs()), "the window has gone on"
    assert sink.goodputs()[0].attainment is None


def test_a_cell_is_not_counted_again_when_the_ring_comes_round() -> None:
    clock = HandClock()
    sink = GoodputSink(("short-chat",), clock=clock, window_s=5.0)
    for _ in range(23):
        sink.observe(outcome())
        clock.now_s += 1.0
    assert sink.goodputs()[0].num_requests == 4, "and one cell that has only begun"


def test_a_young_gateway_divides_by_its_age() -> None:
    clock = HandClock()
    sink = GoodputSink(("short-chat",), clock=clock, window_s=60.0)
    clock.now_s += 2.0
    for _ in range(8):
        sink.observe(outcome())
    assert sink.goodputs()[0].goodput == pytest.approx(4.0)


def test_goodput_is_exported_to_prometheus() -> None:
    clock, registry = HandClock(), CollectorRegistry()
    parts = build_slo(SloSettings(), registry, clock=clock)
    clock.now_s += 61.0
    for ttft_s in (0.1, 0.1, 0.9):
        parts.goodput.observe(outcome(ttft_s=ttft_s))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"class": "short-chat", **labels})

    assert value("outrider_slo_requests_total", attained="true") == 2
    assert value("outrider_slo_requests_total", attained="false") == 1
    assert value("outrider_goodput_requests_per_second") == pytest.approx(2 / 59.0)
    assert value("outrider_slo_attainment_ratio") == pytest.approx(2 / 3)
    batch = {"class": "batch"}
    assert registry.get_sample_value("outrider_goodput_requests_per_second", batch) == 0
    assert registry.get_sample_value("outrider_slo_attainment_ratio", batch) is None


def test_the_parts_work_without_settings() -> None:
    parts = SloParts()
    parts.goodput.observe(outcome())
    assert parts.goodput.goodputs()[0].num_requests == 1
    assert parts.classes.names == ("short-chat", "long-context", "tool-calling", "batch", "idle")
