"""Where there is no receipt: the request is answered, and told why."""

from typing import Any

import httpx

from outrider.gateway.contract.schema.responses import ChatCompletion, UpstreamReport
from tests.gateway.answers import read_answer
from tests.gateway.conftest import OpenWorld, Server

CHAT: dict[str, Any] = {
    "model": "large",
    "messages": [{"role": "user", "content": "Hi you"}],
    "outrider": {"receipt": True},
}


def test_a_gateway_without_a_key_says_so(server: Server, http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json=CHAT)
    answer = read_answer(ChatCompletion, response.content)
    assert answer.outrider.receipt is None
    assert "receipts.key_file" in (answer.outrider.no_receipt or "")
    assert answer.choices[0].message.content == "Hello there!"
    assert answer.choices[0].token_ids == server.encode("Hello there!")
    keys = http.get("/.well-known/outrider-keys")
    assert (keys.status_code, "receipts.key_file" in keys.text) == (404, True)


def test_an_answer_that_nobody_asked_to_sign_says_nothing(http: httpx.Client) -> None:
    report = http.post("/v1/chat/completions", json={**CHAT, "outrider": {}}).json()["outrider"]
    assert not {"receipt", "no_receipt"} & set(report)


def test_an_upstream_servers_answer_has_none(open_world: OpenWorld) -> None:
    with open_world() as world:
        report = world.chat(model="cloud", outrider={"receipt": True}).json()["outrider"]
        assert read_answer(UpstreamReport, report).no_receipt == "an upstream server answered"
        report = world.chat(model="cloud").json()["outrider"]
        assert "no_receipt" not in report


def test_only_one_answer_that_is_there_is_judged(server: Server, http: httpx.Client) -> None:
    judge = {"token_ids": [1, 2], "hypotheses": [{}]}
    body = {"model": "large", "prompt": "Hi", "max_tokens": 0, "outrider": {"judge": judge}}
    assert http.post("/v1/completions", json=body).status_code == 200
    (request,) = server.engine.submitted
    assert request.verification is not None
    assert request.prompt_token_ids[-2:] == (1, 2)
    for wrong in ({"max_tokens": 4}, {"n": 2}, {"prompt": ["a", "b"]}, {"prompt_logprobs": 1}):
        refused = http.post("/v1/completions", json={**body, **wrong})
        assert refused.status_code == 400, wrong
        assert refused.json()["error"]["param"] in ("max_tokens", "outrider.judge", "n")
