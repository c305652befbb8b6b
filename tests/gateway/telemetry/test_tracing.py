"""Traces: what is recorded of a request, what goes on to others, and that nothing is without."""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry

from outrider.gateway.settings.telemetry import TraceSettings
from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.telemetry.content import content_attributes
from outrider.gateway.telemetry.otel import (
    CountingExporter,
    OtelTracer,
    SpanCounts,
    make_provider,
    sample,
)
from outrider.gateway.telemetry.spans import (
    AnswerMarks,
    AttemptMarks,
    EngineMarks,
    RequestMarks,
    begin_attempt,
    end_attempt,
    record_answer,
    record_engine,
    record_http,
    record_request,
    record_route,
)
from outrider.gateway.telemetry.tracer import NULL_SPAN, NULL_TRACER, Tracer
from outrider.gateway.telemetry.tracing import build_tracer
from tests.gateway.telemetry.collectors import Collector, serve_collector
from tests.gateway.waiting import wait_for

ROOT = Path(__file__).parents[3]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{SPAN}-01"
NOT_SAMPLED = f"00-{TRACE}-{SPAN}-00"
EPOCH_S = 1_800_000_000.0
NANOS = 10**9


@dataclass
class Watched:
    """A tracer and what it recorded. Its clock stands at 100 s, which is `EPOCH_S` in UTC."""

    tracer: OtelTracer
    exporter: InMemorySpanExporter
    registry: CollectorRegistry

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def count(self, state: str) -> float | None:
        return self.registry.get_sample_value("outrider_trace_spans_total", {"state": state})


def watched(share: float = 1.0, clock: Callable[[], float] = lambda: 100.0) -> Watched:
    random.seed(7)  # the SDK's ids come from there, and decide about the share
    registry, exporter = CollectorRegistry(), InMemorySpanExporter()
    provider, counts = make_provider(sample(share, clock)), SpanCounts(registry)
    provider.add_span_processor(SimpleSpanProcessor(CountingExporter(exporter, counts)))
    tracer = OtelTracer(
        provider,
        counts,
        TraceContextTextMapPropagator(),
        clock=clock,
        wall_clock=lambda: EPOCH_S,
    )
    return Watched(tracer, exporter, registry)


def at(span: ReadableSpan) -> tuple[float, float]:
    """Its start and end, on the gateway's clock."""
    assert span.start_time is not None
    assert span.end_time is not None
    start, end = (nanos / NANOS - EPOCH_S + 100.0 for nanos in (span.start_time, span.end_time))
    return pytest.approx(start, abs=1e-5), pytest.approx(end, abs=1e-5)


def marks() -> EngineMarks:
    return EngineMarks(
        tier="small",
        model="tiny",
        started_s=91.0,
        ended_s=95.0,
        scheduled_s=91.5,
        first_token_s=93.0,
        num_prompt_tokens=40,
        num_cached_tokens=30,
        num_computed_tokens=10,
        num_output_tokens=12,
        num_steps=5,
        num_drafted_tokens=20,
        num_accepted_tokens=7,
        finish_reason="stop",
    )


