"""The headers of W3C Trace Context, as the standard has them and as attackers have them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.telemetry.traceparent import read_parent, traceparent

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_the_standards_own_example() -> None:
    parent = read_parent(GOOD, "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE")
    assert parent is not None
    assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == (TRACE, SPAN)
    assert parent.is_sampled
    assert parent.state == "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"
    assert parent.header() == GOOD


@pytest.mark.parametrize(
    "header",
    [
        None,
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
def test_invalid_traceparents_are_ignored(header: str | None) -> None:
    assert read_parent(header, None) is None


def test_a_later_version_may_say_more() -> None:
    parent = read_parent(f"cc-{TRACE}-{SPAN}-03-what-the-future-brings", None)
    assert parent is not None
    assert parent.header() == GOOD


@pytest.mark.parametrize("state", ["a=1\r\nx-evil: 1", "ä=1", "a=" + "1" * 600, ""])
def test_a_state_that_is_not_the_standards_is_left_out(state: str) -> None:
    parent = read_parent(GOOD, state)
    assert parent is not None
    assert parent.state == ""


@given(
    trace_id=st.integers(1, 2**128 - 1),
    span_id=st.integers(1, 2**64 - 1),
    is_sampled=st.booleans(),
)
def test_a_written_traceparent_is_read_back(trace_id: int, span_id: int, is_sampled: bool) -> None:
    parent = read_parent(traceparent(trace_id, span_id, is_sampled=is_sampled), None)
    assert parent is not None
    assert (parent.trace_id, parent.span_id) == (trace_id, span_id)
    assert parent.is_sampled is is_sampled


@given(st.text(max_size=200))
def test_no_header_is_too_odd(header: str) -> None:
    read_parent(header, header)
