"""The HTTP surface, byte for byte: statuses, headers, bodies, streams."""

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from outrider.engine.errors import (
    EngineDiedError,
    InvalidRequestError,
    PromptTooLongError,
    TierUnavailableError,
)
from outrider.engine.request import EngineRequest
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.schema.errors import ErrorEvent, ErrorResponse
from outrider.gateway.contract.schema.model_cards import ModelList
from outrider.gateway.contract.schema.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
)
from outrider.gateway.engines.backends.client import PausedRequests
from outrider.gateway.wiring.application import build_app
from tests.gateway.answers import read_answer
from tests.gateway.conftest import Server, parts_over, running, wait_for
from tests.gateway.scripted_client import Script, ScriptedClient

HI = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}


def error_of(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return read_answer(ErrorResponse, response.content).error


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON of each event; the last one must be [DONE]."""
    *events, done, rest = text.split("\n\n")
    assert done == "data: [DONE]"
    assert rest == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_request_ids(http: httpx.Client) -> None:
    assert http.get("/health").headers["x-request-id"].startswith("req-")
    mine = http.get("/health", headers={"x-request-id": "abc-1.2_3"})
    assert mine.headers["x-request-id"] == "abc-1.2_3"
    evil = http.get("/health", headers={"x-request-id": "a b\tc"})
    assert evil.headers["x-request-id"].startswith("req-")
    assert http.post("/nowhere", headers={"x-request-id": "me"}).headers["x-request-id"] == "me"


def test_unknown_path_and_method(http: httpx.Client) -> None:
    assert error_of(http.get("/v1/nothing"), 404).code == "unknown_url"
    assert "the API is under /v1" in error_of(http.get("/usage"), 404).message
    response = http.get("/v1/chat/completions")
    assert error_of(response, 405).code == "method_not_allowed"
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bodies_that_cannot_be_read(http: httpx.Client, path: str) -> None:
    json_type = {"content-type": "application/json"}
    assert error_of(http.post(path, content=b"{", headers=json_type), 400).code == "invalid_json"
    assert error_of(http.post(path, content=b"{}"), 415).code == "unsupported_media_type"
    form = {"content-type": "text/plain"}
    assert error_of(http.post(path, content=b"{}", headers=form), 415)
    wrong = http.post(path, json={**HI, "temperature": "hot"})
    assert error_of(wrong, 400).param in {"temperature", "prompt"}
    large = http.post(path, content=b"x" * 100_001, headers=json_type)
    assert error_of(large, 413).code == "body_too_large"

    def chunks() -> Iterator[bytes]:
        yield b"x" * 100_001

    assert error_of(http.post(path, content=chunks(), headers=json_type), 413)


REFUSALS = [
    (
        PromptTooLongError(num_tokens=90, max_tokens=9, max_context=64),
        400,
        "context_length_exceeded",
    ),
    (InvalidRequestError("empty prompt"), 400, "invalid_request"),
    (TierUnavailableError("no large tier"), 404, "model_not_found"),
    (EngineDiedError("it died"), 503, "engine_died"),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("refusal", "status", "code"), REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_refusals(
    server: Server, http: httpx.Client, refusal: Exception, status: int, code: str, stream: bool
) -> None:
    server.engine.script = lambda _: Script(refusal=refusal)
    response = http.post("/v1/chat/completions", json={**HI, "stream": stream})
    error = error_of(response, status)
    assert error.code == code
    assert error.message == str(refusal)
    assert ("retry-after" in response.headers) == (status == 503)


@pytest.mark.parametrize(
    ("failure", "status"), [("request_failed", 422), ("engine_died_twice", 503)]
)
def test_permanent_failures_are_not_to_be_retried(
    server: Server, http: httpx.Client, failure: str, status: int
) -> None:
    server.engine.script = lambda _: Script(failure=(failure, "It would fail again."))
    response = http.post("/v1/chat/completions", json=HI)
    error = error_of(response, status)
    assert (error.code, error.message) == (failure, "It would fail again.")
    assert response.headers["x-should-retry"] == "false"


def test_an_exception_of_ours_says_nothing_about_itself(
    tokenizer: ChatTokenizer,
) -> None:
    """A bug is a 500 with OpenAI's body and a request id, not a traceback."""
    engine = ScriptedClient(vocab_size=420, script=lambda _: Script(refusal=KeyError("secret")))
    parts = parts_over(engine, tokenizer, tiers=("small",))
    with running(build_app(parts)) as url:
        response = httpx.post(f"{url}/v1/chat/completions", json=HI)
    error = error_of(response, 500)
    assert "secret" not in response.text
    assert error.type == "server_error"
    assert error.code == "internal_error"


def test_whole_bodies_match_the_schema(server: Server, http: httpx.Client) -> None:
    server.says("<think>fox</think>Hello", top_ids=(5, 6))
    chat = http.post(
        "/v1/chat/completions", json={**HI, "n": 2, "logprobs": True, "top_logprobs": 2}
    )
    assert chat.headers["x-outrider-tier"] == "small"
    assert chat.headers["x-outrider-reason"] == "router: short (2 <= 20)"
    parsed = read_answer(ChatCompletion, chat.content)
    assert parsed.choices[0].message.reasoning_content == "fox"
    old = http.post("/v1/completions", json={"model": "large", "prompt": "x", "logprobs": 2})
    assert read_answer(Completion, old.content).usage is not None
    assert old.headers["x-outrider-tier"] == "large"


@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize("trace", ["0", "1"])
def test_chunks_match_the_schema(
    server: Server, http: httpx.Client, with_usage: bool, trace: str
) -> None:
    server.says("<think>fox</think>Hello there", group=3, top_ids=(5, 6))
    body = {**HI, "n": 2, "stream": True, "logprobs": True, "top_logprobs": 1}
    if with_usage:
        body["stream_options"] = {"include_usage": True}
    headers = {"x-outrider-trace": trace}
    response = http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    events = events_of(response.text)
    for event in events:
        read_answer(ChatCompletionChunk, event)
    reports = [event for event in events if "tier" in event.get("outrider", {})]
    assert reports == [events[-1]]
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert ("usage" in events[0]) == with_usage

    body = {"model": "large", "prompt": ["x", "y"], "stream": True, "logprobs": 1}
    for event in events_of(http.post("/v1/completions", json=body, headers=headers).text):
        read_answer(Completion, event)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_so_far_comes_with_every_chunk(server: Server, http: httpx.Client, path: str) -> None:
    server.says("Hello there, fox", group=3)
    start = HI if "chat" in path else {"model": "large", "prompt": "x"}

    def usages(**options: bool) -> list[Any]:
        answer = http.post(path, json={**start, "stream": True, "stream_options": options})
        return [event.get("usage", "none") for event in events_of(answer.text)]

    *running, last = usages(include_usage=True, continuous_usage_stats=True)
    counts = [one["completion_tokens"] for one in running]
    assert counts == sorted(counts)
    assert len(set(counts)) > 1
    assert running[-1] == last == usages(include_usage=True)[-1]
    assert all(
        one["total_tokens"] == one["prompt_tokens"] + n
        for one, n in zip(running, counts, strict=True)
    )
    assert usages(include_usage=True, continuous_usage_stats=False)[0] is None
    assert set(usages(continuous_usage_stats=True)) == {"none"}, "as at vLLM, only beside the other"


def test_the_trace_joins_to_the_text(server: Server, http: httpx.Client) -> None:
    server.says("<think>fox</think>Hello there", group=3)
    response = http.post(
        "/v1/chat/completions", json={**HI, "stream": True}, headers={"x-outrider-trace": "1"}
    )
    marks = []
    for event in events_of(response.text):
        for choice in event["choices"]:
            if choice["finish_reason"] is None:
                delta = choice["delta"]
                text = delta.get("content") or delta.get("reasoning_content")
                tokens = event["outrider"]["tokens"]
                assert "".join(piece for piece, _ in tokens) == text
                marks += [drafted for _, drafted in tokens]
    assert set(marks) == {True, False}


def test_line_ends_in_the_text_do_not_cut_an_event(server: Server, http: httpx.Client) -> None:
    text = "a\u2028b\u2029c\x85d\ne\r\nf"
    server.says(text)
    body = {**HI, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content", "") for delta in deltas) == text


def test_an_empty_answer(server: Server, http: httpx.Client) -> None:
    server.engine.script = lambda _: Script(finish_reason="length")
    answer = read_answer(ChatCompletion, http.post("/v1/chat/completions", json=HI).content)
    assert answer.choices[0].message.content == ""
    assert answer.outrider.ttft_s is None
    (event,) = events_of(http.post("/v1/chat/completions", json={**HI, "stream": True}).text)
    assert event["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert event["choices"][0]["finish_reason"] == "length"


def test_a_failure_midway_is_an_event_and_no_done(server: Server, http: httpx.Client) -> None:
    server.says("Hello", failure=("out_of_memory", "No memory."))
    response = http.post("/v1/chat/completions", json={**HI, "stream": True})
    assert "[DONE]" not in response.text
    last = response.text.strip().split("\n\n")[-1].removeprefix("data: ")
    event = read_answer(ErrorEvent, last)
    assert (event.outrider.tier, event.outrider.completion_tokens) == ("small", 2)
    error = event.error
    assert (error.code, error.message) == ("out_of_memory", "No memory.")


def submitted(server: Server) -> EngineRequest:
    (request,) = server.engine.submitted
    server.engine.submitted.clear()
    return request


def test_sampling_parameters(server: Server, http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json=HI)
    default = submitted(server)
    assert default.sampling.temperature == 1.0
    assert default.sampling.max_tokens == 32
    assert default.sampling.num_logprobs is None
    assert default.speculation.enabled
    assert default.arrival_s is not None
    assert default.group_id is None
    extra = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "seed": -1,
        "max_completion_tokens": 9,
        "logprobs": True,
        "outrider": {"speculation": "off", "max_draft_nodes": 5, "max_draft_depth": 2},
    }
    response = http.post("/v1/chat/completions", json={**HI, **extra})
    assert response.json()["outrider"]["seed"] == -1
    request = submitted(server)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5,
        0.9,
        0,
        0.1,
    )
    assert sampling.seed == 2**64 - 1
    assert sampling.max_tokens == 9
    assert sampling.num_logprobs == 0
    assert not request.speculation.enabled
    assert request.speculation.max_draft_nodes == 5
    assert request.speculation.max_draft_depth == 2


def test_options_that_change_logits(
    server: Server, http: httpx.Client, tokenizer: ChatTokenizer
) -> None:
    http.post("/v1/chat/completions", json=HI)
    default = submitted(server).sampling
    assert (default.presence_penalty, default.frequency_penalty) == (0.0, 0.0)
    assert (default.repetition_penalty, default.logit_bias, default.min_tokens) == (1.0, (), 0)
    assert default.stop_token_ids == tokenizer.stop_token_ids
    extra = {
        "presence_penalty": 1.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.3,
        "logit_bias": {"5": -100, "419": 2.5},
        "min_tokens": 4,
        "stop_token_ids": [7, tokenizer.stop_token_ids[0], 7],
        "model": "small",
    }
    bodies = {"/v1/chat/completions": HI, "/v1/completions": {"prompt": "Hi"}}
    for path, body in bodies.items():
        assert http.post(path, json={**body, **extra}).status_code == 200
        sampling = submitted(server).sampling
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1.0)
        assert sampling.repetition_penalty == 1.3
        assert sampling.logit_bias == ((5, -100.0), (419, 2.5))
        assert sampling.min_tokens == 4
        assert sampling.stop_token_ids == (*tokenizer.stop_token_ids, 7)
        http.post(path, json={**body, **extra, "ignore_eos": True, "stop_token_ids": [7]})
        assert submitted(server).sampling.stop_token_ids == (7,)


