"""Traces by OpenTelemetry. Import it only where traces are enabled: the SDK loads slowly.

The decision to keep a trace is made once, at its root, before the SDK is called: a trace that is
not kept costs some microseconds.
"""

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanContext, StatusCode, TraceFlags
from opentelemetry.trace.span import TraceState
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.gateway.telemetry.traceparent import RemoteParent, read_parent, traceparent
from outrider.gateway.telemetry.tracer import (
    NO_ATTRIBUTES,
    Attributes,
    NullSpan,
    Span,
    SpanKind,
)

log = logging.getLogger(__name__)

_KINDS: Final[Mapping[SpanKind, trace.SpanKind]] = {
    "server": trace.SpanKind.SERVER,
    "internal": trace.SpanKind.INTERNAL,
    "client": trace.SpanKind.CLIENT,
}
_EXPORT_TIMEOUT_S: Final = 5.0
_MAX_QUEUE: Final = 8192
_MAX_BATCH: Final = 512
_BATCH_MS: Final = 1000.0
_MAX_ATTRIBUTE_CHARS: Final = 512
_NANOS: Final = 1_000_000_000
_MAX_FOLLOWED_PER_S: Final = 100.0
"""Traces a second that are kept because callers say so, on average and at once."""


class SpanCounts(Collector):
    """Counts of spans that ended, were sent, and failed. The rest waits or was lost."""

    def __init__(self) -> None:
        self.ended = 0
        self.sent = 0
        self.failed = 0

    def collect(self) -> Iterator[Metric]:
        """Yield one family."""
        spans = CounterMetricFamily("outrider_trace_spans", "Spans of traces.", labels=["state"])
        for state, count in (("ended", self.ended), ("sent", self.sent), ("failed", self.failed)):
            spans.add_metric([state], count)
        yield spans


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
            log.warning("traces not sent error=%s", type(error).__name__)
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self._counts.sent += len(spans)
        else:
            self._counts.failed += len(spans)
        return result

    def shutdown(self) -> None:
        """Give up the waiting spans."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return whether all spans are sent."""
        return self._exporter.force_flush(timeout_millis)


class _Ids(IdGenerator):
    """Ids from a generator of ours."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def generate_trace_id(self) -> int:
        """Return 128 bits, not all zero."""
        return self._rng.getrandbits(128) or 1

    def generate_span_id(self) -> int:
        """Return 64 bits, not all zero."""
        return self._rng.getrandbits(64) or 1


def make_provider(
    url: str, service_name: str, rng: random.Random
) -> tuple[TracerProvider, SpanCounts]:
    """Return the SDK, sending to a collector by OTLP over HTTP from a thread of its own."""
    counts = SpanCounts()
    exporter = CountingExporter(OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_S), counts)
    # It repeats the counter's message, once a batch, and with the collector's whole URL.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    processor = BatchSpanProcessor(
        exporter,
        max_queue_size=_MAX_QUEUE,
        schedule_delay_millis=_BATCH_MS,
        max_export_batch_size=_MAX_BATCH,
    )
    provider = provider_of(service_name, rng)
    provider.add_span_processor(processor)
    return provider, counts


def provider_of(service_name: str, rng: random.Random) -> TracerProvider:
    """Return the SDK without an exporter yet."""
    return TracerProvider(
        sampler=ALWAYS_ON,
        resource=Resource.create({"service.name": service_name}),
        shutdown_on_exit=False,  # `close` does, and does not wait for ever
        id_generator=_Ids(rng),
        span_limits=SpanLimits(max_span_attribute_length=_MAX_ATTRIBUTE_CHARS),
    )


class _Allowance:
    """The number of further traces that callers may request: any client can set the flag."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_left = _MAX_FOLLOWED_PER_S
        self._at_s = clock()

    def take(self) -> bool:
        """Return whether one more trace is kept."""
        now_s = self._clock()
        gained = max(now_s - self._at_s, 0.0) * _MAX_FOLLOWED_PER_S
        self._num_left, self._at_s = min(self._num_left + gained, _MAX_FOLLOWED_PER_S), now_s
        if self._num_left < 1:
            return False
        self._num_left -= 1
        return True


