"""Traces by OpenTelemetry's SDK. Import it only where traces are enabled: it loads slowly."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_ON,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import SpanKind as OtelKind
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry, Counter

from outrider.gateway.telemetry.content import MAX_CHARS
from outrider.gateway.telemetry.tracer import (
    NO_ATTRIBUTES,
    NO_HEADERS,
    Attributes,
    Span,
    SpanKind,
    Tracer,
)

logger = logging.getLogger(__name__)

_MAX_ATTRIBUTE_CHARS: Final = 512
_NANOS: Final = 1_000_000_000
_MAX_FOLLOWED_PER_S: Final = 100.0
"""Traces a second that are kept because callers say so, on average and at once."""

# The SDK's warnings quote callers' headers and the collector's URL; failed sendings are counted.
logging.getLogger("opentelemetry").setLevel(logging.ERROR)


class SpanCounts:
    """Counts of spans that ended, were sent, and failed. The rest waits or was lost."""

    def __init__(self, registry: CollectorRegistry) -> None:
        spans = Counter("outrider_trace_spans", "Spans of traces.", ["state"], registry=registry)
        self.ended, self.sent, self.failed = map(spans.labels, ("ended", "sent", "failed"))


class CountingExporter(SpanExporter):
    """Counts what another exporter sends. Runs in the SDK's one thread."""

    def __init__(self, exporter: SpanExporter, counts: SpanCounts) -> None:
        self._exporter = exporter
        self._counts = counts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch. Never raises."""
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - the SDK would print a traceback per batch
            logger.warning("traces not sent error=%s", type(error).__name__)
            result = SpanExportResult.FAILURE
        is_sent = result is SpanExportResult.SUCCESS
        (self._counts.sent if is_sent else self._counts.failed).inc(len(spans))
        return result

    def shutdown(self) -> None:
        """Give up the waiting spans."""
        self._exporter.shutdown()


def make_provider(
    sampler: Sampler | None = None, *, service_name: str | None = None, has_content: bool = False
) -> TracerProvider:
    """Return the SDK without an exporter yet. What is None is as OTEL_* variables say."""
    limit = MAX_CHARS if has_content else _MAX_ATTRIBUTE_CHARS
    return TracerProvider(
        sampler=sampler,
        resource=make_resource(service_name),
        shutdown_on_exit=False,  # `close` does, and does not wait for ever
        span_limits=SpanLimits(max_span_attribute_length=limit),
    )


def make_resource(service_name: str | None) -> Resource:
    """Return what sends: by the settings, else by OTEL_* variables, else `outrider`."""
    named = Resource({"service.name": service_name} if service_name else {})
    default = Resource.create({"service.name": "outrider"})
    return default.merge(OTELResourceDetector().detect()).merge(named)


def batches(url: str | None, counts: SpanCounts) -> BatchSpanProcessor:
    """Return what sends spans to a collector by OTLP over HTTP, from a thread of its own."""
    return BatchSpanProcessor(CountingExporter(OTLPSpanExporter(endpoint=url), counts))


class _Followed(Sampler):
    """Keeps the traces that callers request, up to a rate: any client can set the flag."""

    def __init__(self, beyond: Sampler, clock: Callable[[], float]) -> None:
        """`beyond` decides about the rest."""
        self._beyond = beyond
        self._clock = clock
        self._num_left = _MAX_FOLLOWED_PER_S
        self._at_s = clock()

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        """Decide about a trace that its caller keeps."""
        sampler = ALWAYS_ON if self._take() else self._beyond
        return sampler.should_sample(*args, **kwargs)

    def get_description(self) -> str:
        """Name the rule."""
        return f"Followed{{{_MAX_FOLLOWED_PER_S}/s,beyond:{self._beyond.get_description()}}}"

    def _take(self) -> bool:
        now_s = self._clock()
        gained = max(now_s - self._at_s, 0.0) * _MAX_FOLLOWED_PER_S
        self._num_left, self._at_s = min(self._num_left + gained, _MAX_FOLLOWED_PER_S), now_s
        if self._num_left < 1:
            return False
        self._num_left -= 1
        return True


def sample(share: float, clock: Callable[[], float]) -> Sampler:
    """Keep a share of the traces, and those that callers keep, up to a rate."""
    by_share = TraceIdRatioBased(share)
    return ParentBased(by_share, remote_parent_sampled=_Followed(by_share, clock))


class OtelTracer(Tracer):
    """Traces requests as the provider's sampler decides."""

    def __init__(
        self,
        provider: TracerProvider,
        counts: SpanCounts,
        propagator: TextMapPropagator,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        close_timeout_s: float = 5.0,
    ) -> None:
        """Store the arguments. `clock` is the gateway's; `wall_clock`: seconds since 1970.

        `close_timeout_s`: the longest wait for the collector at the end.
        """
        self.spans = provider.get_tracer("outrider")
        self.counts = counts
        self.propagator = propagator
        self.clock = clock
        self._wall_clock = wall_clock
        self._provider = provider
        self._close_timeout_s = close_timeout_s

    def begin(
        self,
        name: str,
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        start_s: float | None = None,
    ) -> Span:
        """Begin a request's span. One that is not kept passes on its caller's decision."""
        offset_s = self._wall_clock() - self.clock()
        # An empty context, not the current one: other libraries' spans are none of ours.
        above = self.propagator.extract(headers, Context())
        span = self.spans.start_span(
            name,
            above,
            OtelKind.SERVER,
            start_time=round(((self.clock() if start_s is None else start_s) + offset_s) * _NANOS),
        )
        is_called = trace.get_current_span(above).get_span_context().is_valid
        if is_called and not span.is_recording():
            span = trace.get_current_span(above)
        return OtelSpan(self, span, above, offset_s)

    async def close(self) -> None:
        """Send the ended spans; those that the collector does not take in time are lost."""
        if not await done_by(self._close_timeout_s, self._provider.shutdown):
            logger.warning("traces lost at the end; see outrider_trace_spans_total")


