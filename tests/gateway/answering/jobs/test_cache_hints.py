"""Hints of clients about a prompt's cache reach the engine, and change nothing else."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from outrider.gateway.answering.text.chat import ChatTokenizer
from tests.gateway.conftest import Server, scripted_server

DAY, HOUR, USUAL = 86_400.0, 3600.0, 300.0
BREAKPOINT: dict[str, Any] = {
    "type": "text",
    "text": "Hello",
    "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"},
}
ASK: dict[str, Any] = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def server(tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]) -> Iterator[Server]:
    with scripted_server(tokenizer, encode) as served:
        yield served


def mark(**fields: str) -> dict[str, Any]:
    return {"cache_control": {"type": "ephemeral", **fields}}


def part(**fields: str) -> dict[str, Any]:
    return {"type": "text", "text": "Hello", **mark(**fields)}


def hinted(server: Server, path: str, body: dict[str, Any]) -> float:
    server.says("Hi")
    answer = httpx.post(f"{server.url}{path}", json={"model": "small", "max_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    assert "x-outrider-ignored-fields" not in answer.headers
    return server.engine.submitted[-1].retention_s


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0.0),
        ({"prompt_cache_key": "conversation-7"}, USUAL),
        ({"prompt_cache_retention": "in_memory"}, USUAL),
        ({"prompt_cache_retention": "in-memory"}, USUAL),
        ({"prompt_cache_retention": "24h", "prompt_cache_key": "k"}, DAY),
        ({"prompt_cache_retention": "forever"}, USUAL),
        ({"prompt_cache_options": {"ttl": "30m"}}, 1800.0),
        ({"messages": [{"role": "user", "content": [BREAKPOINT]}]}, 1800.0),
        ({"messages": [{**ASK, **mark(ttl="1h")}]}, HOUR),
        ({"messages": [{"role": "user", "content": [part()]}]}, USUAL),
        ({"messages": [{"role": "system", "content": [part(ttl="1h")]}, ASK]}, HOUR),
        ({"outrider": {"retention_s": 90}}, 90.0),
    ],
)
def test_hints_of_a_chat(server: Server, fields: dict[str, Any], seconds: float) -> None:
    assert hinted(server, "/v1/chat/completions", {"messages": [ASK], **fields}) == seconds


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0.0),
        (mark(), USUAL),
        (mark(ttl="1h"), HOUR),
        ({"system": [part(ttl="1h")], "messages": [{"role": "user", "content": [part()]}]}, HOUR),
        ({"messages": [{"role": "user", "content": [part(ttl="5m")]}]}, USUAL),
    ],
)
def test_hints_of_the_messages_api(server: Server, fields: dict[str, Any], seconds: float) -> None:
    assert hinted(server, "/v1/messages", {"messages": [ASK], **fields}) == seconds


def test_hints_of_completions_and_responses(server: Server) -> None:
    fields = {"prompt_cache_retention": "24h"}
    assert hinted(server, "/v1/completions", {"prompt": "Hello", **fields}) == DAY
    body = {"input": "Hello", "model": "small", **fields}
    answer = httpx.post(f"{server.url}/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert server.engine.submitted[-1].retention_s == DAY
