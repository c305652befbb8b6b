"""The seam between the path of a request and the traces that operators read."""

from collections.abc import Mapping
from typing import Final, Literal, Protocol

AttributeValue = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, AttributeValue]
SpanKind = Literal["server", "internal", "client"]

NO_ATTRIBUTES: Final[Attributes] = {}
NO_HEADERS: Final[Mapping[str, str]] = {}


class Span(Protocol):
    """One piece of work in a trace. Never holds a prompt, an answer or a key.

    All times are seconds on the gateway's clock; None is now. No method blocks or raises.
    """

    @property
    def is_recording(self) -> bool:
        """Return whether its trace is recorded. If not, attributes need not be computed."""

    @property
    def trace_id(self) -> str:
        """Return 32 hexadecimal digits; empty where there is no trace."""

    def child(
        self,
        name: str,
        *,
        kind: SpanKind = "internal",
        start_s: float | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> "Span":
        """Begin a child span. The caller ends it."""

    def set(self, attributes: Attributes) -> None:
        """Add attributes to the work; does nothing once it has ended."""

    def event(
        self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, at_s: float | None = None
    ) -> None:
        """Record an event at one moment of it."""

    def fail(self, error_type: str) -> None:
        """Mark the work as failed, with a short stable word."""

    def end(self, at_s: float | None = None) -> None:
        """End the work. A second call does nothing."""

    def headers(self) -> Mapping[str, str]:
        """Return W3C `traceparent` and `tracestate`, for a request that is part of this work."""


class Tracer(Protocol):
    """Begins traces, or continues those of callers."""

    def begin(
        self,
        name: str,
        *,
        traceparent: str | None = None,
        tracestate: str | None = None,
        start_s: float | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> Span:
        """Begin the span of one API request. The headers are the caller's, unchecked."""

    async def close(self) -> None:
        """Send the ended spans, for some seconds at most."""


class NullSpan:
    """A span that records nothing."""

    __slots__ = ()

    is_recording: Final = False
    trace_id: Final = ""

    def child(
        self,
        name: str,
        *,
        kind: SpanKind = "internal",
        start_s: float | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> Span:
        """Return the same span."""
        return self

    def set(self, attributes: Attributes) -> None:
        """Do nothing."""

    def event(
        self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, at_s: float | None = None
    ) -> None:
        """Do nothing."""

    def fail(self, error_type: str) -> None:
        """Do nothing."""

    def end(self, at_s: float | None = None) -> None:
        """Do nothing."""

    def headers(self) -> Mapping[str, str]:
        """Return no headers."""
        return NO_HEADERS


NULL_SPAN: Final[Span] = NullSpan()


class NullTracer:
    """Records no trace, and passes none on."""

    __slots__ = ()

    def begin(
        self,
        name: str,
        *,
        traceparent: str | None = None,
        tracestate: str | None = None,
        start_s: float | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> Span:
        """Return a span that records nothing."""
        return NULL_SPAN

    async def close(self) -> None:
        """Do nothing."""


NULL_TRACER: Final[Tracer] = NullTracer()
