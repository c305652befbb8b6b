"""A cascade as a client sees it: headers, report, usage, the model's name, and the log."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from outrider.gateway.answering.candidates.fallback import FallbackChain, Lineup, unbounded
from outrider.gateway.answering.candidates.local_candidate import LocalCandidate
from outrider.gateway.answering.candidates.local_responder import LocalResponder, Writing
from outrider.gateway.answering.jobs.job import Job
from outrider.gateway.answering.reading.local_load import LocalLoad
from outrider.gateway.answering.streaming.generation import Generation
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.answers.responder import Responder, RouteReason
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.contract.schema.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
)
from outrider.gateway.http.server.answer_response import AnswerResponse, header_text
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from outrider.router.watch import Action
from tests.gateway.answers import read_answer
from tests.gateway.scripted_client import Script, ScriptedClient, Step
from tests.gateway.watches import PlannedWatch, letters, watched_job

Encode = Callable[[str], list[int]]

SMALL = "The small answer, secret to the log."
LARGE = "Another one."


@dataclass(frozen=True)
class Answered:
    """The response that was sent, and the metrics."""

    headers: dict[str, str]
    body: str
    metrics: GatewayMetrics

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events of a stream but the last, which is [DONE]."""
        events = self.body.removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]

    def count(self, sample: str) -> float:
        """The value of one sample of /metrics; 0 where it is not there."""
        lines = self.metrics.exposition(None).decode().splitlines()
        return next((float(x.rpartition(" ")[2]) for x in lines if x.startswith(sample + " ")), 0.0)


def engine_of(encode: Encode) -> ScriptedClient:
    """The small answer, and a large one in steps of three tokens, of which it held two."""
    ids = letters(LARGE, encode)
    large = [
        Step(token_ids=tuple(ids[i : i + 3]), num_drafted=4, num_accepted=2, num_reused=2)
        for i in range(0, len(ids), 3)
    ]
    small = [Step(token_ids=(token_id,)) for token_id in letters(SMALL, encode)]
    script = Script(steps=small, escalated=Script(steps=large, num_cached_tokens=1))
    return ScriptedClient(vocab_size=420, script=lambda _: script)


def answered(
    engine: ScriptedClient, job: Job, *, num_top: int | None = None, **options: Any
) -> Answered:
    metrics = GatewayMetrics()
    endpoint: Endpoint = "completion" if options.pop("is_completion", False) else "chat"
    job = msgspec.structs.replace(job, endpoint=endpoint, num_top_logprobs=num_top)
    generation = Generation(engine, job, metrics)
    writing = Writing(
        is_streamed=options["stream"],
        with_usage=options.get("with_usage", False),
        with_trace=options.get("with_trace", False),
    )

    class OneLeg(LocalCandidate):
        async def open(self, origin: RouteReason) -> Responder:
            ticket = LocalLoad(time.monotonic).admit()
            return LocalResponder(generation, writing, origin, ticket)

    parsed: Any = SimpleNamespace(
        context=SimpleNamespace(ignored_fields=(), check=None),
        constraints=SimpleNamespace(is_private=False, deadline_s=None),
        is_streamed=writing.is_streamed,
    )
    none: Any = SimpleNamespace(ignored_fields=(), request=None)
    leg = OneLeg(parts=none, parsed=parsed, query=none, strong_tier=None, start_timeout=unbounded)
    answering = FallbackChain(parsed, none, lambda *_: Lineup(candidates=[leg]))
    response = AnswerResponse(answering, clock=time.monotonic)
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nobody leaves")

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(response({"type": "http", "state": {"request_id": "abc"}}, receive, send))
    start, *parts = sent
    return Answered(
        headers={name.decode(): value.decode() for name, value in start["headers"]},
        body=b"".join(part["body"] for part in parts).decode(),
        metrics=metrics,
    )


def test_an_escalated_answer_says_so(tokenizer: ChatTokenizer, encode: Encode) -> None:
    job = watched_job(tokenizer, [PlannedWatch("escalate", 16)])
    result = answered(engine_of(encode), job, stream=False)
    reason = "router: unsure (0.55); cascade: escalate at tokens"
    assert result.headers["x-outrider-tier"] == "large"
    assert result.headers["x-outrider-reason"] == reason
    answer = read_answer(ChatCompletion, result.body)
    assert answer.model == "test/large-model"
    assert answer.choices[0].message.content == LARGE
    assert answer.choices[0].logprobs is None  # they were the watch's
    report = answer.outrider
    assert (report.tier, report.route_tier, report.escalated) == ("large", "small", True)
    assert report.reason == reason
    assert (report.quality, report.confidence) == (0.55, 0.5)
    assert (report.held_tokens, report.reused_tokens, report.discarded_tokens) == (16, 8, 8)
    assert (report.drafted_tokens, report.accepted_tokens) == (16, 8)
    usage = answer.usage
    assert usage.completion_tokens == len(LARGE)
    assert usage.completion_tokens_details.discarded_tokens == 8
    assert usage.prompt_tokens_details.cached_tokens == 1
    assert result.count('outrider_cascade_decisions_total{action="escalate",tier="large"}') == 1
    assert result.count("outrider_cascade_held_tokens_total") == 16
    assert result.count("outrider_cascade_reused_tokens_total") == 8
    assert result.count("outrider_cascade_discarded_tokens_total") == 8
    for name, value in (
        ("time_to_first_token_seconds_count", 1),
        ("e2e_request_latency_seconds_count", 1),
        ("request_queue_time_seconds_count", 1),
        ("inter_token_latency_seconds_count", 3),
        ("generation_tokens_total", len(LARGE)),
        ("prompt_tokens_total", 2),
    ):
        assert result.count(f'outrider_{name}{{tier="large"}}') == value, name
        assert result.count(f'outrider_{name}{{tier="small"}}') == 0, name


