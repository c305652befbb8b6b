"""Settings of logs, traces and captured prompts."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from outrider.gateway.settings.sections import Count, Section, Share


class TraceSettings(Section):
    """OpenTelemetry traces; needs the extra `telemetry`."""

    endpoint: str | None = None
    """OTLP over HTTP, such as http://127.0.0.1:4318; unset: no traces."""
    share: Share = 1.0
    """Share of the requests that are traced, unless the caller's trace context decides."""
    service_name: str = "outrider"
    """Service name of the traces."""


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
    capture: CaptureSettings = Field(default_factory=CaptureSettings)
