"""Answers of a gateway with a receipt: verified whole, by whoever has answer and receipt.

The bundled pair behind a real gateway: each dialect, streamed and whole, greedy and sampled, n > 1,
escalated, under a grammar. What was changed since is found, and said in words.
"""

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from outrider.gateway.cli import app
from outrider.gateway.contract.schema.receipts import Receipt
from outrider.gateway.receipts.receipt import sign
from outrider.gateway.settings.receipts import ReceiptSettings
from outrider.gateway.wiring.receipts import signing_keys
from tests.laws.gateways import Gateway, gateway

MESSAGES = [{"role": "user", "content": "What is 48 + 37?"}]
OPEN: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me a story about a fox and two old ships."}],
    "temperature": 1.5,
    "max_tokens": 80,
}
"""A question with many answers."""
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 1.3, "top_p": 0.9, "seed": -3},
    {"temperature": 0.7, "presence_penalty": 0.5, "logit_bias": {"7": 1.5}, "n": 3},
    {"temperature": 1, "min_tokens": 12, "outrider": {"receipt": True, "speculation": "off"}},
)


@pytest.fixture(scope="module")
def served() -> Iterator[Gateway]:
    with gateway() as running:
        yield running


def answered(served: Gateway, path: str = "chat/completions", **fields: Any) -> dict[str, Any]:
    """A whole answer with a receipt."""
    body = {"model": "large", "max_tokens": 40, "outrider": {"receipt": True}, **fields}
    if path == "chat/completions":
        body.setdefault("messages", MESSAGES)
    response = served.http.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def asked(served: Gateway, answer: dict[str, Any], **fields: Any) -> httpx.Response:
    return served.http.post("/v1/verify", json={"answer": answer, **fields})