def test_a_requests_whole_tree() -> None:
    seen = watched()
    root = seen.tracer.begin("POST /v1/chat/completions", start_s=90.0)
    record_request(root, RequestMarks(request_id="r-1", model="auto", key_id="k1", max_tokens=64))
    record_route(root, start_s=90.1, end_s=90.2, tier="small", reason="easy", quality=0.9)
    record_engine(root, marks())
    attempt = begin_attempt(
        root, tier="cloud", replica="host:8443", kind="answer", model="big", start_s=95.0
    )
    end_attempt(
        attempt, AttemptMarks(outcome="answered", ended_s=97.0, first_token_s=96.0, status=200)
    )
    answer = AnswerMarks(
        status=200, outcome="answered", tier="cloud", ttft_s=6.0, num_completion_tokens=12
    )
    record_answer(root, answer)
    root.end(98.0)
    root.end(99.0)  # twice is once

    spans = seen.spans()
    assert len(seen.exporter.get_finished_spans()) == 7
    assert seen.count("ended") == seen.count("sent") == 7
    top, work = spans["POST /v1/chat/completions"], spans["generate small"]
    assert top.parent is None
    assert top.kind is SpanKind.SERVER
    assert at(top) == (90.0, 98.0)
    assert {span.context.trace_id for span in spans.values()} == {top.context.trace_id}
    for name in ("route", "generate small", "chat big"):
        assert spans[name].parent.span_id == top.context.span_id
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent.span_id == work.context.span_id
    assert at(work) == (91.0, 95.0)
    assert at(spans["queue"]) == (91.0, 91.5)
    assert at(spans["prefill"]) == (91.5, 93.0)
    assert at(spans["decode"]) == (93.0, 95.0)
    assert spans["decode"].attributes == {
        "outrider.steps": 5,
        "outrider.output_tokens": 12,
        "outrider.drafted_tokens": 20,
        "outrider.accepted_tokens": 7,
    }
    assert spans["prefill"].attributes == {
        "outrider.computed_tokens": 10,
        "outrider.cached_tokens": 30,
    }
    assert top.attributes is not None
    assert top.attributes["gen_ai.request.model"] == "auto"
    assert top.attributes["gen_ai.usage.output_tokens"] == 12
    assert top.attributes["outrider.key.id"] == "k1"
    asked = spans["chat big"]
    assert asked.kind is SpanKind.CLIENT
    assert asked.attributes is not None
    assert (asked.attributes["server.address"], asked.attributes["server.port"]) == ("host", 8443)
    assert [event.name for event in asked.events] == ["first_token"]


def test_names_are_those_of_the_conventions() -> None:
    """Every name is one that OpenTelemetry knows, or says that it is ours."""
    import opentelemetry.semconv._incubating.attributes.gen_ai_attributes as gen_ai
    import opentelemetry.semconv.attributes.error_attributes as error
    import opentelemetry.semconv.attributes.http_attributes as http
    import opentelemetry.semconv.attributes.server_attributes as server

    known = {
        value
        for module in (gen_ai, error, http, server)
        for value in vars(module).values()
        if isinstance(value, str)
    }
    import opentelemetry.semconv.attributes.url_attributes as url

    known |= {value for value in vars(url).values() if isinstance(value, str)}
    seen = watched()
    root = seen.tracer.begin("POST /v1/chat/completions")
    record_http(root, method="POST", route="/r", path="/r", scheme="http", host="h")
    root.set(content_attributes({"system": "s", "messages": [{"content": "x"}]}, ["y"]))
    asked = RequestMarks(
        request_id="r", model="m", num_choices=2, max_tokens=1, temperature=1.0, top_p=0.5
    )
    record_request(root, asked)
    record_engine(root, marks())
    attempt = begin_attempt(root, tier="c", replica="h:1", kind="retry", model="b", start_s=95.0)
    end_attempt(attempt, AttemptMarks(outcome="failed", ended_s=96.0, failure="status", status=500))
    record_answer(root, AnswerMarks(status=502, outcome="failed", num_prompt_tokens=3, ttft_s=1.0))
    root.end()
    names = {name for span in seen.spans().values() for name in (span.attributes or {})}
    assert len(names) > 20
    assert not {name for name in names - known if not name.startswith("outrider.")}


def test_a_request_that_was_aborted_in_the_queue() -> None:
    seen = watched()
    root = seen.tracer.begin("r")
    record_engine(root, EngineMarks(tier="large", model="m", started_s=91.0, ended_s=92.0))
    root.end()
    assert set(seen.spans()) == {"r", "generate large", "queue"}
    assert at(seen.spans()["queue"]) == (91.0, 92.0)


def test_work_without_a_schedule_time_has_no_queue_span() -> None:
    """Such as a tier's that took a sequence over."""
    seen = watched()
    root = seen.tracer.begin("r")
    root.end()
    taken = EngineMarks(
        tier="large",
        model="m",
        started_s=91.0,
        ended_s=95.0,
        first_token_s=92.0,
        num_computed_tokens=5,
    )
    record_engine(root, taken)  # told after the response's end, as after an abort
    spans = seen.spans()
    assert set(spans) == {"r", "generate large", "prefill", "decode"}
    assert at(spans["prefill"]) == (91.0, 92.0)
    assert spans["generate large"].parent.span_id == spans["r"].context.span_id


def test_clocks_that_disagree_make_no_negative_spans() -> None:
    seen = watched()
    root = seen.tracer.begin("r")
    odd = EngineMarks(
        tier="large", model="m", started_s=91.0, ended_s=90.0, scheduled_s=96.0, first_token_s=92.0
    )
    record_engine(root, odd)
    for span in seen.exporter.get_finished_spans():
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.end_time >= span.start_time