@pytest.mark.parametrize("at", [0, 5, 16, None])
def test_a_kept_answer_says_so(tokenizer: ChatTokenizer, encode: Encode, at: int | None) -> None:
    job = watched_job(tokenizer, [PlannedWatch("commit", at)])
    result = answered(engine_of(encode), job, stream=False)
    answer = read_answer(ChatCompletion, result.body)
    assert result.headers["x-outrider-tier"] == "small"
    assert (answer.model, answer.choices[0].message.content) == ("test/small-model", SMALL)
    report = answer.outrider
    assert (report.tier, report.escalated, report.confidence) == ("small", False, 0.5)
    num_held = len(SMALL) if at is None else at
    assert (report.held_tokens, report.reused_tokens, report.discarded_tokens) == (num_held, 0, 0)
    assert answer.usage.completion_tokens == len(SMALL)
    assert result.count('outrider_cascade_decisions_total{action="commit",tier="small"}') == 1
    assert result.count('outrider_time_to_first_token_seconds_count{tier="small"}') == 1
    # What was held comes at once: there is no gap between its tokens.
    num_gaps = len(SMALL) - max(num_held, 1)
    assert result.count('outrider_inter_token_latency_seconds_count{tier="small"}') == num_gaps


@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize("action", ["commit", "escalate"])
def test_streams_know_the_decision_from_their_headers_on(
    tokenizer: ChatTokenizer, encode: Encode, action: Action, with_usage: bool
) -> None:
    job = watched_job(tokenizer, [PlannedWatch(action, 16)])
    result = answered(engine_of(encode), job, stream=True, with_usage=with_usage)
    tier, text = ("large", LARGE) if action == "escalate" else ("small", SMALL)
    assert result.headers["x-outrider-tier"] == tier
    assert result.headers["x-outrider-reason"].endswith(f"; cascade: {action} at tokens")
    chunks = [read_answer(ChatCompletionChunk, chunk) for chunk in result.chunks]
    assert {chunk.model for chunk in chunks} == {f"test/{tier}-model"}
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == text
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert not any(choice.logprobs for choice in choices)
    report = result.chunks[-1]["outrider"]
    assert (report["tier"], report["held_tokens"]) == (tier, 16)
    if with_usage:
        assert result.chunks[-1]["usage"]["completion_tokens"] == len(text)


@pytest.mark.parametrize("is_completion", [False, True])
@pytest.mark.parametrize("action", ["commit", "escalate"])
def test_log_probabilities_belong_to_the_sent_tokens(
    tokenizer: ChatTokenizer, encode: Encode, action: Action, is_completion: bool
) -> None:
    """And are there where the client asked, though the watch asked for all."""
    text = LARGE if action == "escalate" else SMALL
    for num_top, expected in ((0, text), (None, None)):
        for stream in (False, True):
            result = answered(
                engine_of(encode),
                watched_job(tokenizer, [PlannedWatch(action, 7)]),
                num_top=num_top,
                stream=stream,
                is_completion=is_completion,
            )
            documents = result.chunks if stream else [json.loads(result.body)]
            model = Completion if is_completion else ChatCompletion
            if not stream:
                read_answer(model, documents[0])
            found = [
                choice["logprobs"]
                for document in documents
                for choice in document["choices"]
                if choice["logprobs"] is not None
            ]
            if expected is None:
                assert found == []
            elif is_completion:
                assert "".join(token for entry in found for token in entry["tokens"]) == expected
            else:
                tokens = [token["token"] for entry in found for token in entry["content"]]
                assert "".join(tokens) == expected


def test_an_unwatched_answer_reports_no_cascade(tokenizer: ChatTokenizer, encode: Encode) -> None:
    job = msgspec.structs.replace(watched_job(tokenizer, []), watch=None, escalation=None)
    (plan,) = watched_job(tokenizer, [PlannedWatch()]).choices
    plan = msgspec.structs.replace(plan, request=replace(plan.request, may_escalate=False))
    result = answered(
        engine_of(encode), msgspec.structs.replace(job, choices=(plan,)), stream=False
    )
    report = json.loads(result.body)["outrider"]
    assert report["reason"] == "router: unsure (0.55)"
    assert (report["confidence"], report["held_tokens"], report["escalated"]) == (None, 0, False)
    assert "outrider_cascade_decisions_total{" not in result.metrics.exposition(None).decode()


def test_one_line_a_request_without_its_text(
    tokenizer: ChatTokenizer, encode: Encode, caplog: pytest.LogCaptureFixture
) -> None:
    job = watched_job(tokenizer, [PlannedWatch("commit", 3)])
    with caplog.at_level(logging.INFO, "outrider.gateway.http.server.answer_response"):
        answered(engine_of(encode), job, stream=True)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "request_id=abc job=job tier=small" in line
    assert f"outcome=stop tokens={len(SMALL)} ttft_s=" in line
    assert "secret" not in line


def test_headers_are_one_ascii_line() -> None:
    assert header_text("a\r\nx-evil: 1\tü") == "a x-evil: 1 ?"