def test_min_tokens_beyond_max_tokens(server: Server, http: httpx.Client) -> None:
    body = {**HI, "min_tokens": 9, "max_tokens": 8}
    error = error_of(http.post("/v1/chat/completions", json=body), 400)
    assert error.param == "min_tokens"
    assert "9" in error.message
    assert "max_tokens" in error.message
    assert "8" in error.message
    # more than the server's default of 32 is what the client wants
    http.post("/v1/chat/completions", json={**HI, "min_tokens": 40})
    assert submitted(server).sampling.max_tokens == 40
    full = {"model": "large", "prompt": [5] * 250, "min_tokens": 7}
    error = error_of(http.post("/v1/completions", json=full), 400)
    assert error.param == "min_tokens"


@pytest.mark.parametrize(
    ("field", "value"), [("logit_bias", {"420": 1}), ("stop_token_ids", [5, 420])]
)
def test_option_ids_outside_the_vocabulary(http: httpx.Client, field: str, value: object) -> None:
    error = error_of(http.post("/v1/chat/completions", json={**HI, field: value}), 400)
    assert error.param == field
    assert "420" in error.message


@pytest.mark.parametrize(("field", "value"), [("min_tokens", 3), ("ignore_eos", True)])
def test_a_grammar_decides_alone_where_the_answer_ends(
    server: Server, http: httpx.Client, field: str, value: object
) -> None:
    body = {**HI, "response_format": {"type": "json_object"}}
    server.says("{}")
    assert http.post("/v1/chat/completions", json={**body, "min_tokens": 0}).status_code == 200
    assert submitted(server).grammar is not None
    error = error_of(http.post("/v1/chat/completions", json={**body, field: value}), 400)
    assert error.param == field
    assert "grammar" in error.message