def test_failures_are_marked() -> None:
    seen = watched()
    root = seen.tracer.begin("r")
    attempt = begin_attempt(root, tier="c", replica="h:1", kind="answer", model="b", start_s=95.0)
    end_attempt(attempt, AttemptMarks(outcome="failed", ended_s=96.0, failure="connect"))
    record_answer(root, AnswerMarks(status=503, outcome="failed", error_type="engine_died"))
    root.end()
    spans = seen.spans()
    for name, what in (("chat b", "connect"), ("r", "engine_died")):
        assert spans[name].status.status_code is StatusCode.ERROR
        assert (spans[name].attributes or {})["error.type"] == what


def test_a_lost_hedge_is_no_failure() -> None:
    seen = watched()
    attempt = begin_attempt(
        seen.tracer.begin("r"), tier="c", replica="h:1", kind="hedge", model="b", start_s=95.0
    )
    end_attempt(attempt, AttemptMarks(outcome="lost", ended_s=96.0))
    assert seen.spans()["chat b"].status.status_code is StatusCode.UNSET


def test_a_callers_trace_goes_on_and_out() -> None:
    seen = watched(share=0.0)
    root = seen.tracer.begin("r", headers={"traceparent": SAMPLED, "tracestate": "vendor=1"})
    assert root.trace_id == TRACE
    attempt = begin_attempt(root, tier="c", replica="h:1", kind="answer", model="b", start_s=95.0)
    out = attempt.headers()
    end_attempt(attempt, AttemptMarks(outcome="answered", ended_s=96.0))
    root.end()
    spans = seen.spans()
    assert f"{spans['r'].parent.span_id:016x}" == SPAN
    assert out["traceparent"] == f"00-{TRACE}-{spans['chat b'].context.span_id:016x}-01"
    assert out["tracestate"] == "vendor=1"


def test_an_unsampled_caller_is_not_traced() -> None:
    seen = watched(share=1.0)
    root = seen.tracer.begin("r", headers={"traceparent": NOT_SAMPLED, "tracestate": "vendor=1"})
    assert not root.is_recording
    child = begin_attempt(root, tier="c", replica="h:1", kind="answer", model="b", start_s=95.0)
    assert child.headers() == {"traceparent": NOT_SAMPLED, "tracestate": "vendor=1"}
    record_engine(root, marks())
    record_answer(root, AnswerMarks(status=200, outcome="answered"))
    root.end()
    assert not seen.exporter.get_finished_spans()


def test_callers_may_demand_so_many_traces_a_second() -> None:
    """Else any client has all its requests traced, whatever share the operator has set."""
    now = [100.0]
    seen = watched(share=0.0, clock=lambda: now[0])

    def num_kept() -> int:
        begun = [seen.tracer.begin("r", headers={"traceparent": SAMPLED}) for _ in range(500)]
        # Further on the trace stays what its caller says.
        assert all(root.headers()["traceparent"].endswith("-01") for root in begun)
        return sum(root.is_recording for root in begun)

    assert num_kept() == 100
    assert num_kept() == 0
    now[0] += 0.5
    assert num_kept() == 50
    now[0] -= 3600.0  # a clock that goes back gives nothing
    assert num_kept() == 0


def test_the_share_decides_for_the_rest() -> None:
    seen = watched(share=0.25)
    for _ in range(1000):
        root = seen.tracer.begin("r")
        # Those behind us are told, or they would throw their own dice.
        flags = int(root.headers()["traceparent"][-2:], 16)
        assert flags & 1 == root.is_recording
        root.end()
    assert 200 < len(seen.exporter.get_finished_spans()) < 300


def test_values_chosen_by_clients_are_cut() -> None:
    seen = watched()
    root = seen.tracer.begin("r")
    record_request(root, RequestMarks(request_id="x" * 5000, model="m" * 5000))
    root.set({"outrider.reason": "y" * 5000})
    root.end()
    attributes = seen.spans()["r"].attributes or {}
    assert max(len(value) for value in attributes.values() if isinstance(value, str)) <= 512


