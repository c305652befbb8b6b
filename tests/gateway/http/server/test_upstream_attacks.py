"""Hostile servers, hostile and clumsy clients: what a gateway with upstream tiers must not do."""

import asyncio
import gzip
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.shared.mock_upstream import MockScript
from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import ThrottledError
from outrider.gateway.settings.tiers import TimeoutSettings
from outrider.gateway.upstream.retry_after import asked_wait_s
from outrider.gateway.upstream.transport import Transport
from tests.gateway.conftest import OpenWorld, wait_for
from tests.gateway.hostile import (
    CHUNKED,
    FINE,
    JSON,
    Asked,
    Hostile,
    Play,
    hostile,
    piece,
    streamed,
)
from tests.gateway.hybrid import CHAT, LOCAL_TEXT, World
from tests.gateway.upstream.raw_server import (
    LAST_CHUNK,
    Connection,
    answering,
    chunk,
    raw_server,
    whole,
)

Encode = Callable[[str], list[int]]
Make = Callable[..., Any]

KEY = "sk-outrider-do-not-tell-0123456789"
SECRET = "the launch code is 7291"
SHORT = {"connect_s": 2, "first_token_s": 2, "between_tokens_s": 2, "total_s": 8}
BODY = (
    b'{"id":"far-1","object":"chat.completion","choices":[{"index":0,"finish_reason":"stop",'
    b'"message":{"role":"assistant","content":"Far away."}}]'
)


@pytest.fixture
def make(open_world: OpenWorld) -> Make:
    return open_world


@contextmanager
def facing(
    make: Make, answer: bytes | Play = FINE, **options: Any
) -> Iterator[tuple[World, Hostile]]:
    """A gateway whose upstream tier is a server that sends just these bytes."""
    with hostile(answer) as far:
        tier = {"url": far.url, "timeouts": SHORT, **options.pop("tier", {})}
        with make(tier=tier, clouds=(), **options) as world:
            yield world, far
            at_rest(world)


def forgive(world: World) -> None:
    """As if the server had never failed."""
    for replica in world.context.upstream.tiers["cloud"].replicas.replicas:
        replica.breaker.held_until_s = 0.0
        replica.breaker._enter("closed")


def at_rest(world: World) -> None:
    """Nothing is in flight any more, here or there."""
    tiers = world.context.upstream.tiers.values()
    replicas = [replica for tier in tiers for replica in tier.replicas.replicas]
    wait_for(lambda: not any(replica.in_flight for replica in replicas))
    wait_for(lambda: not world.engine.running)


def reply(body: bytes, *, status: str = "200 OK", headers: str = JSON) -> bytes:
    return whole(body, status=status, headers=headers)


def error_of(response: httpx.Response) -> dict[str, Any]:
    told: dict[str, Any] = response.json()["error"]
    assert told["message"]
    return told


# ---- what is sent to servers --------------------------------------------------------------------


def test_nothing_of_the_clients_own_headers_is_sent_on(make: Make) -> None:
    environ = {"CLOUD_KEY": KEY}
    with facing(make, tier={"api_key_env": "CLOUD_KEY"}, environ=environ) as (world, far):
        far.answer = reply(BODY + b"}")
        mine = {
            "authorization": "Bearer the-clients-own",
            "cookie": "session=the-clients-own",
            "x-api-key": "the-clients-own",
            "api-key": "the-clients-own",
            "proxy-authorization": "the-clients-own",
            "idempotency-key": "the-clients-own",
            "openai-organization": "the-clients-own",
            "x-forwarded-for": "10.9.8.7",
            "x-request-id": "the-clients-own\tid",
            "x-outrider-hops": "the clients own, ok-1, " + "x" * 500,
        }
        response = world.chat(model="cloud", headers=mine)
        assert response.status_code == 200, response.text
        sent = far.asked[0].headers
        assert sent["authorization"] == f"Bearer {KEY}"
        assert sent["x-outrider-hops"] == f"ok-1, {world.context.upstream.gateway_id}"
        told = " ".join(f"{name}: {value}" for name, value in sent.items())
        for word in ("clients", "10.9.8.7", "xxx"):
            assert word not in told
        assert not {"cookie", "x-api-key", "api-key", "idempotency-key"} & set(sent)