def verified(served: Gateway, answer: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response = asked(served, answer, **fields)
    assert response.status_code == 200, response.text
    report: dict[str, Any] = response.json()
    return report


def assert_matches(report: dict[str, Any]) -> None:
    assert report["matches"], report
    assert report["explanation"] == "claimed"
    assert report["hypotheses"][0]["share"] == 1.0
    receipt = report["receipt"]
    assert (receipt["prompt_matches"], receipt["answer_matches"]) == (True, True)
    assert receipt["numerics_match"] is True
    assert report["usage"]["prompt_tokens"] > report["num_tokens"]
    assert report["usage"]["completion_tokens"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["large", "small", "auto"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_choice_is_verified(served: Gateway, model: str, setting: dict[str, Any]) -> None:
    answer = answered(served, model=model, **setting)
    for choice in answer["choices"]:
        assert_matches(verified(served, answer, index=choice["index"]))


@pytest.mark.slow
def test_a_completion_of_several_prompts_is_verified(served: Gateway) -> None:
    answer = answered(
        served, "completions", prompt=["48 + 37 =", "The capital"], n=2, temperature=0.9
    )
    assert len(answer["choices"]) == 4
    for index in range(4):
        assert_matches(verified(served, answer, index=index))
    echoed = answered(served, "completions", prompt="48 + 37 =", echo=True)
    assert_matches(verified(served, echoed))


@pytest.mark.slow
@pytest.mark.parametrize("include_usage", [False, True])
def test_the_last_event_of_a_stream_has_the_receipt(
    served: Gateway, *, include_usage: bool
) -> None:
    body = {
        "model": "large", "messages": MESSAGES, "max_tokens": 30, "stream": True, "seed": 5,
        "stream_options": {"include_usage": include_usage}, "outrider": {"receipt": True},
    }  # fmt: skip
    text = served.http.post("/v1/chat/completions", json=body).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    (report,) = [chunk["outrider"] for chunk in chunks if "outrider" in chunk]
    ids = [
        token
        for chunk in chunks
        for choice in chunk["choices"]
        for token in choice.get("token_ids", ())
    ]
    whole = {
        "model": chunks[0]["model"],
        "prompt_token_ids": chunks[0]["prompt_token_ids"],
        "choices": [{"index": 0, "token_ids": ids}],
        "outrider": report,
    }
    assert_matches(verified(served, whole))


@pytest.mark.slow
def test_an_answer_under_a_schema_is_verified_with_its_request(served: Gateway) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    request = {
        "messages": MESSAGES,
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }
    answer = answered(served, **request, temperature=1, seed=2)
    assert_matches(verified(served, answer, request=request))
    refused = asked(served, answer).json()["error"]
    assert (refused["param"], "grammar" in refused["message"]) == ("request", True)


ADD: dict[str, Any] = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("is_old", [False, True])
def test_tool_calls_that_were_edited_beside_their_tokens_are_found(
    served: Gateway, *, is_old: bool
) -> None:
    request: dict[str, Any] = {"messages": MESSAGES}
    if is_old:
        request |= {"functions": [ADD], "function_call": {"name": "add"}}
    else:
        request |= {"tools": [{"type": "function", "function": ADD}], "tool_choice": "required"}
    answer = answered(served, **request, temperature=1, seed=3, max_tokens=120)
    message = answer["choices"][0]["message"]
    call = message["function_call"] if is_old else message["tool_calls"][0]["function"]
    call["arguments"] = json.dumps(json.loads(call["arguments"]), indent=2)  # as some clients do
    assert_matches(verified(served, answer, request=request))
    for name, value in (("arguments", '{"a": 1, "b": 2}'), ("name", "subtract")):
        edited = copy.deepcopy(answer)
        message = edited["choices"][0]["message"]
        call = message["function_call"] if is_old else message["tool_calls"][0]["function"]
        call[name] = value
        report = verified(served, edited, request=request)
        assert (report["matches"], report["explanation"]) == (False, "edited text"), name
    del answer["choices"][0]["message"]["function_call" if is_old else "tool_calls"]
    assert verified(served, answer, request=request)["explanation"] == "edited text"


@pytest.mark.slow
@pytest.mark.parametrize("is_old", [False, True])
def test_the_command_compares_the_calls_of_a_stream(
    served: Gateway, tmp_path: Path, *, is_old: bool
) -> None:
    tools: dict[str, Any] = (
        {"functions": [ADD], "function_call": {"name": "add"}}
        if is_old
        else {"tools": [{"type": "function", "function": ADD}], "tool_choice": "required"}
    )
    request = {
        "model": "large", "messages": MESSAGES, "temperature": 1, "seed": 4, "max_tokens": 120,
        "stream": True, "outrider": {"receipt": True}, **tools,
    }  # fmt: skip
    events = served.http.post("/v1/chat/completions", json=request).text
    answer, asked = tmp_path / "answer.txt", tmp_path / "request.json"
    answer.write_text(events)
    asked.write_text(json.dumps(request))
    command = ["verify", str(answer), "--url", served.url, "--request", str(asked)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert '"name":"add"' in events
    answer.write_text(events.replace('"name":"add"', '"name":"sub"'))
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, "edited text" in done.output) == (1, True), done.output


@pytest.mark.slow
def test_other_hypotheses_explain_less(served: Gateway) -> None:
    found = []
    for seed in range(6):
        answer = answered(served, **OPEN, seed=seed)
        report = verified(
            served, answer, hypotheses=[{"seed": 1000 + seed}, {"temperature": 0.2}, {"top_p": 0.1}]
        )
        assert_matches(report)
        names = [each["name"] for each in report["hypotheses"]]
        assert names == ["claimed", f"seed={1000 + seed}", "temperature=0.2", "top_p=0.1"]
        found.append([each["share"] for each in report["hypotheses"]])
    assert all(sum(shares) < len(found) for shares in list(zip(*found, strict=True))[1:])


CASCADES: tuple[dict[str, Any], ...] = (
    {"cascade": 0.3},
    {"cascade": 0.6, "rule": "token_specific"},
)


@pytest.mark.slow
@pytest.mark.parametrize("quality", CASCADES)
@pytest.mark.parametrize("model", ["large", "auto"])
def test_a_cascades_answer_is_verified_by_both_models(
    served: Gateway, model: str, quality: dict[str, Any]
) -> None:
    options = {"receipt": True, "quality": quality}
    for temperature in (0, 1.5):
        answer = answered(
            served, **{**OPEN, "temperature": temperature}, model=model, n=2, outrider=options
        )
        payload = answer["outrider"]["receipt"]["payload"]
        signed = payload["sampling"]["cascade"]
        assert signed["alpha"] == repr(quality["cascade"])
        assert signed["rule"] == quality.get("rule", "opt")
        assert signed["checkpoint"] not in (None, payload["checkpoint"])
        for index in range(2):
            assert_matches(verified(served, answer, index=index))
        request = {**OPEN, "model": model, "temperature": temperature, "outrider": options}
        report = verified(
            served, {**answer, "outrider": {**answer["outrider"], "receipt": None}}, request=request
        )
        assert (report["matches"], report["receipt"]) == (True, None)


@pytest.mark.slow
def test_another_alpha_explains_a_cascades_answer_less(served: Gateway) -> None:
    others: list[dict[str, Any]] = [
        {"quality": {"cascade": 1.0}},
        {"quality": {"cascade": 0.9, "rule": "token_specific"}},
        {"quality": "lossless"},
    ]
    found = []
    for seed in range(6):
        options = {"receipt": True, "quality": {"cascade": 0.3}}
        answer = answered(served, **OPEN, seed=seed, outrider=options)
        report = verified(served, answer, hypotheses=others)
        assert_matches(report)
        names = [each["name"] for each in report["hypotheses"]]
        assert names == [
            "claimed", "quality=opt 1", "quality=token_specific 0.9", "quality=lossless"
        ]  # fmt: skip
        found.append([each["share"] for each in report["hypotheses"]])
    assert all(sum(shares) < len(found) for shares in list(zip(*found, strict=True))[1:])


@pytest.mark.slow
def test_a_cascade_that_was_none_and_another_small_model_are_found(served: Gateway) -> None:
    """Answers whose requests are said to have been cascades, which the large model wrote alone."""
    shares = []
    for seed in range(6):
        answer = answered(served, **OPEN, seed=seed)
        del answer["outrider"]["receipt"]
        request = {**OPEN, "model": "large", "seed": seed}
        mixed = {**request, "outrider": {"quality": {"cascade": 0.9}}}
        assert verified(served, answer, request=request)["matches"]
        shares.append(verified(served, answer, request=mixed)["hypotheses"][0]["share"])
    assert min(shares) < 1.0


@pytest.mark.slow
def test_a_cascade_is_judged_by_the_large_model_beside_the_small_one(served: Gateway) -> None:
    options = {"receipt": True, "quality": {"cascade": 0.3}}
    answer = answered(served, **OPEN, seed=1, outrider=options)
    refused = asked(served, answer, model="small").json()["error"]
    assert "large model verifies the drafts of the small one" in refused["message"]
    with gateway({"speculation.enabled": False}) as alone:
        refused = asked(alone, answer).json()["error"]
        assert "needs a small model that drafts" in refused["message"]


@pytest.mark.slow
def test_a_judged_answer_has_its_quality_in_its_hypotheses(served: Gateway) -> None:
    body = {
        "model": "large", "messages": MESSAGES, "max_tokens": 0,
        "outrider": {
            "quality": {"cascade": 0.3},
            "judge": {"token_ids": [5, 6], "hypotheses": [{"quality": {"cascade": 0.3}}]},
        },
    }  # fmt: skip
    refused = served.http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "outrider.quality"
    del body["outrider"]["quality"]  # type: ignore[attr-defined]
    judged = served.http.post("/v1/chat/completions", json=body)
    assert judged.json()["choices"][0]["judgements"][0]["num_tokens"] == 2


@pytest.mark.slow
def test_an_edited_answer_is_found(served: Gateway) -> None:
    answer = answered(served, temperature=1, seed=8)
    ids = answer["choices"][0]["token_ids"]
    place = len(ids) // 2
    ids[place] = ids[place] + 1 if ids[place] < 200 else ids[place] - 1
    report = verified(served, answer)
    assert (report["matches"], report["explanation"]) == (False, "edited text")
    assert report["receipt"]["answer_matches"] is False
    assert report["hypotheses"][0]["first_difference"]["index"] == place


@pytest.mark.slow
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_text_that_was_edited_beside_its_tokens_is_found(served: Gateway, path: str) -> None:
    prompt = {"prompt": "How much is 7 plus 8?"} if path == "completions" else {}
    answer = answered(served, path, temperature=1, seed=8, **prompt)
    assert_matches(verified(served, answer))
    choice = answer["choices"][0]
    place = choice.get("message", choice)
    name = "content" if "message" in choice else "text"
    place[name] = place[name][:-3] + "#" + place[name][-2:]
    report = verified(served, answer)
    assert (report["matches"], report["explanation"]) == (False, "edited text")
    assert any("not that of its token ids" in note for note in report["notes"])


@pytest.mark.slow
def test_the_other_model_under_this_ones_name_is_found(served: Gateway) -> None:
    """Answers of the small model whose receipt was signed as the large one's, as a fraud would."""
    shares = []
    for seed in range(6):
        answer = answered(served, model="small", **OPEN, seed=seed)
        report = verified(served, answer, model="large")
        shares.append(report["hypotheses"][0]["share"])
        assert report["receipt"]["numerics_match"] is False
    assert min(shares) < 1.0


@pytest.mark.slow
def test_a_text_without_ids_is_tokenised_again_and_this_is_said(served: Gateway) -> None:
    answer = answered(served, temperature=0)
    del answer["choices"][0]["token_ids"]
    report = verified(served, answer)
    assert report["retokenised"] is True
    assert "tokenised again" in report["notes"][0]
    assert report["matches"], report


@pytest.mark.slow
def test_an_answer_without_a_receipt_is_verified_by_its_request(served: Gateway) -> None:
    request = {"model": "large", "messages": MESSAGES, "temperature": 0.8, "max_tokens": 30}
    answer = answered(served, **request, outrider=None, return_token_ids=True)
    assert "receipt" not in answer["outrider"]
    report = verified(served, answer, request=request)
    assert (report["matches"], report["receipt"]) == (True, None)
    del answer["outrider"]
    refused = asked(served, answer, request=request).json()["error"]
    assert refused["param"] == "answer.outrider.seed"
    assert asked(served, answer).json()["error"]["param"] == "request"


@pytest.mark.slow
def test_a_changed_receipt_and_an_unknown_key_are_refused(served: Gateway) -> None:
    answer = answered(served, temperature=1, seed=8)
    receipt = answer["outrider"]["receipt"]
    for name, value in (("seed", "9"), ("model", "small"), ("issued_at", 1), ("more", 1)):
        changed = copy.deepcopy(answer)
        changed["outrider"]["receipt"]["payload"][name] = value
        refused = asked(served, changed)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "receipt_changed"
    changed = copy.deepcopy(answer)
    changed["outrider"]["receipt"]["key_id"] = "x" * 43
    assert asked(served, changed).json()["error"]["code"] == "unknown_receipt_key"
    changed = copy.deepcopy(answer)
    changed["outrider"]["receipt"]["signature"] = receipt["signature"][:-4] + "AAAA"
    assert asked(served, changed).json()["error"]["code"] == "receipt_changed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ahead_s", "is_noted"), [(-(10**9), False), (60, False), (3600, True), (10**12, True)]
)
def test_a_receipt_of_the_future_is_verified_and_the_clock_is_noted(
    served: Gateway, ahead_s: int, *, is_noted: bool
) -> None:
    """Signed by a gateway whose clock is wrong."""
    answer = answered(served, temperature=1, seed=8)
    receipt = msgspec.convert(answer["outrider"]["receipt"], Receipt)
    payload = msgspec.structs.replace(receipt.payload, issued_at=int(time.time()) + ahead_s)
    skewed = sign(payload, receipt.nonces, signing_keys(ReceiptSettings()))
    answer["outrider"]["receipt"] = msgspec.to_builtins(skewed)
    report = verified(served, answer)
    assert_matches(report)
    assert report["receipt"]["issued_at"] == payload.issued_at
    assert any("a clock is wrong" in note for note in report["notes"]) == is_noted


@pytest.mark.slow
def test_what_cannot_be_judged_is_refused_by_name(served: Gateway) -> None:
    answer = answered(served, temperature=0)
    assert asked(served, answer, model="nowhere").status_code == 404
    assert asked(served, answer, index=5).json()["error"]["param"] == "answer.choices"
    long = copy.deepcopy(answer)
    long["choices"][0]["token_ids"] *= 2000
    refused = asked(served, long)
    assert (refused.status_code, "context" in refused.json()["error"]["message"]) == (400, True)
    odd = copy.deepcopy(answer)
    odd["choices"][0]["token_ids"] = [2**31 - 1]
    assert asked(served, odd).status_code == 400


@pytest.mark.slow
def test_the_keys_are_published_and_may_be_kept(served: Gateway) -> None:
    answer = answered(served, temperature=0)
    response = served.http.get("/.well-known/outrider-keys")
    assert response.headers["cache-control"] == "public, max-age=3600"
    (key,) = response.json()["keys"]
    assert key["kid"] == answer["outrider"]["receipt"]["key_id"]


@pytest.mark.slow
def test_what_an_alias_conceals_stands_in_no_receipt_and_is_verified_by_its_name() -> None:
    with gateway({"aliases.assistant.models": ("large",)}) as served:
        answer = answered(served, model="assistant", temperature=1, seed=3, n=2)
        payload = answer["outrider"]["receipt"]["payload"]
        hidden = ("model", "checkpoint", "numerics", "adapter", "engine")
        assert [payload[name] for name in hidden] == [None] * 5
        assert [(each["tier"], each["stream"]) for each in payload["choices"]] == [(None, None)] * 2
        for index in range(2):
            report = verified(served, answer, index=index, model="assistant")
            assert report["matches"], report
            assert report["receipt"]["numerics_match"] is None


@pytest.mark.slow
def test_the_command_says_what_was_found_of_files(served: Gateway, tmp_path: Path) -> None:
    answer = answered(served, **OPEN, seed=2, n=2)
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(answer))
    command = ["verify", str(file), "--url", f"{served.url}/v1"]
    done = CliRunner().invoke(app, [*command, "--cascade", "0.5"])
    assert (done.exit_code, "quality=opt 0.5: " in done.output) == (0, True), done.output
    done = CliRunner().invoke(app, [*command, "--model", "small", "--seed", "77"])
    assert done.exit_code == 0, done.output
    assert done.output.count("its signature is valid") == 4  # two choices, two models
    assert "choice 1, judged by" in done.output
    assert done.output.count("best explanation: claimed") >= 2
    assert "seed=77: " in done.output
    answer["choices"][1]["token_ids"][3] = 7
    file.write_text(json.dumps(answer))
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 1
    assert [each["matches"] for each in json.loads(done.output)] == [True, False]
    answer["outrider"]["receipt"]["payload"]["seed"] = "3"
    file.write_text(json.dumps(answer))
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, "a field was changed" in done.output) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_the_command_reads_the_events_of_a_stream(
    served: Gateway, tmp_path: Path, path: str
) -> None:
    asked = {"messages": MESSAGES} if path == "chat/completions" else {"prompt": "48 + 37 ="}
    body = {"model": "large", "stream": True, "max_tokens": 20, "n": 2, **asked}
    response = served.http.post(f"/v1/{path}", json={**body, "outrider": {"receipt": True}})
    file = tmp_path / "answer.txt"
    file.write_text(response.text)
    done = CliRunner().invoke(app, ["verify", str(file), "--url", served.url, "--index", "1"])
    assert done.exit_code == 0, done.output
    assert "choice 1, judged by" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("path", ["responses", "messages"])
def test_other_dialects_have_receipts_too(served: Gateway, path: str) -> None:
    body: dict[str, Any] = {"model": "large", "outrider": {"receipt": True}, "temperature": 0}
    if path == "responses":
        body |= {"input": MESSAGES[0]["content"], "max_output_tokens": 30}
    else:
        body |= {"messages": MESSAGES, "max_tokens": 30}
    answer = served.http.post(f"/v1/{path}", json=body).json()
    report = verified(served, answer, request={"messages": MESSAGES})
    assert (report["matches"], report["retokenised"]) == (True, True), report
