"""The same events come out however the network cuts the bytes, and no byte is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.upstream.event_stream import EventSplitter, event_data


def split(*pieces: bytes) -> tuple[list[bytes], bytes]:
    splitter = EventSplitter()
    events = [event for piece in pieces for event in splitter.push(piece)]
    return events, splitter.rest


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_an_event_ends_at_its_blank_line(end: bytes) -> None:
    first = b"event: x" + end + b"data: 1" + end + end
    second = b": ping" + end + end
    assert split(first + second + b"data: half") == ([first, second], b"data: half")


def test_events_come_out_as_soon_as_they_are_whole() -> None:
    splitter = EventSplitter()
    assert splitter.push(b"data: a\n") == []
    assert splitter.num_held_bytes == 8
    assert splitter.push(b"\ndata: b\n\nda") == [b"data: a\n\n", b"data: b\n\n"]
    assert splitter.rest == b"da"
    assert splitter.push(b"ta: c\r\n\r\n") == [b"data: c\r\n\r\n"]
    assert splitter.rest == b""


LINES = st.sampled_from([b"data: {}", b"data:x", b"data", b": hi", b"event: e", b"", b"\xff\x00"])
STREAMS = st.one_of(
    st.tuples(st.lists(LINES), st.sampled_from([b"\n", b"\r\n", b"\r"])).map(
        lambda drawn: b"".join(line + drawn[1] for line in drawn[0])
    ),
    st.lists(st.sampled_from([b"\r", b"\n", b"d", b":"]), max_size=30).map(b"".join),
)


@given(STREAMS, st.lists(st.integers(0, 60), max_size=8))
def test_any_cut_gives_the_same_events(stream: bytes, cuts: list[int]) -> None:
    ends = [*sorted(cuts), len(stream)]
    pieces = [stream[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    events, rest = split(*pieces)
    assert (events, rest) == split(stream)
    assert (events, rest) == split(*(stream[i : i + 1] for i in range(len(stream))))
    assert b"".join(events) + rest == stream


def spoken(stream: bytes, line_end: bytes) -> list[bytes]:
    """The data of all whole events, line by line as the standard says it."""
    found = []
    lines: list[bytes] = []
    for line in stream.split(line_end)[:-1]:
        if line == b"":
            if lines:
                found.append(b"\n".join(lines))
            lines = []
        elif line == b"data":
            lines.append(b"")
        elif line.startswith(b"data:"):
            value = line[len(b"data:") :]
            lines.append(value[1:] if value.startswith(b" ") else value)
    return found


@given(st.lists(LINES), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_events_say_what_the_standard_says(lines: list[bytes], line_end: bytes) -> None:
    stream = b"".join(line + line_end for line in lines)
    said = [event_data(event) for event in split(stream)[0]]
    assert [data for data in said if data is not None] == spoken(stream, line_end)


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b'data: {"a": 1}\n\n', b'{"a": 1}'),
        (b'data:{"a": 1}\n\n', b'{"a": 1}'),
        (b'data: {"a": 1}\r\n\r\n', b'{"a": 1}'),
        (b"data: x\r\n\n", b"x"),
        (b"data: x\rdata: y\n\n", b"x\ny"),
        (b"data: x\r\r", b"x"),
        (b"data:  x \n\n", b" x "),
        (b"event: ping\ndata:  x \n\n", b" x "),
        (b"event: ping\ndata: one\ndata: two\nid: 7\n\n", b"one\ntwo"),
        (b"\xef\xbb\xbfdata: x\n\n", b"x"),
        (b"\ndata: x\n\n", b"x"),
        (b"data\n\n", b""),
        (b"data: \n\n", b""),
        (b"database: x\n\n", None),
        (b": data: x\n\n", None),
        (b"event: ping\n\n", None),
        (b"\n\n", None),
    ],
)
def test_the_data_of_an_event(event: bytes, data: bytes | None) -> None:
    assert event_data(event) == data


@pytest.mark.parametrize(
    ("stream", "last", "rest"),
    [
        (b"data: [DONE]\n", [b"data: [DONE]\n\n"], b""),
        (b"data: [DONE]\r\n", [b"data: [DONE]\r\n\r\n"], b""),
        (b"data: [DONE]\r", [b"data: [DONE]\r\r"], b""),
        (b'data: {"cut', [], b'data: {"cut'),
        (b"data: x\n\n\n", [], b"\n"),
        (b"", [], b""),
    ],
)
def test_an_end_without_its_blank_line(stream: bytes, last: list[bytes], rest: bytes) -> None:
    splitter = EventSplitter()
    splitter.push(stream)
    assert splitter.finish() == last
    assert splitter.rest == rest


def test_a_long_event_is_searched_once() -> None:
    """Four megabytes in pieces of 64 bytes: copies or new searches would run into the timeout."""
    splitter = EventSplitter()
    piece = b"x" * 64
    for _ in range(1 << 16):
        assert splitter.push(piece) == []
    assert splitter.num_held_bytes == 1 << 22
    assert splitter.push(b"\n\n") == [piece * (1 << 16) + b"\n\n"]
