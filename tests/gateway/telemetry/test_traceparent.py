"""The headers that traces come and go with, as the standards have them and as attackers do."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client import CollectorRegistry

from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.telemetry.otel import OtelTracer, SpanCounts, make_provider
from outrider.gateway.telemetry.tracing import propagator

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def tracer(names: str) -> OtelTracer:
    """A tracer that keeps nothing, so that a caller's headers go on as they came."""
    return OtelTracer(
        make_provider(ALWAYS_OFF),
        SpanCounts(CollectorRegistry()),
        propagator(names),
        clock=lambda: 0.0,
        wall_clock=lambda: 0.0,
    )


ALONE = tracer("tracecontext")
WITH_BAGGAGE = tracer("tracecontext, baggage")


def passed_on(parent: str, state: str | None = None) -> dict[str, str]:
    """What goes on of a caller's headers; nothing where they name no trace of a caller."""
    headers = {"traceparent": parent} | ({} if state is None else {"tracestate": state})
    found = dict(ALONE.begin("r", headers=headers).headers())
    is_callers = found["traceparent"][3:52] == parent.strip(" \t")[3:52]
    return found if is_callers else {}


def test_the_standards_own_example() -> None:
    state = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"
    assert passed_on(GOOD, state) == {"traceparent": GOOD, "tracestate": state}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        GOOD.upper(),
        f"00-{TRACE}-{SPAN}",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\r\nx-evil: 1",
        f"{GOOD},{GOOD}",
        "00-" + "٣" * 32 + f"-{SPAN}-01",
    ],
)
def test_invalid_traceparents_are_ignored(header: str) -> None:
    assert passed_on(header) == {}


def test_a_later_version_may_say_more() -> None:
    assert passed_on(f"cc-{TRACE}-{SPAN}-01-what-the-future-brings") == {"traceparent": GOOD}


@pytest.mark.parametrize("state", ["a=1\r\nx-evil: 1", "ä=1", "a=" + "1" * 600, ""])
def test_a_state_that_is_not_the_standards_is_left_out(state: str) -> None:
    assert passed_on(GOOD, state) == {"traceparent": GOOD}


@given(
    trace_id=st.integers(1, 2**128 - 1),
    span_id=st.integers(1, 2**64 - 1),
    flags=st.integers(0, 3),
)
def test_a_callers_context_goes_on_as_it_came(trace_id: int, span_id: int, flags: int) -> None:
    header = f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"
    assert passed_on(header) == {"traceparent": header}


@given(st.text(max_size=200))
def test_no_header_is_too_odd(header: str) -> None:
    headers = {"traceparent": header, "tracestate": header, "baggage": header}
    assert all(
        "\n" not in value and "\r" not in value
        for made in (headers, headers | {"traceparent": GOOD})
        for value in WITH_BAGGAGE.begin("r", headers=made).headers().values()
    )


@pytest.mark.parametrize("unit", ["a", "a=1,", "=", ",", "%41", " \t", "a=b;c=d,", "-", "0"])
def test_long_headers_cost_little_and_go_on_bounded(unit: str) -> None:
    """64 KiB each: the most that the HTTP edge lets through."""
    long = unit * (65536 // len(unit))
    headers = {"traceparent": f"01-{TRACE}-{SPAN}-01-{long}", "tracestate": long, "baggage": long}
    begun_s = time.thread_time()
    for made in (headers, headers | {"traceparent": GOOD}, headers | {"traceparent": long}):
        sent = WITH_BAGGAGE.begin("r", headers=made).headers()
        assert sum(map(len, sent.values())) < 16384
    assert time.thread_time() - begun_s < 0.25


def test_baggage_goes_on_where_it_is_asked_for() -> None:
    headers = {"traceparent": GOOD, "baggage": "user=7"}
    assert ALONE.begin("r", headers=headers).headers() == {"traceparent": GOOD}
    assert WITH_BAGGAGE.begin("r", headers=headers).headers() == headers


def test_unknown_propagators_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"unknown b4; available: .*baggage.*tracecontext"):
        propagator("b4,tracecontext")
    assert tracer("none").begin("r", headers={"traceparent": GOOD}).headers() == {}