class OtelTracer:
    """Traces a share of the requests, and those whose callers request it, up to a rate."""

    def __init__(
        self,
        provider: TracerProvider,
        counts: SpanCounts,
        *,
        share: float,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        rng: random.Random,
        close_timeout_s: float = 5.0,
    ) -> None:
        """Store the arguments. `share` is in [0, 1]; `wall_clock` is in seconds since 1970.

        `clock` is the gateway's. `close_timeout_s`: the longest wait for the collector at the end.
        """
        self._provider = provider
        self._tracer = provider.get_tracer("outrider")
        self._counts = counts
        self._share = share
        self._clock = clock
        self._wall_clock = wall_clock
        self._rng = rng
        self._close_timeout_s = close_timeout_s
        self._allowance = _Allowance(clock)

    def begin(
        self,
        name: str,
        *,
        traceparent: str | None = None,
        tracestate: str | None = None,
        start_s: float | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> Span:
        """Begin a request's span. A caller's decision on whether to trace wins over the share.

        Where callers request more traces than are kept for them, the share decides about the rest.
        """
        parent = read_parent(traceparent, tracestate)
        if parent is None and self._rng.random() >= self._share:
            return UnrecordedSpan(
                RemoteParent(
                    trace_id=self._rng.getrandbits(128) or 1,
                    span_id=self._rng.getrandbits(64) or 1,
                    is_sampled=False,
                )
            )
        if parent is not None and not self._follows(parent):
            return UnrecordedSpan(parent)
        offset_s = self._wall_clock() - self._clock()
        begun = _Begun(self._tracer, self._counts, self._clock, offset_s)
        above = None if parent is None else _remote(parent)
        return begun.span(name, above, "server", start_s, attributes)

    def _follows(self, parent: RemoteParent) -> bool:
        """Return whether a trace that a caller began is kept here too."""
        if not parent.is_sampled:
            return False
        return self._allowance.take() or self._rng.random() < self._share

    async def close(self) -> None:
        """Send the ended spans; those that the collector does not take in time are lost."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # no request has waited for so long
                loop.call_soon_threadsafe(ended.set)

        # Not by asyncio.to_thread: the end of the loop would wait for that thread after all.
        threading.Thread(target=shut_down, name="traces-end", daemon=True).start()
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await ended.wait()
        except TimeoutError:
            log.warning(
                "traces lost at the end count=%d",
                self._counts.ended - self._counts.sent - self._counts.failed,
            )


class UnrecordedSpan(NullSpan):
    """Work that is not traced, but reports to its users that it is not."""

    __slots__ = ("_parent",)

    def __init__(self, parent: RemoteParent) -> None:
        self._parent = parent

    def headers(self) -> Mapping[str, str]:
        """Return the caller's headers, or ones that disable tracing."""
        return _headers(self._parent.header(), self._parent.state)


class _Begun:
    """State shared by the spans of one trace: above all the offset of the gateway's clock to
    UTC."""

    __slots__ = ("_clock", "_offset_s", "_tracer", "counts")

    def __init__(
        self,
        tracer: trace.Tracer,
        counts: SpanCounts,
        clock: Callable[[], float],
        offset_s: float,
    ) -> None:
        self._tracer = tracer
        self._clock = clock
        self._offset_s = offset_s
        self.counts = counts

    def span(
        self,
        name: str,
        above: trace.Span | None,
        kind: SpanKind,
        start_s: float | None,
        attributes: Attributes,
    ) -> "OtelSpan":
        """Begin a span below another one, or the root."""
        # An empty context, not the current one: other libraries' spans are none of ours.
        context = trace.set_span_in_context(above or trace.INVALID_SPAN, Context())
        span = self._tracer.start_span(
            name,
            context=context,
            kind=_KINDS[kind],
            attributes=attributes,
            start_time=self.nanos(start_s),
        )
        return OtelSpan(self, span)

    def nanos(self, at_s: float | None) -> int:
        """Return a time on the gateway's clock as nanoseconds since 1970; None is now."""
        moment_s = self._clock() if at_s is None else at_s
        return round((moment_s + self._offset_s) * _NANOS)


class OtelSpan:
    """A span that is recorded."""

    __slots__ = ("_begun", "_span")

    def __init__(self, begun: _Begun, span: trace.Span) -> None:
        self._begun = begun
        self._span = span

    @property
    def is_recording(self) -> bool:
        """Return whether its trace is recorded; also after its end, for parts that come late."""
        return True

    @property
    def trace_id(self) -> str:
        """Return 32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def child(
        self,
        name: str,
        *,
        kind: SpanKind = "internal",
        start_s: float | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> Span:
        """Begin a part of this work."""
        return self._begun.span(name, self._span, kind, start_s, attributes)

    def set(self, attributes: Attributes) -> None:
        """Add attributes to the work."""
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def event(
        self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, at_s: float | None = None
    ) -> None:
        """Record an event at one moment of it."""
        if self._span.is_recording():
            self._span.add_event(name, attributes, self._begun.nanos(at_s))

    def fail(self, error_type: str) -> None:
        """Mark the work as failed."""
        if self._span.is_recording():
            self._span.set_attribute("error.type", error_type)
            self._span.set_status(StatusCode.ERROR)

    def end(self, at_s: float | None = None) -> None:
        """End the work."""
        if self._span.is_recording():
            self._span.end(self._begun.nanos(at_s))
            self._begun.counts.ended += 1

    def headers(self) -> Mapping[str, str]:
        """Return the headers for a request that is part of this work."""
        context = self._span.get_span_context()
        header = traceparent(
            context.trace_id, context.span_id, is_sampled=bool(context.trace_flags.sampled)
        )
        return _headers(header, context.trace_state.to_header())


def _headers(parent: str, state: str) -> Mapping[str, str]:
    if state:
        return {"traceparent": parent, "tracestate": state}
    return {"traceparent": parent}


def _remote(parent: RemoteParent) -> trace.Span:
    """Return the caller's span, as the SDK represents remote spans."""
    return trace.NonRecordingSpan(
        SpanContext(
            trace_id=parent.trace_id,
            span_id=parent.span_id,
            is_remote=True,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
            trace_state=TraceState.from_header([parent.state]) if parent.state else None,
        )
    )