@pytest.mark.slow
def test_without_a_collector_nothing_is_traced_or_loaded() -> None:
    tracer = build_tracer(
        TraceSettings(),
        CollectorRegistry(),
        environ={},
        clock=time.monotonic,
        wall_clock=time.time,
    )
    assert tracer is NULL_TRACER
    span = tracer.begin("r", headers={"traceparent": SAMPLED})
    assert span is NULL_SPAN
    assert span.child("x") is NULL_SPAN
    assert not span.headers()
    record_engine(span, marks())
    record_answer(span, AnswerMarks(status=200, outcome="answered"))
    script = """
import sys
import outrider.gateway.telemetry.tracing, outrider.gateway.telemetry.spans
import outrider.gateway.telemetry.capture
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def build(endpoint: str, registry: CollectorRegistry | None = None) -> OtelTracer:
    tracer = build_tracer(
        TraceSettings(endpoint=endpoint, service_name="my gateway"),
        registry or CollectorRegistry(),
        environ=os.environ,
        clock=time.monotonic,
        wall_clock=time.time,
    )
    assert isinstance(tracer, OtelTracer)
    return tracer


@pytest.mark.parametrize(
    "endpoint",
    ["", "localhost:4318", "ftp://host", "http://", "http://h:0", "http://h:99999", "http://[::1"],
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="is not the address of a collector"):
        build(endpoint)


@pytest.mark.parametrize(
    "endpoint", ["https://me:hunter2@h:4318", "https://h/?key=hunter2", "https://h/#hunter2"]
)
def test_secrets_do_not_belong_in_the_endpoint(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        build(endpoint)
    assert "hunter2" not in str(refused.value)


def test_without_the_extra_the_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "outrider.gateway.telemetry.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(SettingsError, match=r"pip install \"outrider\[otel\]"):
        build("http://127.0.0.1:4318")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with serve_collector(ExportTraceServiceRequest) as made:
        yield made


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_traces_reach_a_collector_at_the_latest_at_the_end(collector: Collector, path: str) -> None:
    registry = CollectorRegistry()
    tracer = build(collector.url + path, registry)
    root = tracer.begin("POST /v1/completions")
    record_engine(root, marks())
    root.end()
    asyncio.run(tracer.close())
    ((where, request),) = collector.requests
    assert where == "/v1/traces"
    (resource,) = request.resource_spans
    named = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert named["service.name"] == "my gateway"
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == ["POST /v1/completions", "decode", "generate small", "prefill", "queue"]
    sent = registry.get_sample_value("outrider_trace_spans_total", {"state": "sent"})
    assert sent == registry.get_sample_value("outrider_trace_spans_total", {"state": "ended"}) == 5


def test_an_absent_collector_delays_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(InMemorySpanExporter):
        """Takes what it is given, and never comes back in time."""

        def __init__(self) -> None:
            super().__init__()
            self.freed = threading.Event()

        def export(self, spans: object) -> None:  # type: ignore[override]
            self.freed.wait(10)
            raise ConnectionError("secret-host:1")

    stuck, registry = Stuck(), CollectorRegistry()
    provider, counts = make_provider(), SpanCounts(registry)
    processor = BatchSpanProcessor(CountingExporter(stuck, counts), max_queue_size=8,
                                   max_export_batch_size=4)  # fmt: skip
    provider.add_span_processor(processor)
    tracer = OtelTracer(
        provider,
        counts,
        TraceContextTextMapPropagator(),
        clock=time.monotonic,
        wall_clock=time.time,
        close_timeout_s=0.05,
    )
    begun_s = time.monotonic()
    for _ in range(1000):
        tracer.begin("r").end()
    asyncio.run(tracer.close())
    assert time.monotonic() - begun_s < 5
    assert registry.get_sample_value("outrider_trace_spans_total", {"state": "ended"}) == 1000
    assert registry.get_sample_value("outrider_trace_spans_total", {"state": "sent"}) == 0
    assert "traces lost at the end" in caplog.text
    stuck.freed.set()
    assert "secret-host" not in caplog.text


@pytest.mark.parametrize("answer", ["never", "late", "500"])
def test_a_slow_collector_delays_no_request_and_no_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: str
) -> None:
    """The collector accepts connections and does not answer, or late, or with a failure."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    ending = threading.Event()
    num_asked = 0

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal num_asked
            num_asked += 1
            self.rfile.read(int(self.headers["content-length"]))
            if answer != "500":
                ending.wait(None if answer == "never" else 1.0)
            self.send_response(500 if answer == "500" else 200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *arguments: object) -> None:
            pass  # the exporter has given up waiting

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        registry = CollectorRegistry()
        tracer = build(f"http://127.0.0.1:{server.server_port}", registry)
        tracer._close_timeout_s = 0.2
        (processor,) = tracer._provider._active_span_processor._span_processors
        assert isinstance(processor, BatchSpanProcessor)
        used_s = time.thread_time()
        for number in range(1000):
            tracer.begin("r").end()
            assert len(processor._batch_processor._queue) <= 64
            if number == 20:
                wait_for(lambda: num_asked > 0)
        assert time.thread_time() - used_s < 1, "more than a millisecond of work for each span"
        begun_s = time.monotonic()
        asyncio.run(tracer.close())
        assert time.monotonic() - begun_s < 10
        ended, sent, failed = (
            registry.get_sample_value("outrider_trace_spans_total", {"state": state})
            for state in ("ended", "sent", "failed")
        )
        ending.set()
        processor._batch_processor._exporter.shutdown()  # else its log comes in later tests
        processor._batch_processor._worker_thread.join(10)
        assert not processor._batch_processor._worker_thread.is_alive()
        server.shutdown()
        thread.join()
    assert ended == 1000
    assert sent is not None
    assert failed is not None
    assert sent + failed < 1000, "more waited than the queue holds"
    assert sent == 0 or answer == "late"
    assert failed > 0 or answer != "500"
    assert ("traces lost at the end" in caplog.text) == (answer != "500")


