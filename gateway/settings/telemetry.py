"""Settings of what is told to operators: logs, traces, captured prompts."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from gateway.settings.sections import Count, Section, Share


class TraceSettings(Section):
    """OpenTelemetry traces; needs the extra `telemetry`."""

    endpoint: str | None = None
    """OTLP over HTTP, such as http://127.0.0.1:4318; unset: no traces."""
    share: Share = 1.0
    """Share of the requests that are traced, where the caller's own trace does not say."""
    service_name: str = "outrider"
    """The service that traces are from."""


class CaptureSettings(Section):
    """Capture of prompts and answers on disk. Off unless a folder is named."""

    folder: Path | None = None
    """Where to write them, a file a day; unset: nowhere."""
    share: Share = 1.0
    """Share of the requests."""
    redact: bool = True
    """Replace mail addresses, telephone, card and account numbers, keys and tokens."""
    retention_days: Count = 7
    """Files older than this are deleted."""


class TelemetrySettings(Section):
    """What operators are told."""

    log_format: Literal["text", "json"] = "text"
    """One line of key=value, or one of JSON."""
    traces: TraceSettings = Field(default_factory=TraceSettings)
    capture: CaptureSettings = Field(default_factory=CaptureSettings)