def test_greedy_has_no_seed(server: Server, http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={**HI, "temperature": 0})
    assert response.json()["outrider"]["seed"] is None
    assert submitted(server).sampling.is_greedy


def test_drawn_seeds_differ(server: Server, http: httpx.Client) -> None:
    seeds = {
        http.post("/v1/chat/completions", json=HI).json()["outrider"]["seed"] for _ in range(4)
    }
    assert len(seeds) == 4
    assert seeds == {request.sampling.seed for request in server.engine.submitted}


def test_context_limits(server: Server, http: httpx.Client) -> None:
    """The prompt is 12 tokens of a context of 256; what is left is the upper bound."""
    http.post("/v1/chat/completions", json=HI)
    num_prompt = len(submitted(server).prompt_token_ids)
    fits = http.post("/v1/chat/completions", json={**HI, "max_tokens": 256 - num_prompt})
    assert fits.status_code == 200
    beyond = http.post("/v1/chat/completions", json={**HI, "max_tokens": 257 - num_prompt})
    error = error_of(beyond, 400)
    assert error.code == "context_length_exceeded"
    assert str(num_prompt) in error.message
    prompt = {"model": "large", "prompt": [5] * 240}
    server.engine.submitted.clear()
    http.post("/v1/completions", json=prompt)
    assert submitted(server).sampling.max_tokens == 16  # less than the default of 32
    full = http.post("/v1/completions", json={"model": "large", "prompt": [5] * 256})
    assert error_of(full, 400).code == "context_length_exceeded"


