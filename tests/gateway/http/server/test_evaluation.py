"""Fields that harnesses of evaluation use: echoes, scores of prompts, ids, answers of no tokens.

The numbers themselves are held by tests/laws/test_evaluation_law.py.
"""

import json
from typing import Any

import httpx
import pytest

from outrider.gateway.contract.schema.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
)
from tests.gateway.answers import read_answer
from tests.gateway.conftest import Server

PROMPT = "Hi you"
COMPLETION: dict[str, Any] = {"model": "large", "prompt": PROMPT, "temperature": 0}
CHAT: dict[str, Any] = {
    "model": "large",
    "messages": [{"role": "user", "content": PROMPT}],
    "temperature": 0,
}


def completed(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={**COMPLETION, **fields})
    assert response.status_code == 200, response.text
    read_answer(Completion, response.content)
    answer: dict[str, Any] = response.json()
    return answer


def chunks_of(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def refused(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={**COMPLETION, **fields})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_an_echo_begins_the_text(server: Server, http: httpx.Client) -> None:
    (choice,) = completed(http, echo=True)["choices"]
    assert (choice["text"], choice["logprobs"]) == (f"{PROMPT}Hello there!", None)
    assert "prompt_logprobs" not in choice
    assert server.engine.submitted[-1].sampling.num_prompt_logprobs is None


def test_an_echo_of_several_prompts_and_choices(server: Server, http: httpx.Client) -> None:
    answer = completed(http, echo=True, prompt=["a", "b"], n=2)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["aHello there!"] * 2 + ["bHello there!"] * 2


def test_an_echo_of_ids_is_their_text(server: Server, http: httpx.Client) -> None:
    (choice,) = completed(http, echo=True, prompt=server.encode("What? 漢"))["choices"]
    assert choice["text"] == "What? 漢Hello there!"


def test_an_echo_with_log_probabilities_covers_the_prompt(
    server: Server, http: httpx.Client
) -> None:
    server.says("Hello there!", top_ids=(5, 6))
    ids = server.encode(PROMPT)
    (choice,) = completed(http, echo=True, logprobs=1, return_token_ids=True)["choices"]
    lists, num_prompt = choice["logprobs"], len(choice["prompt_token_ids"])
    assert choice["prompt_token_ids"][-len(ids) :] == ids
    assert len(lists["tokens"]) == num_prompt + len(choice["token_ids"])
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    own = [-number / 8 for number in range(1, num_prompt)]
    assert lists["token_logprobs"][1:num_prompt] == own
    assert all(len(top) == 2 for top in lists["top_logprobs"][1:]), "the best, and the token itself"
    assert lists["text_offset"][num_prompt] == len(PROMPT)
    assert server.engine.submitted[-1].sampling.num_prompt_logprobs == 1


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_of_a_chat_stand_beside_its_choices(
    server: Server, http: httpx.Client, stream: bool
) -> None:
    server.says("Hello there!", top_ids=(5, 6))
    body = {**CHAT, "prompt_logprobs": 2, "return_token_ids": True, "stream": stream}
    response = http.post("/v1/chat/completions", json=body)
    if stream:
        parts = chunks_of(response.text)
        for part in parts:
            read_answer(ChatCompletionChunk, json.dumps(part).encode())
    else:
        read_answer(ChatCompletion, response.content)
        parts = [response.json()]
    first = parts[0]
    assert first["choices"][0].get("delta", {}).get("role", "assistant") == "assistant"
    null, *entries = first["prompt_logprobs"]
    assert null is None
    for number, (token_id, entry) in enumerate(
        zip(first["prompt_token_ids"][1:], entries, strict=True), start=1
    ):
        assert entry[str(token_id)]["logprob"] == -number / 8 or token_id in (5, 6)
        assert entry["5"]["rank"] in (1, 3)
        assert {"5", "6", str(token_id)} == entry.keys()
    ids = [i for part in parts for choice in part["choices"] for i in choice.get("token_ids", ())]
    assert ids == server.encode("Hello there!")
    assert not any("prompt_logprobs" in part for part in parts[1:])


def test_tokens_may_be_named_by_their_ids(server: Server, http: httpx.Client) -> None:
    fields = {"logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = completed(http, **fields)["choices"]
    named = [f"token_id:{token_id}" for token_id in server.encode("Hello there!")]
    assert choice["logprobs"]["tokens"] == named
    response = http.post("/v1/completions", json={**COMPLETION, "return_tokens_as_token_ids": True})
    assert response.headers["x-outrider-ignored-fields"] == "return_tokens_as_token_ids"


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_are_no_error(server: Server, http: httpx.Client, stream: bool) -> None:
    server.says("", finish_reason="length")
    for path, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
        asked = {**body, "max_tokens": 0, "stream": stream, "model": "auto"}
        response = http.post(f"/v1/{path}", json=asked)
        parts = chunks_of(response.text) if stream else [response.json()]
        assert parts[-1]["choices"][0]["finish_reason"] == "length"
        request = server.engine.submitted[-1]
        assert (request.sampling.max_tokens, request.may_escalate) == (0, False)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_minus_one_is_no_limit(server: Server, http: httpx.Client, name: str) -> None:
    found = []
    for value in (-1, None, 3, 0):
        http.post("/v1/chat/completions", json={**CHAT, name: value})
        found.append(server.engine.submitted[-1].sampling.max_tokens)
    assert found[0] == found[1] > 3
    assert found[2:] == [3, 0]


def test_the_newer_limit_wins_also_with_nothing(server: Server, http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 5, "max_completion_tokens": 0})
    assert server.engine.submitted[-1].sampling.max_tokens == 0


def test_scores_are_bounded_before_the_work(
    server: Server, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.gateway.answering.jobs.extras.MAX_PROMPT_LOGPROBS", 40)
    long = [5] * 21
    assert refused(http, prompt=long, prompt_logprobs=1)["param"] == "prompt_logprobs"
    assert refused(http, prompt=long, echo=True, logprobs=1)["param"] == "logprobs"
    assert refused(http, prompt=[long, long], prompt_logprobs=0)["param"] == "prompt_logprobs"
    told = refused(http, prompt=long, echo=True, logprobs=1, prompt_logprobs=0)["message"]
    assert "at most 20 tokens" in told
    assert "21" in told
    assert refused(http, prompt_logprobs=1, n=2)["param"] == "n"
    assert not server.engine.submitted
    completed(http, prompt=long, echo=True)
    completed(http, prompt=long[:20], prompt_logprobs=1)


def test_a_fingerprint_names_the_arithmetic(server: Server, http: httpx.Client) -> None:
    prints = [completed(http, model=model)["system_fingerprint"] for model in ("small", "large")]
    assert prints == [completed(http, model=m)["system_fingerprint"] for m in ("small", "large")]
    assert len(set(prints)) == 2
    response = http.post("/v1/completions", json={**COMPLETION, "stream": True})
    assert {chunk["system_fingerprint"] for chunk in chunks_of(response.text)} == {prints[1]}
