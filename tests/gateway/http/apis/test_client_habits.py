"""What clients send beside the request itself is accepted: hints, empty lists, fields of others."""

import json
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Server

HINT = {"cache_control": {"type": "ephemeral"}}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object"}},
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'},
}


def text(words: str, **more: object) -> list[dict[str, object]]:
    return [{"type": "text", "text": words, **more}]


def prompt_of(server: Server, http: httpx.Client, **fields: object) -> tuple[int, ...]:
    server.engine.submitted.clear()
    body = {"model": "large", "max_tokens": 2, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    (request,) = server.engine.submitted
    return request.prompt_token_ids


def test_cache_hints_of_other_apis_change_nothing(server: Server, http: httpx.Client) -> None:
    hinted = prompt_of(
        server,
        http,
        messages=[{"role": "user", "content": text("What is 1 + 1?", **HINT), **HINT}],
        tools=[WEATHER | HINT],
        tool_choice="none",
    )
    messages = [{"role": "user", "content": "What is 1 + 1?"}]
    assert hinted == prompt_of(server, http, messages=messages, tools=[WEATHER], tool_choice="none")


@pytest.mark.parametrize("nothing", [[], None, ""])
def test_an_answer_of_calls_has_no_content(
    server: Server, http: httpx.Client, nothing: object
) -> None:
    def history(content: object) -> list[dict[str, object]]:
        return [
            {"role": "user", "content": text("weather?")},
            {"role": "assistant", "content": content, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": text("rain")},
        ]

    sent = prompt_of(server, http, messages=history(nothing))
    assert sent == prompt_of(server, http, messages=history(None))


def test_too_long_a_prompt_is_told_in_the_words_that_clients_look_for(http: httpx.Client) -> None:
    body = {"model": "large", "messages": [{"role": "user", "content": "fox " * 500}]}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 256 tokens" in error["message"]
    assert "max_tokens" not in error["message"]  # it sent none
    named = http.post("/v1/chat/completions", json=body | {"max_tokens": 9}).json()["error"]
    assert "max_tokens is 9" in named["message"]


BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=cli;"


@pytest.mark.parametrize(
    "system",
    [
        [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be kind."}],
        [{"type": "text", "text": BILLING + "\nBe kind."}],
        BILLING + "\nBe kind.",
    ],
    ids=["block", "line of a block", "line"],
)
def test_a_billing_line_is_no_part_of_the_prompt(
    server: Server, http: httpx.Client, system: Any
) -> None:
    """Else no prompt would begin as the one before it, and no prefix be found in the cache."""

    def sent(given: object) -> tuple[int, ...]:
        body = {
            "model": "large",
            "max_tokens": 2,
            "system": given,
            "messages": [{"role": "user", "content": "Hi"}],
        }
        server.engine.submitted.clear()
        answer = http.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        (request,) = server.engine.submitted
        return request.prompt_token_ids

    for number in "ab":
        numbered = json.loads(json.dumps(system).replace("{}", number))
        assert sent(numbered) == sent("Be kind.")
    assert sent(f"Say {BILLING}") != sent("Say")


def test_a_prompt_of_a_billing_line_alone(http: httpx.Client) -> None:
    body = {
        "model": "large",
        "max_tokens": 2,
        "system": BILLING,
        "messages": [{"role": "user", "content": "Hi"}],
    }
    assert http.post("/v1/messages", json=body).status_code == 200
