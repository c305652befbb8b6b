"""Options that are misspelt, misplaced or given twice keep a request here, on every surface."""

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.gateway.conftest import OpenWorld, Server
from tests.gateway.hybrid import World

CHAT = '"messages":[{"role":"user","content":"Hello"}]'
SURFACES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": '"prompt":"Hello"',
    "/v1/responses": '"input":"Hello"',
    "/v1/messages": f'"max_tokens":9,{CHAT}',
    "/v1/route": CHAT,
}
COUNTING = {
    "/v1/messages/count_tokens": CHAT,
    "/v1/tokenize": CHAT,
    "/v1/detokenize": '"tokens":[1]',
}
DOUBLED = (
    '"outrider":{"privacy":"private"},"outrider":{}',
    '"outrider":{"privacy":"private"},"\\u006futrider":{}',
    '"outr\\u0069der":{},"outrider":{"privacy":"private"}',
    '"outrider":{"privacy":"private","\\u0070rivacy":null}',
    '"outrider":{"slo":{"ttft_ms":1,"ttft_ms":9}}',
    '"stream":false,"str\\u0065am":false',
    '"temperature":0,"temperature":0',
)
MISPLACED = (
    '"privacy":"private"',
    '"Outrider":{"privacy":"private"}',
    '"metadata":{"privacy":"private"}',
    '"metadata":{"outrider":"private"}',
    '"metadata":{"privacy":"private","privacy":"no"}',
    '"extra_body":{"outrider":{"privacy":"private"}}',
)


@pytest.fixture(scope="module")
def world(open_world: OpenWorld) -> Iterator[World]:
    """A gateway that hands requests to an upstream tier wherever it may."""
    with open_world(handoff={"policy": "prefer_cloud"}) as made:
        yield made


def post(world: World, path: str, fields: str, *, model: str = "auto") -> httpx.Response:
    body = f'{{"model":"{model}",{fields}}}'
    return world.http.post(
        path, content=body.encode(), headers={"content-type": "application/json"}
    )


def refusal(response: httpx.Response) -> str:
    """The message of a 400."""
    assert response.status_code == 400, response.text
    message: str = response.json()["error"]["message"]
    return message


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", SURFACES)
def test_misplaced_and_doubled_options_are_refused_on_every_surface(
    world: World, path: str
) -> None:
    num_asked = len(world.cloud.requests)
    for fields in DOUBLED:
        assert "given twice" in refusal(post(world, path, f"{SURFACES[path]},{fields}")), fields
    for fields in MISPLACED:
        refusal(post(world, path, f"{SURFACES[path]},{fields}"))
    response = world.http.post(
        path,
        json=json.loads(f'{{"model":"auto",{SURFACES[path]}}}'),
        headers={"x-outrider-privacy": "private"},
    )
    assert "x-outrider-privacy" in refusal(response)
    assert len(world.cloud.requests) == num_asked
    assert post(world, path, SURFACES[path]).status_code == 200


@pytest.mark.parametrize("path", COUNTING)
def test_endpoints_that_count_tokens_refuse_doubled_names(world: World, path: str) -> None:
    good = COUNTING[path]
    assert "given twice" in refusal(post(world, path, f'{good},"model":"small"'))
    assert post(world, path, good).status_code == 200


@pytest.mark.parametrize("path", SURFACES)
@pytest.mark.parametrize("field", ["model", "content"])
def test_two_readers_of_one_request_read_the_same(world: World, path: str, field: str) -> None:
    """What is counted is what is sent: no second model, length, conversation or stream."""
    doubled = '"model":"small"' if field == "model" else SURFACES[path]
    assert "given twice" in refusal(post(world, path, f"{SURFACES[path]},{doubled}"))


@pytest.mark.parametrize(
    "place",
    [
        '{"role":"user","content":"Hello","privacy":"private"}',
        '{"role":"user","content":"Hello","outrider":{"privacy":"private"}}',
        '{"role":"user","content":"Hello","metadata":{"private":true}}',
        '{"role":"user","content":[{"type":"text","text":"Hello","privacy":"private"}]}',
    ],
)
def test_options_inside_a_message_are_refused(world: World, place: str) -> None:
    num_asked = len(world.cloud.requests)
    for path, field in (
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
        ("/v1/messages", "messages"),
    ):
        limit = "" if path != "/v1/messages" else '"max_tokens":9,'
        refusal(post(world, path, f'{limit}"{field}":[{place}]'))
    assert len(world.cloud.requests) == num_asked


def test_doubled_names_are_refused_without_upstream_tiers(server: Server) -> None:
    with httpx.Client(base_url=server.url, headers={"content-type": "application/json"}) as http:
        for path, fields in SURFACES.items():
            for doubled in DOUBLED:
                body = f'{{"model":"auto",{fields},{doubled}}}'
                assert "given twice" in refusal(http.post(path, content=body)), (path, doubled)


def test_names_of_the_client_are_not_options(world: World) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    fine = {
        "messages": [
            {"role": "user", "content": '"outrider" "privacy": "private"'},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": '{"privacy": "private"}'},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "parameters": {"type": "object", "properties": {"privacy": {"type": "string"}}},
                },
            }
        ],
    }
    assert world.chat(**fine).status_code == 200
    block = {"type": "tool_use", "id": "c1", "name": "f", "input": {"privacy": "private"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "done"}
    answer = world.http.post(
        "/v1/messages",
        json={
            "model": "auto",
            "max_tokens": 9,
            "messages": [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": [block]},
                {"role": "user", "content": [result]},
            ],
        },
    )
    assert answer.status_code == 200, answer.text