async def done_by(timeout_s: float | None, work: Callable[[], object]) -> bool:
    """Do blocking work, and return whether it ended in time; else it is left behind."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def run() -> None:
        try:
            work()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has not waited for so long
                loop.call_soon_threadsafe(ended.set)

    # Not by asyncio.to_thread: the end of the loop would wait for that thread after all.
    threading.Thread(target=run, name="otlp", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            await ended.wait()
    except TimeoutError:
        return False
    return True


class OtelSpan(Span):
    """A span of the SDK, in the gateway's time. `offset_s`: from its clock to UTC."""

    __slots__ = ("_above", "_offset_s", "_span", "_tracer")

    def __init__(
        self, tracer: OtelTracer, span: trace.Span, above: Context, offset_s: float
    ) -> None:
        """Store the arguments. `above`: the context that the span was begun in."""
        self._tracer = tracer
        self._span = span
        self._above = above
        self._offset_s = offset_s

    @property
    def is_recording(self) -> bool:
        """Return whether its trace is recorded; also after its end, for parts that come late."""
        return not isinstance(self._span, trace.NonRecordingSpan)

    @property
    def trace_id(self) -> str:
        """Return 32 hexadecimal digits; empty where nothing is recorded."""
        if not self.is_recording:
            return ""
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    def child(
        self,
        name: str,
        *,
        kind: SpanKind = "INTERNAL",
        start_s: float | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> Span:
        """Begin a part of this work."""
        if not self.is_recording:
            return self
        context = trace.set_span_in_context(self._span, self._above)
        span = self._tracer.spans.start_span(
            name, context, OtelKind[kind], attributes, start_time=self._nanos(start_s)
        )
        return OtelSpan(self._tracer, span, context, self._offset_s)

    def set(self, attributes: Attributes) -> None:
        """Add attributes to the work."""
        self._span.set_attributes(attributes)

    def event(self, name: str, *, at_s: float | None = None) -> None:
        """Record an event at one moment of it."""
        self._span.add_event(name, timestamp=self._nanos(at_s))

    def fail(self, error_type: str) -> None:
        """Mark the work as failed."""
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(StatusCode.ERROR)

    def end(self, at_s: float | None = None) -> None:
        """End the work."""
        if self._span.is_recording():
            self._span.end(self._nanos(at_s))
            self._tracer.counts.ended.inc()

    def headers(self) -> Mapping[str, str]:
        """Return the headers for a request that is part of this work."""
        carrier: dict[str, str] = {}
        context = trace.set_span_in_context(self._span, self._above)
        self._tracer.propagator.inject(carrier, context)
        return carrier

    def _nanos(self, at_s: float | None) -> int:
        """Return a time on the gateway's clock as nanoseconds since 1970; None is now."""
        moment_s = self._tracer.clock() if at_s is None else at_s
        return round((moment_s + self._offset_s) * _NANOS)
