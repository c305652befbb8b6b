"""Traces and captures of requests: real sockets, a scripted engine, a mock upstream server."""

import json
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry

from outrider.gateway.telemetry.logs import JsonFormatter
from outrider.gateway.telemetry.otel import OtelTracer, SpanCounts, make_provider
from tests.gateway.conftest import OpenWorld, wait_for
from tests.gateway.hybrid import LOCAL_TEXT, TestPolicy, World
from tests.gateway.scripted_client import Script, Step
from tests.gateway.watches import PlannedWatch

Make = Callable[..., AbstractContextManager[World]]
PROMPT = "a prompt that must stay out of every trace"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


class Seen:
    """The spans that were recorded."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = make_provider(has_content=True)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = OtelTracer(
            provider,
            SpanCounts(CollectorRegistry()),
            TraceContextTextMapPropagator(),
            clock=time.monotonic,
            wall_clock=time.time,
        )

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        """By name; as they have ended by now."""
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def after(self, *names: str) -> dict[str, ReadableSpan]:
        """When all of these have ended: the client has its answer a little earlier."""
        wait_for(lambda: set(names) <= set(self.spans))
        return self.spans


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def make(open_world: OpenWorld, seen: Seen) -> Make:
    return partial(open_world, tracer=seen.tracer)


def said(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def ask(world: World, **fields: Any) -> Any:
    return world.chat(messages=[{"role": "user", "content": PROMPT}], **fields)


ROOT = "POST /v1/chat/completions"


def test_a_local_answers_trace(make: Make, seen: Seen) -> None:
    with make() as world:
        ids = world.encode(LOCAL_TEXT)
        steps = [Step(token_ids=tuple(ids[:4]), num_drafted=6, num_accepted=3)]
        steps += [Step(token_ids=(token,)) for token in ids[4:]]
        world.engine.script = lambda _: Script(steps=steps, num_cached_tokens=2)
        headers = {"traceparent": PARENT, "x-request-id": "my-id"}
        assert ask(world, max_tokens=50, headers=headers).status_code == 200
        spans = seen.after(ROOT, "generate small")
        world.http.get("/v1/models")
        world.http.get("/ready")
    assert set(seen.spans) == {ROOT, "route", "generate small", "queue", "prefill", "decode"}
    root, work = spans[ROOT], spans["generate small"]
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    assert spans["route"].parent.span_id == work.parent.span_id == root.context.span_id
    assert said(root)["outrider.request.id"] == "my-id"
    assert said(root)["gen_ai.request.model"] == "auto"
    assert said(root)["gen_ai.request.max_tokens"] == 50
    assert said(root)["gen_ai.usage.output_tokens"] == len(ids)
    assert said(root)["http.response.status_code"] == 200
    assert said(root)["outrider.outcome"] == "answered"
    assert said(root)["http.request.method"] == "POST"
    assert said(root)["http.route"] == said(root)["url.path"] == "/v1/chat/completions"
    assert (said(root)["url.scheme"], said(root)["server.address"]) == ("http", "127.0.0.1")
    assert said(spans["route"])["outrider.quality"] == 0.4
    assert said(work)["outrider.steps"] == len(steps)
    assert said(work)["outrider.drafted_tokens"] == 6
    assert said(work)["outrider.accepted_tokens"] == 3
    assert said(work)["gen_ai.usage.cache_read.input_tokens"] == 2
    text = "".join(span.to_json() for span in spans.values())
    assert PROMPT not in text
    assert LOCAL_TEXT not in text


def test_a_models_name_in_the_path_is_in_no_route(make: Make, seen: Seen) -> None:
    with make() as world:
        path = "/openai/deployments/auto/chat/completions"
        asked = world.http.post(path, json={"messages": [{"role": "user", "content": "x"}]})
        assert asked.status_code == 200
        root = seen.after(ROOT)[ROOT]
    assert (said(root)["http.route"], said(root)["url.path"]) == ("/v1/chat/completions", path)


MAIL = "me@mail.example"


@pytest.mark.slow_cases
@pytest.mark.parametrize("is_private", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_texts_are_in_the_trace_where_that_is_wanted(
    make: Make, seen: Seen, is_streamed: bool, is_private: bool
) -> None:
    """Redacted, and never of a private request."""
    with make(telemetry={"traces": {"content": True}}) as world:
        fields: dict[str, Any] = {"outrider": {"privacy": "private"}} if is_private else {}
        messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": MAIL}]
        request = {"model": "auto", "messages": messages, "stream": is_streamed, **fields}
        assert world.http.post("/v1/chat/completions", json=request).status_code == 200
        root = said(seen.after(ROOT)[ROOT])
    if is_private:
        assert not {name for name in root if name.endswith("messages")}
        return
    asked, answered = (json.loads(root[f"gen_ai.{way}.messages"]) for way in ("input", "output"))
    assert [(each["role"], each["parts"]) for each in asked] == [
        ("system", [{"type": "text", "content": "Be short."}]),
        ("user", [{"type": "text", "content": "[email]"}]),
    ]
    assert answered == [{"role": "assistant", "parts": [{"type": "text", "content": LOCAL_TEXT}]}]
    assert MAIL not in str(root)


def test_an_upstream_tier_is_part_of_the_trace(make: Make, seen: Seen) -> None:
    with make() as world:
        response = ask(world, model="cloud", headers={"traceparent": PARENT})
        assert response.status_code == 200
        spans = seen.after(ROOT, "chat mock-model")
        sent = {name.lower(): value for name, value in world.cloud.requests[-1].headers.items()}
    asked = spans["chat mock-model"]
    assert sent["traceparent"] == f"00-{TRACE}-{asked.context.span_id:016x}-01"
    assert said(asked)["outrider.outcome"] == "answered"
    assert said(asked)["http.response.status_code"] == 200
    assert said(asked)["gen_ai.usage.output_tokens"] > 0
    assert said(asked)["server.address"] == "127.0.0.1"
    assert said(spans[ROOT])["outrider.tier"] == "cloud"


def test_a_change_of_tier_makes_two_pieces_of_work(make: Make, seen: Seen) -> None:
    def watched(_: object) -> Script:
        steps = [Step(token_ids=(token,)) for token in range(300, 304)]
        large = [Step(token_ids=(token,)) for token in range(310, 316)]
        return Script(steps=steps, hidden_state=None, escalated=Script(steps=large))

    policy = TestPolicy(watch=lambda: PlannedWatch(action="escalate", at=2), hold_back_s=5.0)
    with make(policy=policy) as world:
        world.engine.script = watched
        assert ask(world, max_tokens=20).status_code == 200
        spans = seen.after(ROOT, "generate small", "generate large")
    small, large = spans["generate small"], spans["generate large"]
    assert small.start_time < small.end_time <= large.start_time < large.end_time
    assert said(small)["outrider.discarded_tokens"] > 0
    assert said(large)["gen_ai.usage.output_tokens"] == 6
    assert said(spans[ROOT])["outrider.tier"] == "large"


def test_a_client_that_leaves(make: Make, seen: Seen) -> None:
    with make() as world:
        world.engine.script = lambda _: Script(steps=[Step(token_ids=(300,))], hangs=True)
        request = {"model": "auto", "messages": [{"role": "user", "content": "x"}], "stream": True}
        with world.http.stream("POST", "/v1/chat/completions", json=request) as response:
            next(response.iter_lines())
        spans = seen.after(ROOT, "generate small")
    assert said(spans[ROOT])["outrider.outcome"] == "cancelled"
    assert said(spans["generate small"])["gen_ai.response.finish_reasons"] == ("abort",)
    assert spans[ROOT].status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("fields", "status", "error_type"),
    [
        ({"model": "nobody"}, 404, "model_not_found"),
        ({"max_tokens": -2}, 400, "BadRequestError"),
    ],
)
def test_a_request_that_is_refused(
    make: Make, seen: Seen, fields: dict[str, Any], status: int, error_type: str
) -> None:
    with make() as world:
        assert ask(world, **fields).status_code == status
        spans = seen.after(ROOT)
    assert said(spans[ROOT])["http.response.status_code"] == status
    assert said(spans[ROOT])["error.type"] == error_type


def test_an_engine_that_fails_in_mid_stream(make: Make, seen: Seen) -> None:
    with make() as world:
        script = Script(steps=[Step(token_ids=(300,))], failure=("numerics", "not a number"))
        world.engine.script = lambda _: script
        response = ask(world, stream=True)
        assert response.status_code == 200
        assert "numerics" in response.text
        spans = seen.after(ROOT, "generate small")
    assert said(spans["generate small"])["error.type"] == "numerics"
    assert said(spans[ROOT])["error.type"] == "numerics"
    assert said(spans[ROOT])["http.response.status_code"] == 200


def test_lines_of_a_request_name_its_trace(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler = Keep()
    handler.setFormatter(JsonFormatter("gateway"))
    logger = logging.getLogger("outrider.gateway.http.server.answer_response")
    logger.addHandler(handler)
    caplog.set_level(logging.INFO, "outrider.gateway.http.server.answer_response")
    try:
        with make() as world:
            ask(world, headers={"traceparent": PARENT, "x-request-id": "my-id"})
            wait_for(lambda: len(lines) > 0)
    finally:
        logger.removeHandler(handler)
    line = json.loads(lines[0])
    assert (line["event"], line["request_id"], line["trace_id"]) == ("answered", "my-id", TRACE)
    assert line["key"] == "anonymous"
    assert PROMPT not in lines[0]


def captured(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


@pytest.mark.slow_cases
@pytest.mark.parametrize("is_streamed", [False, True])
def test_answers_are_captured_where_that_is_wanted(
    make: Make, tmp_path: Path, is_streamed: bool
) -> None:
    with make(telemetry={"capture": {"folder": str(tmp_path)}}) as world:
        assert ask(world, stream=is_streamed, headers={"x-request-id": "r-1"}).status_code == 200
        assert ask(world, stream=is_streamed, model="cloud").status_code == 200
        asked = world.http.post("/v1/responses", json={"model": "auto", "input": PROMPT})
        assert asked.status_code == 200
    local, cloud, responses = captured(tmp_path)
    assert local["answer"] == [LOCAL_TEXT]
    assert local["request"]["messages"][0]["content"] == PROMPT
    assert (local["request_id"], local["tier"], local["outcome"]) == ("r-1", "small", "answered")
    assert cloud["tier"] == "cloud"
    assert cloud["answer"][0]
    assert (responses["endpoint"], responses["request"]["input"]) == ("responses", PROMPT)
    assert responses["answer"] == [LOCAL_TEXT]


def test_private_requests_are_not_captured(make: Make, tmp_path: Path) -> None:
    with make(telemetry={"capture": {"folder": str(tmp_path)}}) as world:
        assert ask(world, outrider={"privacy": "private"}).status_code == 200
        assert ask(world).status_code == 200
    assert len(captured(tmp_path)) == 1
