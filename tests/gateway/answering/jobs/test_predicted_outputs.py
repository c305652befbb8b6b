"""Predicted outputs, sources and slo: from the request to the engine, and back as usage."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from outrider.engine.request import LatencyObjective
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.completions import CompletionRequest
from outrider.gateway.contract.schema.parsing import parse
from outrider.gateway.contract.schema.responses import ChatCompletion, ChatCompletionChunk
from tests.gateway.answers import read_answer
from tests.gateway.conftest import Server
from tests.gateway.scripted_client import Script, Step

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = {"model": "auto", "messages": HELLO}
COMPLETION = {"model": "auto", "prompt": "Hi"}
TEXT = "Hello there, how are you today?"


def prediction_of(content: object) -> dict[str, object]:
    return {"type": "content", "content": content}


def refused(model: type[BaseModel], document: dict[str, object]) -> str | None:
    with pytest.raises(BadRequestError) as caught:
        parse(model, json.dumps(document).encode())
    return caught.value.param


# ---- the prediction -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (TEXT, TEXT),
        ([{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}], "Hello\nthere"),
        ("", ""),
    ],
)
def test_the_engine_gets_the_answers_tokens(
    server: Server, http: httpx.Client, content: object, text: str
) -> None:
    """As they would stand in the answer: no template and nothing around them."""
    body = {**CHAT, "prediction": prediction_of(content), "n": 2}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    expected = tuple(server.encode(text))
    assert [request.prediction_token_ids for request in server.engine.submitted] == [expected] * 2


def test_no_prediction(server: Server, http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={**CHAT, "prediction": None}).json()
    assert server.engine.submitted[0].prediction_token_ids == ()
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 0
    assert details["rejected_prediction_tokens"] == 0


@pytest.mark.parametrize("num_times", [3, 2000])
def test_a_long_prediction_is_cut_to_what_may_be_said(
    server: Server, http: httpx.Client, num_times: int
) -> None:
    """Beyond max_tokens nothing of it can come true, however long it is."""
    text = TEXT * num_times
    body = {**CHAT, "prediction": prediction_of(text), "max_tokens": 8}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert server.engine.submitted[0].prediction_token_ids == tuple(server.encode(text)[:8])


async def _encoded(tokenizer: ChatTokenizer, text: str, max_tokens: int) -> tuple[int, ...]:
    return await tokenizer.encode_answer(text, max_tokens)


@pytest.mark.parametrize("max_tokens", [1, 5, 100])
def test_cutting_the_text_first_loses_no_token(
    server: Server, tokenizer: ChatTokenizer, max_tokens: int
) -> None:
    for text in (TEXT * 300, "漢字かな交じり文 🙂🙃" * 500, "Zwölf Boxkämpfer " * 400):
        expected = server.encode(text)[:max_tokens]
        found = asyncio.run(_encoded(tokenizer, text, max_tokens))
        assert found == tuple(expected)


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ({"content": "x"}, "prediction.type"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": None}, "prediction.content"),
        ({"type": "content", "content": "x", "y": 1}, "prediction.y"),
    ],
)
def test_a_malformed_prediction_is_named(prediction: object, param: str) -> None:
    assert refused(ChatRequest, {**CHAT, "prediction": prediction}) == param


def test_completions_have_no_prediction() -> None:
    document = {**COMPLETION, "prediction": prediction_of("x")}
    assert refused(CompletionRequest, document) == "prediction"


# ---- usage ----------------------------------------------------------------------------------


def script_of(server: Server, text: str, num_predicted: list[int], **script: Any) -> None:
    """Three tokens a step, of which so many had been predicted."""
    ids = server.encode(text)
    parts = [ids[at : at + 3] for at in range(0, len(ids), 3)]
    steps = [
        Step(
            token_ids=tuple(part),
            num_drafted=4,
            num_accepted=len(part) - 1,
            num_predicted=num_predicted[number] if number < len(num_predicted) else 0,
        )
        for number, part in enumerate(parts)
    ]
    server.engine.script = lambda _: Script(steps=steps, **script)


@pytest.mark.parametrize("n", [1, 2])
def test_usage_reports_accepted_predictions(server: Server, client: openai.OpenAI, n: int) -> None:
    prediction = "Hello there, how is Viktor?"
    script_of(server, TEXT, [3, 2])
    answer = client.chat.completions.create(
        model="auto", messages=HELLO, prediction=prediction_of(prediction), n=n
    )
    details = answer.usage.completion_tokens_details
    num_predicted = len(server.encode(prediction))
    assert details.accepted_prediction_tokens == 5 * n
    assert details.rejected_prediction_tokens == (num_predicted - 5) * n
    assert answer.usage.completion_tokens == len(server.encode(TEXT)) * n
    read_answer(ChatCompletion, answer.model_dump_json(exclude_unset=True))


def test_usage_in_a_stream(server: Server, client: openai.OpenAI) -> None:
    script_of(server, TEXT, [1])
    stream = client.chat.completions.create(
        model="auto",
        messages=HELLO,
        prediction=prediction_of(TEXT),
        stream=True,
        stream_options={"include_usage": True},
    )
    last = list(stream)[-1]
    details = last.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == 1
    assert details.rejected_prediction_tokens == len(server.encode(TEXT)) - 1
    read_answer(ChatCompletionChunk, last.model_dump_json(exclude_unset=True))


def test_rejected_predictions_are_never_negative(server: Server, client: openai.OpenAI) -> None:
    script_of(server, TEXT, [3, 3])
    answer = client.chat.completions.create(
        model="auto", messages=HELLO, prediction=prediction_of("Hi")
    )
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == 6
    assert details.rejected_prediction_tokens == 0


def test_behind_a_stop_string_nothing_came_true(server: Server, client: openai.OpenAI) -> None:
    ids = server.encode("ab STOP" + TEXT)
    step = Step(token_ids=tuple(ids), num_drafted=90, num_accepted=len(ids), num_predicted=len(ids))
    server.engine.script = lambda _: Script(steps=[step], hangs=True)
    answer = client.chat.completions.create(
        model="auto", messages=HELLO, prediction=prediction_of("ab STOP" + TEXT), stop="STOP"
    )
    assert answer.choices[0].message.content == "ab "
    accepted = answer.usage.completion_tokens_details.accepted_prediction_tokens
    assert accepted == answer.usage.completion_tokens < len(ids)


# ---- outrider.sources and outrider.slo ------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", {**COMPLETION, "model": "large"})],
)
def test_sources_and_pace_reach_the_engine(
    server: Server, http: httpx.Client, path: str, body: dict[str, object]
) -> None:
    http.post(path, json={**body, "outrider": {}})
    default = server.engine.submitted[-1].speculation
    assert default.sources is None
    assert default.inter_token_s is None
    options = {"sources": ["suffix", "prediction", "suffix"], "slo": {"inter_token_ms": 12.5}}
    assert http.post(path, json={**body, "outrider": options}).status_code == 200
    asked = server.engine.submitted[-1].speculation
    assert asked.sources == ("suffix", "prediction")
    assert asked.inter_token_s == 0.0125
    http.post(path, json={**body, "outrider": {"sources": [], "slo": {"class": None}}})
    assert server.engine.submitted[-1].speculation.sources == ()


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"sources": ["ngram"]}, "outrider.sources.0"),
        ({"sources": "model"}, "outrider.sources"),
        ({"sources": ["model"] * 17}, "outrider.sources"),
        ({"slo": {"inter_token_ms": 0}}, "outrider.slo.inter_token_ms"),
        ({"slo": {"inter_token_ms": 1e-320}}, "outrider.slo.inter_token_ms"),  # 0 s
        ({"slo": {"inter_token_ms": "9"}}, "outrider.slo.inter_token_ms"),
        ({"slo": {"class": 3}}, "outrider.slo.class"),
        ({"slo": {"ttft_ms": 0, "inter_token_ms": 5}}, "outrider.slo.ttft_ms"),
        ({"slo": {"pace": 1}}, "outrider.slo.pace"),
    ],
)
def test_errors_in_predictions_are_named(options: dict[str, object], param: str) -> None:
    assert refused(ChatRequest, {**CHAT, "outrider": options}) == param


@pytest.mark.parametrize(
    ("options", "fields", "objective"),
    [
        ({}, {}, LatencyObjective(ttft_s=1.0, inter_token_s=0.1)),
        ({"class": "batch"}, {}, LatencyObjective(is_batch=True)),
        ({"ttft_ms": 50.0}, {}, LatencyObjective(ttft_s=0.05, inter_token_s=0.1, refuses=True)),
        ({}, {"service_tier": "flex"}, LatencyObjective(is_batch=True)),
    ],
)
def test_the_latency_asked_for_reaches_the_queue(
    server: Server,
    http: httpx.Client,
    options: dict[str, object],
    fields: dict[str, object],
    objective: LatencyObjective,
) -> None:
    body = {**CHAT, **fields, "outrider": {"slo": options}}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert server.engine.submitted[-1].objective == objective


def test_an_unknown_class_is_named(http: httpx.Client) -> None:
    body = {**CHAT, "outrider": {"slo": {"class": "bacth"}}}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "outrider.slo.class"
    assert "batch" in error["message"]
