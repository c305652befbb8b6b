"""A request's headers, read once: the same as Starlette finds."""

from starlette.datastructures import Headers

from outrider.gateway.http.server.request_headers import RequestHeaders

RAW = [(b"accept", b"a"), (b"x-Odd", b"\xe4"), (b"accept", b"b"), (b"empty", b"")]


def test_lookups_are_starlette_s() -> None:
    ours, theirs = RequestHeaders({"headers": RAW}), Headers(raw=RAW)
    for name in ("accept", "Accept", "empty", "x-odd", "absent"):
        assert ours.get(name) == theirs.get(name), name
        assert ours.get(name, "-") == theirs.get(name, "-"), name
        assert (name in ours) is (name in theirs), name
        assert ours.getlist(name) == theirs.getlist(name), name
    assert list(ours) == list(theirs)
    assert ours["accept"] == "a"
    assert ours == theirs
