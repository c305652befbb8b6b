"""Settings of logs, traces and captured prompts."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from outrider.gateway.settings.sections import Count, Section, Share


class TraceSettings(Section):
    """OpenTelemetry traces; needs the extra `otel`. What is unset is as OTEL_* variables say."""

    endpoint: str | None = None
    """OTLP over HTTP, such as http://127.0.0.1:4318; unset: OTEL_EXPORTER_OTLP_ENDPOINT, or no
    traces."""
    share: Share | None = None
    """Share of the requests that are traced, unless the caller's trace context decides; unset:
    OTEL_TRACES_SAMPLER, or all."""
    service_name: str | None = None
    """Service name of the traces; unset: OTEL_SERVICE_NAME, or outrider."""
    content: bool | None = None
    """Whether root spans hold texts of requests and answers, redacted, never of private ones;
    unset: OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT, or not."""


class MetricsSettings(Section):
    """Metrics that are sent, beside /metrics; needs the extra `otel`."""

    endpoint: str | None = None
    """OTLP over HTTP, such as http://127.0.0.1:4318; unset: OTEL_EXPORTER_OTLP_METRICS_ENDPOINT or
    OTEL_METRICS_EXPORTER=otlp, or none are sent."""


class CaptureSettings(Section):
    """Capture of prompts and answers on disk. Off unless a folder is named."""

    folder: Path | None = None
    """Folder with one file a day; unset: no capture."""
    share: Share = 1.0
    """Share of the requests that are captured."""
    redact: bool = True
    """Replace mail addresses, telephone, card and account numbers, keys and tokens."""
    retention_days: Count = 7
    """Files older than this are deleted."""


class TelemetrySettings(Section):
    """Logs, traces and captures for operators."""

    log_format: Literal["text", "json"] = "text"
    """text: one line of key=value; json: one line of JSON."""
    traces: TraceSettings = Field(default_factory=TraceSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    capture: CaptureSettings = Field(default_factory=CaptureSettings)