def test_a_hopeless_prompt_is_refused_before_tokenising(
    server: Server, http: httpx.Client, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(ChatTokenizer, "encode", never)
    monkeypatch.setattr(ChatTokenizer, "render_chat", never)
    text = "x" * 90_000
    chat = {**HI, "messages": [{"role": "user", "content": text}]}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"model": "large", "prompt": text}),
    ):
        assert error_of(http.post(path, json=body), 400).code == "context_length_exceeded"


def test_token_ids_outside_the_vocabulary(http: httpx.Client) -> None:
    error = error_of(http.post("/v1/completions", json={"model": "large", "prompt": [420]}), 400)
    assert error.param == "prompt"
    assert "420" in error.message


def test_the_templates_own_words(http: httpx.Client) -> None:
    twice = {**HI, "messages": [{**message, "name": "Ann"} for message in HI["messages"] * 2]}
    error = error_of(http.post("/v1/chat/completions", json=twice), 400)
    assert error.param == "messages"
    assert "roles must alternate" in error.message


def test_reserved_template_variables(http: httpx.Client) -> None:
    for name in ("chat_template", "tokenize", "conversation"):
        body = {**HI, "chat_template_kwargs": {name: "x"}}
        error = error_of(http.post("/v1/chat/completions", json=body), 400)
        assert error.param == f"chat_template_kwargs.{name}"