@pytest.mark.parametrize(
    ("environ", "is_traced"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "URL"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "URL/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "URL", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "URL", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "URL"}, False),
    ],
)
def test_variables_name_the_collector(
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    is_traced: bool,
) -> None:
    resource = "service.name=other,team=a"
    environ |= {"OTEL_RESOURCE_ATTRIBUTES": resource, "OTEL_EXPORTER_OTLP_HEADERS": "x-token=t"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value.replace("URL", collector.url))
    tracer = variables_tracer()
    tracer.begin("r").end()
    asyncio.run(tracer.close())
    assert len(collector.requests) == is_traced
    for path, request in collector.requests:
        attributes = request.resource_spans[0].resource.attributes
        named = {item.key: item.value.string_value for item in attributes}
        assert path == "/v1/traces"
        assert (named["service.name"], named["team"]) == ("other", "a")
        assert collector.headers["x-token"] == "t"


def variables_tracer(**settings: Any) -> Tracer:
    return build_tracer(
        TraceSettings.model_validate(settings),
        CollectorRegistry(),
        environ=os.environ,
        clock=time.monotonic,
        wall_clock=time.time,
    )


@pytest.mark.parametrize(
    ("share", "caller", "num_kept"), [(None, "01", 0), (1.0, "00", 0), (1.0, "01", 9), (0, "", 0)]
)
def test_a_share_of_the_settings_wins_over_the_sampler_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, share: float | None, caller: str, num_kept: int
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    tracer = variables_tracer(endpoint="http://127.0.0.1:9", share=share)
    headers = {"traceparent": f"{SAMPLED[:-2]}{caller}"} if caller else {}
    spans = [tracer.begin("r", headers=headers) for _ in range(9)]
    assert sum(span.is_recording for span in spans) == num_kept
    asyncio.run(tracer.close())


def test_other_protocols_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(SettingsError, match="'grpc' is not available; set it to http/protobuf"):
        variables_tracer()


def test_variables_alone_do_not_keep_a_gateway_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.delitem(sys.modules, "outrider.gateway.telemetry.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert variables_tracer() is NULL_TRACER
    assert 'pip install "outrider[otel]"' in caplog.text


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("a.example:8000", "a.example"),
        ("[::1]:80", "::1"),
        ("[::1]", "::1"),
        ("x" * 900, "x" * 128),
    ],
)
def test_a_server_is_named_without_its_port(host: str, address: str) -> None:
    seen = watched()
    root = seen.tracer.begin("r")
    record_http(root, method="POST", route="/r", path="/r" * 900, scheme="http", host=host)
    root.end()
    attributes = seen.spans()["r"].attributes or {}
    assert attributes["server.address"] == address
    assert len(str(attributes["url.path"])) == 128