def test_hops_in_several_headers_are_one_list(make: Make) -> None:
    with facing(make) as (world, far):
        own = world.context.upstream.gateway_id
        body = json.dumps({**CHAT, "model": "cloud"})
        headers = [
            ("content-type", "application/json"),
            ("x-outrider-hops", "abc"),
            ("x-outrider-hops", own),
        ]
        response = world.http.post("/v1/chat/completions", content=body, headers=headers)
        assert response.status_code == 508
        assert not far.asked


@pytest.mark.slow_cases
@pytest.mark.parametrize("stream", [False, True])
def test_the_upstream_key_reaches_no_client(
    make: Make, stream: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Some servers and proxies repeat, in their errors, what they were sent."""
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "mirror.jsonl"
    words = json.dumps({"error": {"message": f"Bad header Authorization: Bearer {KEY}"}}).encode()
    answers = {
        **{
            status: reply(words, status=f"{status} X")
            for status in (400, 401, 402, 403, 404, 407, 418, 422, 429, 500, 503)
        },
        "html": reply(f"<pre>{KEY}</pre>".encode(), status="400 X"),
        "plain": reply(json.dumps(f"{KEY}").encode(), status="422 X"),
        "type": reply(BODY + b"}", headers=f"content-type: text/{KEY}\r\n"),
        "late": CHUNKED + chunk(piece("Far ") + b"data: " + words + b"\n\n") + LAST_CHUNK,
        "early": CHUNKED + chunk(b"data: " + words + b"\n\n") + LAST_CHUNK,
        "whole": reply(words),
        "header": f"HTTP/1.1 200 OK\r\n{KEY}\x00: x\r\n\r\n".encode(),
    }
    tier = {"api_key_env": "CLOUD_KEY", "headers": {"x-org": f"org {KEY}"}}
    with facing(
        make,
        tier=tier,
        environ={"CLOUD_KEY": KEY},
        mirror={"tier": "cloud", "share": 1.0, "file": str(file)},
    ) as (world, far):
        for name, answer in answers.items():
            far.answer = answer
            for policy in ("cloud_only", "prefer_cloud"):
                forgive(world)
                response = world.chat(stream=stream, outrider={"policy": policy})
                # The type of a whole answer is not looked at: what it says is what counts.
                is_read = name == "type" and not stream
                assert KEY not in response.text or is_read, (name, response.text)
                assert KEY not in str(response.headers)
                assert far.asked[-1].headers["authorization"] == f"Bearer {KEY}"
        assert KEY not in world.http.get("/metrics").text
        assert KEY not in repr(world.context.upstream)
        wait_for(lambda: [*tmp_path.glob("mirror-*")])
    (written,) = tmp_path.glob("mirror-*")
    assert KEY not in written.read_text()
    assert KEY not in caplog.text
    assert written.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_prompts_are_in_no_log(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    messages = [{"role": "user", "content": SECRET}]
    with facing(make, handoff={"policy": "prefer_cloud", "continue_on_failure": True}) as (w, far):
        echo = json.dumps({"error": {"message": SECRET}}).encode()
        cut = CHUNKED + chunk(piece(SECRET)) + b"zz\r\n"
        for answer in (
            FINE,
            streamed(piece(SECRET), piece(finish="stop")),
            cut,
            reply(echo, status="400 X"),
            reply(echo, status="500 X"),
            reply(BODY + b"}"),
            reply(SECRET.encode()),
            reply(SECRET.encode(), headers=f"content-type: {SECRET}\r\n"),
            CHUNKED + chunk(piece("a") + b"data: " + echo + b"\n\n") + LAST_CHUNK,
        ):
            far.answer = answer
            for stream in (False, True):
                forgive(w)
                w.chat(messages=messages, stream=stream, user=SECRET)
                w.chat(messages=messages, stream=stream, outrider={"privacy": SECRET})
                w.chat(messages=messages, stream=stream, model=f"cloud/{SECRET}")
                w.chat(messages=messages, temperature=SECRET)
    assert SECRET not in caplog.text


# ---- what servers send --------------------------------------------------------------------------

_ODD: dict[str, bytes] = {
    "nothing": b"",
    "not http": b"\x15\x03\x01 hello\r\n\r\n",
    "101": b"HTTP/1.1 101 X\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    "204": b"HTTP/1.1 204 X\r\n\r\n",
    "301": reply(b"", status="301 X", headers="location: http://127.0.0.1:1/\r\n"),
    "600": reply(b"{}", status="600 X"),
    "999": reply(b"{}", status="999 X"),
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\n{}",
    "null byte": b"HTTP/1.1 200 OK\r\nx: a\x00b\r\ncontent-length: 2\r\n\r\n{}",
    "5000 headers": b"HTTP/1.1 200 OK\r\n"
    + b"".join(b"x%d: y\r\n" % number for number in range(5000))
    + b"content-length: 2\r\n\r\n{}",
    "long header": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
    "gzip bomb": reply(
        gzip.compress(b"[" + b" " * 100_000_000, 1), headers=f"content-encoding: gzip\r\n{JSON}"
    ),
    "no gzip": reply(b"zzz", headers=f"content-encoding: gzip\r\n{JSON}"),
    "deep": reply(BODY + b',"z":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "list": reply(b"[]"),
    "scalar": reply(b"5"),
    "no choices": reply(b'{"choices":[]}'),
    "null choice": reply(b'{"choices":[null]}'),
    "error": reply(b'{"error":"x","choices":[]}'),
    "half a chunk": CHUNKED + b"5\r\nda",
    "bad chunk": CHUNKED + b"zz\r\n",
    "no event": CHUNKED + LAST_CHUNK,
    "comments": CHUNKED + chunk(b": still there\n\n" * 40) + LAST_CHUNK,
    "scalar event": streamed(b"data: 5\n\n"),
    "lone surrogate": streamed(piece("a").replace(b'"a"', b'"\\ud83d"')),
    "bad text": streamed(b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n'),
    "huge index": streamed(b'data: {"choices":[{"index":1e30,"delta":{"content":"a"}}]}\n\n'),
}


@pytest.mark.slow
def test_an_invalid_upstream_answer_is_a_clean_error_or_the_local_answer(make: Make) -> None:
    with facing(make, lambda connection, _: _hang_up(connection)) as (world, far):
        for name, answer in _ODD.items():
            if answer:
                far.answer = _once(answer)
            for stream in (False, True):
                forgive(world)
                failed = world.chat(model="cloud", stream=stream)
                assert failed.status_code == 502, (name, failed.text)
                assert error_of(failed)["code"].startswith("upstream_")
                forgive(world)
                kept = world.chat(outrider={"policy": "prefer_cloud"}, stream=stream)
                assert kept.status_code == 200, (name, kept.text)
                assert kept.headers["x-outrider-degraded"] == "true"
        at_rest(world)


async def _hang_up(connection: Connection) -> None:
    connection.writer.close()


def _once(answer: bytes) -> Play:
    async def play(connection: Connection, asked: Asked) -> None:
        await connection.send(answer)
        connection.writer.close()

    return play


_UNREAD = (
    b',"created":1e999',
    b',"z":"\xff\xfe"',
    b',"outrider":{},"outrider":[1]',
    b',"id":7',
    b',"usage":{"prompt_tokens":1e300,"completion_tokens":1e300}',
    b',"usage":{"prompt_tokens":-5,"completion_tokens":-5}',
)


def test_unknown_fields_break_nothing(make: Make) -> None:
    events = (piece("Far "), piece("away."), piece(finish="stop"))
    with facing(make) as (world, far):
        for field in _UNREAD:
            far.answer = reply(BODY + field + b"}")
            response = world.chat(model="cloud")
            assert response.status_code == 200, response.text
            text = response.content.decode(errors="replace").replace("1e999", "1")
            told = json.loads(text)
            assert told["choices"][0]["message"]["content"] == "Far away."
            assert told["outrider"]["tier"] == "cloud"
            far.answer = streamed(*(event.replace(b"}\n\n", field + b"}\n\n") for event in events))
            for options in (None, {"include_usage": True}):
                response = world.chat(model="cloud", stream=True, stream_options=options)
                raw = response.content.decode(errors="replace")
                assert "internal_error" not in raw
                assert raw.endswith("data: [DONE]\n\n")
                assert '"tier":"cloud"' in raw
        # What goes into our own numbers stays a number that every reader takes.
        huge = b'{"choices":[],"usage":{"prompt_tokens":1e300,"completion_tokens":1e300}}'
        far.answer = CHUNKED + chunk(piece("Far ") + b"data: " + huge + b"\n\n") + LAST_CHUNK
        broken = world.stream(model="cloud")
        assert broken.error is not None
        assert 0 < broken.report["completion_tokens"] < 2**53


def test_text_keeps_its_order_wherever_the_reason_to_end_stands(make: Make) -> None:
    """Some servers say it with the last text, some twice, some too early."""
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n'
    endings = (
        (piece("Far "), piece("away.", finish="stop"), piece(finish="stop")),
        (piece("Far ", finish="stop"), piece("away.")),
        (piece("Far ", finish="stop"), b": ping\n\n", piece("away.", finish="stop"), usage),
        (b": ping\n\n", b"data:\n\n", piece("Far "), piece("away.", finish="stop"), b": pong\n\n"),
        (piece("Far "), piece("away."), b'data: {"choices":[{"delta":null}]}\n\n', usage),
    )
    with facing(make) as (world, far):
        for events in endings:
            far.answer = streamed(*events)
            for options in (None, {"include_usage": True}):
                read = world.chat(model="cloud", stream=True, stream_options=options)
                events_read = [e for e in read.text.split("\n\n") if e.startswith("data: {")]
                chunks = [json.loads(event[6:]) for event in events_read]
                choices = [choice for told in chunks for choice in told["choices"]]
                text = "".join((choice["delta"] or {}).get("content") or "" for choice in choices)
                assert text == "Far away.", events
                assert [told["outrider"]["tier"] for told in chunks if "outrider" in told] == [
                    "cloud"
                ]
                assert read.text.endswith("data: [DONE]\n\n")


def test_a_comment_first_does_not_cost_the_answers_id(make: Make) -> None:
    async def late(connection: Connection, asked: Asked) -> None:
        await connection.send(CHUNKED + chunk(b": processing\n\n") + chunk(piece("Far ")))
        await asyncio.sleep(0.05)
        await _hang_up(connection)

    with facing(make, late, handoff={"policy": "prefer_cloud", "continue_on_failure": True}) as (
        world,
        far,
    ):
        read = world.chat(stream=True)
        events = [e[6:] for e in read.text.split("\n\n") if e.startswith("data: {")]
        assert {json.loads(event)["id"] for event in events} == {"far-1"}
        assert read.text.endswith("data: [DONE]\n\n")
        assert len(far.asked) == 1


def test_an_event_named_error_is_one(make: Make) -> None:
    failed = b'event: error\ndata: {"message": "out of memory"}\n\n'
    with facing(make, streamed(piece("Far "), failed)) as (world, far):
        streamed_answer = world.stream(model="cloud")
        assert streamed_answer.error is not None
        assert streamed_answer.error["code"] == "upstream_reported"
        assert not streamed_answer.is_done
        far.answer = streamed(failed)
        kept = world.stream(outrider={"policy": "prefer_cloud"})
        assert kept.text == LOCAL_TEXT


def test_nothing_of_the_servers_headers_comes_through(make: Make) -> None:
    headers = "set-cookie: a=b\r\nx-outrider-tier: none\r\nlocation: /x\r\nx-secret: y\r\n" + JSON
    with facing(make, reply(BODY + b"}", headers=headers)) as (world, _):
        response = world.chat(model="cloud")
        assert response.headers["x-outrider-tier"] == "cloud"
        assert not {"set-cookie", "location", "x-secret"} & set(response.headers)


def test_refusals_are_bounded_and_json_whatever_the_server_says(make: Make) -> None:
    bodies = (b"<html>no</html>", b"x" * 3_000_000, b"[1]", b'{"error":{"message":"\xff"}}', b"")
    with facing(make) as (world, far):
        for body in bodies:
            for stream in (False, True):
                far.answer = reply(body, status="400 X", headers="content-type: text/html\r\n")
                response = world.chat(model="cloud", stream=stream)
                assert response.status_code == 400
                assert response.headers["content-type"] == "application/json"
                assert len(response.content) < 70_000
                assert "cloud tier refused" in error_of(response)["message"]


def test_errors_of_the_settings_are_not_blamed_on_the_request(make: Make) -> None:
    """No credit left, a wrong path, a model that is gone: the local models answer."""
    with facing(make) as (world, far):
        for status in (402, 404, 405, 407):
            far.answer = reply(b'{"error":{"message":"no"}}', status=f"{status} X")
            forgive(world)
            response = world.chat(outrider={"policy": "prefer_cloud"})
            assert response.status_code == 200, response.text
            assert response.json()["outrider"]["degraded"] is True
            named = world.chat(model="cloud").status_code
            assert named == (status if status in (404, 405) else 502)


def test_odd_waits_are_told_to_clients_as_sane_ones(make: Make) -> None:
    """One replica asks for a wait, the other one breaks off: then the wait is all that is known."""
    far_off = "Fri, 31 Dec 9999 23:59:59 GMT"
    with (
        hostile() as one,
        hostile(lambda connection, _: _hang_up(connection)) as two,
        make(clouds=(), tier={"url": f"{one.url},{two.url}", "max_retries": 2}) as world,
    ):
        for wait in ("9" * 400, "1e9", "-1", "nan", ".", far_off, "Fri", "0"):
            one.answer = reply(b"{}", status="503 X", headers=f"retry-after: {wait}\r\n{JSON}")
            forgive(world)
            response = world.chat(model="cloud", outrider={"deadline_ms": 150})
            assert response.status_code in (502, 503, 504, 429), response.text
            assert (asked_wait_s({"retry-after": wait}) or 0.0) <= 86_400
            if "retry-after" in response.headers:
                assert 1 <= int(response.headers["retry-after"]) <= 86_400
                assert 1 <= int(response.headers["retry-after-ms"]) <= 86_400_000
    for wait_s in (0.0, 1e9, float("inf")):
        told = problem_of(ThrottledError("Too much.", retry_after_s=wait_s)).headers
        assert 1 <= int(told["retry-after"]) <= 86_400


def test_a_list_of_models_is_not_trusted(make: Make) -> None:
    """Far too many, far too long, with line feeds, or ours."""
    ids = ["auto", "small", "cloud", "a\nb", "\u202ex", "x" * 10_000, "", *map(str, range(50_000))]
    listing = json.dumps({"data": [{"id": name} for name in ids]}).encode()
    with hostile() as far:
        far.models = whole(listing, headers=JSON)
        with make(clouds=(), tier={"url": far.url, "model": "m"}) as world:
            cards = world.http.get("/v1/models").json()["data"]
            assert len(cards) < 3000
            assert all(card["id"].isprintable() and len(card["id"]) < 300 for card in cards)
            owners = {card["id"]: card["owned_by"] for card in cards}
            assert owners["auto"] == owners["small"] == "outrider"
            missing = world.chat(model="nobody")
            assert missing.status_code == 404
            assert len(missing.content) < 2000
            assert world.chat().json()["outrider"]["tier"] == "small"


# ---- names, doubles, slips ----------------------------------------------------------------------


def test_a_models_name_is_text_in_the_body_and_nothing_else(make: Make) -> None:
    names = (
        "../../admin",
        "a\r\nx-evil: 1",
        "\u2028\u0000\U0001f600",
        "/",
        "x" * 500,
        "%2e%2e%2f?x=1#y",
    )
    with facing(make) as (world, far):
        for name in names:
            response = world.chat(model=f"cloud/{name}", stream=True)
            assert response.status_code == 200, response.text
            asked = far.asked[-1]
            assert json.loads(asked.body)["model"] == name
            assert "x-evil" not in asked.headers
            assert "x-evil" not in response.headers
            assert response.headers["x-outrider-tier"] == "cloud"


def test_a_models_name_has_a_limit(make: Make) -> None:
    with facing(make) as (world, far):
        for name in ("x" * 1_000_000, "cloud/" + "x" * 1_000_000, "", 5, None, ["cloud"]):
            response = world.chat(model=name)
            assert response.status_code == 400, name
            assert len(response.content) < 1000
        assert not far.asked


def post(world: World, fields: str, path: str = "/v1/chat/completions") -> httpx.Response:
    body = '{"model":"auto","messages":[{"role":"user","content":"Hello"}],' + fields + "}"
    headers = {"content-type": "application/json"}
    return world.http.post(path, content=body.encode(), headers=headers)


_SLIPS = (
    '"privacy":"private"',
    '"Privacy":"Private"',
    '"private":true',
    '"is_private":1',
    '"Outrider":{"privacy":"private"}',
    '"OUTRIDER":{}',
    '"outrider ":{"privacy":"private"}',
    '"outrider.privacy":"private"',
    '"outrider_privacy":"private"',
    '"x-outrider":{"privacy":"private"}',
    '"extra_body":{"outrider":{"privacy":"private"}}',
    '"extra_body":{"privacy":"private"}',
    '"metadata":{"privacy":"private"}',
    '"metadata":{"outrider":"private"}',
    '"provider":{"privacy":"private"}',
    '"outrider":{"privacy":"private"},"outrider":{}',
    '"outrider":{},"outrider":{"policy":"prefer_cloud"}',
    '"outrider":{"privacy":"private","privacy":null}',
    '"outrider":{"privacy":"private"},"outrider":null',
    '"outrider":{"privacy":"Private"}',
    '"outrider":{"privacy":" private"}',
    '"outrider":{"privacy":true}',
    '"outrider":{"Privacy":"private"}',
    '"outrider":{"private":true}',
    '"outrider":"private"',
    '"outrider":[{"privacy":"private"}]',
    '"outrider":{"outrider":{"privacy":"private"}}',
)


@pytest.mark.slow_cases
@pytest.mark.parametrize("policy", ["prefer_local", "prefer_cloud", "cloud_only"])
def test_a_misspelt_private_option_is_not_sent_upstream(make: Make, policy: str) -> None:
    with facing(make, handoff={"policy": policy}) as (world, far):
        for fields in _SLIPS:
            for path in ("/v1/chat/completions", "/v1/route"):
                response = post(world, fields, path)
                assert response.status_code == 400, (fields, response.text)
                error_of(response)
        assert not far.asked
        assert not world.engine.submitted


def test_options_that_only_look_misplaced_are_accepted(make: Make) -> None:
    with facing(make) as (world, far):
        fine = (
            '"outrider":null',
            '"outrider":{"privacy":null}',
            '"metadata":{"topic":"privacy","private":"no","about":"outrider"}',
            '"user":"outrider privacy private"',
        )
        for fields in fine:
            assert post(world, fields).status_code == 200, fields
        for said in ('"outrider" "outrider" "privacy"', 'Is "privacy": "private" right?'):
            assert world.chat(messages=[{"role": "user", "content": said}]).status_code == 200
        assert not far.asked


def test_options_that_are_given_twice_are_refused_whichever_way_they_are_spelt(make: Make) -> None:
    """Readers of JSON may take the first or the last of two."""
    doubled = (
        '"outrider":{},"\\u006futrider":{"privacy":"private"}',
        '"outrider":{},"outrider":{}',
    )
    with facing(make, handoff={"policy": "prefer_cloud"}) as (world, far):
        for fields in doubled:
            assert post(world, fields).status_code == 400, fields
        assert not far.asked


_BAD = (
    '"stream":"true"',
    '"n":"2"',
    '"n":129',
    '"n":0',
    '"n":1.5',
    '"temperature":"hot"',
    '"max_tokens":-2',
    '"seed":123456789012345678901234567890',
    '"stream_options":{"include_usage":"yes"}',
    '"x":1e400',
    '"x":NaN',
    '"x":"\\ud800"',
    '"outrider":{"deadline_ms":0}',
    '"outrider":{"deadline_ms":1e400}',
    '"outrider":{"deadline_ms":"1"}',
    '"outrider":{"max_cost_usd":-1}',
    '"x":' + "[" * 5000 + "]" * 5000,
)


def test_bad_values_are_refused_before_anybody_is_asked(make: Make) -> None:
    with facing(make, handoff={"policy": "prefer_cloud"}) as (world, far):
        for fields in _BAD:
            response = post(world, fields)
            assert response.status_code == 400, response.text
            error_of(response)
        assert not far.asked


def test_many_choices_are_the_servers_business(make: Make) -> None:
    with facing(make, reply(BODY + b"}")) as (world, far):
        assert world.chat(model="cloud", n=128).status_code == 200
        assert json.loads(far.asked[0].body)["n"] == 128
        assert world.chat(n=128).status_code == 400  # more than the local models write
        assert len(far.asked) == 1


def test_a_limit_on_costs_counts_every_answer_that_is_written(make: Make) -> None:
    price = {"prompt": 1.0, "completion": 1000.0}
    with facing(make, tier={"price": price}) as (world, far):
        asked = {"model": "cloud", "max_tokens": 10, "outrider": {"max_cost_usd": 0.05}}
        for dear in (
            {"prompt": "a", "best_of": 20},
            {"prompt": ["a"] * 20},
            {"prompt": [[1], [2], [3], [4], [5], [6]]},
            {"prompt": "a", "n": 20},
        ):
            response = world.http.post("/v1/completions", json={**asked, **dear})
            assert response.status_code == 400, (dear, response.text)
            assert error_of(response)["param"] == "outrider.max_cost_usd"
        assert not far.asked


def test_a_request_one_server_cannot_take_is_answered_by_another(make: Make) -> None:
    with facing(make, tier={"server": "anthropic"}) as (world, far):
        assert world.chat(model="cloud", n=2).status_code == 400
        response = world.chat(n=2, outrider={"policy": "prefer_cloud"})
        assert response.status_code == 200, response.text
        assert len(response.json()["choices"]) == 2
        assert not far.asked


# ---- privacy ------------------------------------------------------------------------------------


def test_private_questions_wait_for_no_server_and_ask_none(make: Make) -> None:
    """Also where only the server knows its models' names, and does not answer."""
    with hostile() as far:
        far.models = b""  # takes the question and is silent
        with make(clouds=(), tier={"url": far.url, "model": None}) as world:
            private = {"outrider": {"privacy": "private"}, "messages": CHAT["messages"]}
            started_s = time.monotonic()
            for path in ("/v1/route", "/v1/chat/completions"):
                asked = {"model": "auto", **private}
                response = world.http.post(path, json=asked)
                assert response.status_code == 200, response.text
            assert world.chat().status_code == 200  # nor do others that the local models answer
            assert time.monotonic() - started_s < 2.0
            assert not far.asked


def test_requests_for_local_models_are_not_mirrored(make: Make) -> None:
    with make(mirrored=MockScript(), mirror={"tier": "shadow", "share": 1.0}) as world:
        for options in ({"policy": "local_only"}, {"privacy": "private"}):
            for stream in (False, True):
                world.chat(outrider=options, stream=stream)
        world.chat()
        shadow = world.clouds[-1]
        wait_for(lambda: len(shadow.requests) == 1)
        shadow.settled()
        assert len(shadow.requests) == 1


# ---- floods -------------------------------------------------------------------------------------


def endless(data: bytes) -> Play:
    """A stream without an end, as fast as it is taken."""

    async def play(connection: Connection, asked: Asked) -> None:
        await connection.send(CHUNKED)
        while True:
            await connection.send(chunk(data))

    return play


@pytest.mark.slow
def test_an_endless_stream_without_text_is_cut_off(make: Make) -> None:
    with facing(make) as (world, far):
        for data in (b":" + b"x" * 60_000 + b"\n\n", piece() * 500, b"data:\n\n" * 9000):
            far.answer = endless(data)
            forgive(world)
            response = world.chat(model="cloud", stream=True)
            assert error_of(response)["code"] == "upstream_too_large"
            assert world.stream(outrider={"policy": "prefer_cloud"}).text == LOCAL_TEXT


def test_done_alone_is_no_answer(make: Make) -> None:
    with facing(make) as (world, far):
        for events in ((), (b": ping\n\n",), (piece(),)):
            far.answer = streamed(*events)
            forgive(world)
            response = world.chat(model="cloud", stream=True)
            assert error_of(response)["code"] == "upstream_ended_early"
            assert world.stream(outrider={"policy": "prefer_cloud"}).text == LOCAL_TEXT


def test_comments_now_and_then_are_no_answer(make: Make) -> None:
    async def play(connection: Connection, asked: Asked) -> None:
        await connection.send(CHUNKED)
        while True:
            await connection.send(chunk(b": still there\n\n"))
            await asyncio.sleep(0.02)

    timeouts = {**SHORT, "first_token_s": 0.3}
    with facing(make, play, tier={"timeouts": timeouts}) as (world, far):
        response = world.chat(model="cloud", stream=True)
        assert error_of(response)["code"] == "upstream_first_token_timeout"
        wait_for(lambda: not far.num_open)


def test_unread_answers_are_not_fetched_from_upstream(make: Make) -> None:
    """A client that stops reading stops the upstream server: nothing piles up between them."""
    sent = 0

    async def play(connection: Connection, asked: Asked) -> None:
        nonlocal sent
        await connection.send(CHUNKED)
        while True:
            data = chunk(piece("x" * 1000) * 50)
            await connection.send(data)
            sent += len(data)

    with facing(make, play) as (world, far):
        body = json.dumps({**CHAT, "model": "cloud", "stream": True})
        host, port = httpx.URL(world.url).host, httpx.URL(world.url).port
        with socket.create_connection((host, port or 0)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\n"
                + f"content-length: {len(body)}\r\n\r\n{body}".encode()
            )
            assert client.recv(100)
            before = -1
            while before != sent:  # until nothing moves any more
                before = sent
                time.sleep(0.15)
            assert sent < 24_000_000  # what the sockets' own buffers take
        wait_for(lambda: not far.num_open)


def test_many_tiny_events_do_not_delay_other_requests() -> None:
    """Whoever shares the event loop has a turn every few events, not one for each packet."""
    many = CHUNKED + chunk(piece("a") + b":\n\n" * 100_000) + LAST_CHUNK
    num_read = 0
    seen = [0]

    async def watch() -> None:
        while True:
            seen.append(num_read)
            await asyncio.sleep(0)

    async def read() -> None:
        nonlocal num_read
        transport = Transport(tier="cloud", timeouts=TimeoutSettings(), max_connections=1)
        await transport.start()
        watching = asyncio.create_task(watch())
        try:
            async with raw_server(answering(many)) as server:
                response = await transport.post(f"{server.url}/chat/completions", {}, b"{}")
                async for _ in response.events():
                    num_read += 1
        finally:
            watching.cancel()
            await transport.close()

    asyncio.run(read())
    assert num_read == 100_001
    assert max(later - earlier for earlier, later in pairwise(seen)) <= 100