def test_models_match_the_schema(http: httpx.Client) -> None:
    listed = read_answer(ModelList, http.get("/v1/models").content)
    cards = {card.id: card for card in listed.data}
    assert [tier.tier for tier in cards["auto"].outrider] == ["small", "large"]
    assert cards["large"].outrider[0].model_id == "test/large-model"


def test_health_and_readiness(server: Server, http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"ready": True}
    server.engine.is_ready = False
    assert http.get("/health").status_code == 200
    response = http.get("/ready")
    assert error_of(response, 503).code == "engine_not_ready"
    assert response.headers["retry-after"] == "1"
    assert error_of(http.get("/v1/models"), 503)
    assert error_of(http.post("/v1/chat/completions", json=HI), 503)
    server.engine.is_paused = True
    server.engine.paused = PausedRequests(num_now=2, num_ever=5)
    assert error_of(http.get("/ready"), 503).code == "engine_not_ready"
    assert http.post("/v1/chat/completions", json=HI).status_code == 200
    told = http.get("/metrics").text
    assert "outrider_num_requests_paused 2.0" in told
    assert "outrider_requests_paused_total 5.0" in told


def test_one_tier_only_and_a_failed_start(tokenizer: ChatTokenizer) -> None:
    engine = ScriptedClient(
        vocab_size=420, script=lambda _: Script(), tiers=("large",), start_error=OSError("no file")
    )
    app = build_app(parts_over(engine, tokenizer, tiers=("large",)))
    with running(app) as url:
        assert "no file" in error_of(httpx.get(f"{url}/ready"), 503).message
        assert "no file" in error_of(httpx.post(f"{url}/v1/chat/completions", json=HI), 503).message
        engine.is_ready = True
        names = [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]]
        assert "small" not in names
        small = {**HI, "model": "small"}
        response = httpx.post(f"{url}/v1/chat/completions", json=small)
        assert error_of(response, 404).code == "model_not_found"


def test_many_streams_and_disconnects_leave_nothing_running(server: Server) -> None:
    """Sixty streams, two choices each; every second client leaves at a random moment."""
    server.says("Hello there, how are you today?", gap_s=0.005)
    body = {**HI, "stream": True, "n": 2}
    rng = random.Random(3)

    async def stay(client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/chat/completions", json=body)
        assert response.text.endswith("data: [DONE]\n\n")

    async def leave(client: httpx.AsyncClient, after_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stay(client), after_s)

    async def main() -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=server.url, limits=limits, timeout=30) as client,
            asyncio.TaskGroup() as group,
        ):
            for index in range(60):
                work = leave(client, rng.uniform(0, 0.3)) if index % 2 else stay(client)
                group.create_task(work)

    asyncio.run(main())
    wait_for(lambda: not server.engine.running)
    assert len(server.engine.submitted) >= 60
