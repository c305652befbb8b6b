"""Bodies in flight are bounded: for the whole gateway and for each key, and given back once."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.errors.tree import BodiesFullError, KeyBodiesFullError
from outrider.gateway.http.edge.bodies import BodyBudget
from outrider.gateway.http.edge.bounds import ConnectionBounds
from outrider.gateway.settings.http_bounds import HttpSettings
from outrider.gateway.settings.tree import SettingsError, load_settings
from tests.gateway.http.edge.gateways import Whole, whole_gateway
from tests.gateway.http.edge.serving import Served, answer, read_until, served, wait_for

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "small", "messages": [{"role": "user", "content": "Hi"}]}).encode()
CHUNKED = "Transfer-Encoding: chunked"
SHARE = 1_000


@pytest.fixture(scope="module")
def whole(tokenizer: ChatTokenizer) -> Whole:
    http = HttpSettings(max_bytes_in_flight=2_500, max_bytes_in_flight_per_key=SHARE)
    return whole_gateway(tokenizer, max_body_bytes=SHARE, http=http)


@pytest.fixture(scope="module")
def server(whole: Whole) -> Iterator[Served]:
    bounds = ConnectionBounds(header_timeout_s=5, body_timeout_s=5)
    with served(whole.app, bounds) as running:
        yield running


@pytest.fixture
def held(whole: Whole, server: Served) -> Iterator[Callable[[], float]]:
    """The bytes that the gateway's metrics report; none are left after each test."""
    assert whole.context.edge_metrics is not None
    gauge = whole.context.edge_metrics.body_bytes

    def value() -> float:
        return next(iter(gauge.collect())).samples[0].value

    yield value
    wait_for(lambda: not server.num_tasks)
    assert value() == 0
    with httpx.Client(base_url=server.url) as client:
        json_type = {"content-type": "application/json"}
        assert client.post(CHAT, content=BODY, headers=json_type).status_code == 200


def head(*lines: str) -> bytes:
    told = (f"POST {CHAT} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json")
    return "\r\n".join([*told, *lines, "", ""]).encode()


def test_a_declared_length_is_reserved_before_anything_is_read(
    server: Served, held: Callable[[], float]
) -> None:
    with server.connect() as first:
        first.sendall(head(f"Content-Length: {SHARE}"))
        wait_for(lambda: held() == SHARE)
        with server.connect() as second:
            second.sendall(head("Content-Length: 1", "Expect: 100-continue"))
            received = read_until(second, b"\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 1\r\n" in received


def test_a_body_in_chunks_is_reserved_as_it_comes(
    server: Served, held: Callable[[], float]
) -> None:
    with server.connect() as first, server.connect() as second:
        first.sendall(head(CHUNKED) + b"190\r\n" + b" " * 400 + b"\r\n")
        wait_for(lambda: held() == 400)
        second.sendall(head(CHUNKED) + b"258\r\n" + b" " * 600 + b"\r\n")
        wait_for(lambda: held() == SHARE)
        second.sendall(b"1\r\n \r\n")
        received = read_until(second, b"}}")
        refused = answer(received)
        assert (refused.status, refused.code) == (429, "too_many_bytes_in_flight")
        wait_for(lambda: held() == 400)


@pytest.mark.parametrize("length", ["9" * 21, "9" * 5_000])
def test_a_length_beyond_all_numbers_is_refused(
    server: Served, held: Callable[[], float], length: str
) -> None:
    received = server.ask(head(f"Content-Length: {length}", "Connection: close"))
    assert answer(received).status in (400, 413)


@pytest.mark.parametrize("encoding", ["gzip", "GZip", "deflate", "br", "identity, gzip", "x" * 300])
def test_a_compressed_body_is_refused(
    server: Served, held: Callable[[], float], encoding: str
) -> None:
    lines = (f"Content-Encoding: {encoding}", f"Content-Length: {len(BODY)}", "Connection: close")
    refused = answer(server.ask(head(*lines) + BODY))
    assert (refused.status, refused.code) == (415, "unsupported_content_encoding")
    assert len(refused.body) < 300


def test_a_second_content_encoding_does_not_hide_behind_the_first(
    server: Served, held: Callable[[], float]
) -> None:
    twice = ("Content-Encoding: identity", "Content-Encoding: gzip", "Connection: close")
    refused = answer(server.ask(head(*twice, f"Content-Length: {len(BODY)}") + BODY))
    assert refused.status == 415


def test_a_media_type_of_any_length_is_quoted_in_part(
    server: Served, held: Callable[[], float]
) -> None:
    lines = (
        f"POST {CHAT} HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {'x' * 9_000}",
        "Connection: close",
    )
    refused = answer(server.ask("\r\n".join([*lines, "", ""]).encode()))
    assert refused.status == 415
    assert len(refused.body) < 400


def test_no_order_of_things_passes_the_budget_or_loses_a_byte() -> None:
    rng = random.Random(7)
    budget = BodyBudget(max_bytes=100, max_bytes_per_owner=40)
    num_refused = {KeyBodiesFullError: 0, BodiesFullError: 0}
    for _ in range(200):
        with ExitStack() as stack:
            bodies = [(o, stack.enter_context(budget.hold(o))) for o in "abcd" for _ in range(3)]
            expected = dict.fromkeys("abcd", 0)
            sizes = [0] * len(bodies)
            for _ in range(30):
                index = rng.randrange(len(bodies))
                owner, body = bodies[index]
                wanted = rng.randrange(25)
                try:
                    body.reserve(wanted)
                except (KeyBodiesFullError, BodiesFullError) as error:
                    num_refused[type(error)] += 1
                else:
                    expected[owner] += max(wanted - sizes[index], 0)
                    sizes[index] = max(wanted, sizes[index])
                assert budget.num_bytes == sum(expected.values()) <= 100
                assert {o: budget.num_bytes_of(o) for o in "abcd"} == expected
                assert max(expected.values()) <= 40
        assert budget.num_bytes == 0
        assert not budget._by_owner
    assert all(num_refused.values())


def test_a_body_that_is_allowed_must_fit_into_a_share() -> None:
    with pytest.raises(SettingsError, match="max_bytes_in_flight_per_key"):
        load_settings(flags={"http.max_bytes_in_flight_per_key": 1_000_000}, environ={})
