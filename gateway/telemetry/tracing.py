"""Traces as the settings want them; OpenTelemetry is loaded only where they want any."""

import random
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry

from outrider.gateway.settings.telemetry import TraceSettings
from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.telemetry.tracer import NULL_TRACER, Tracer

_PATH: Final = "/v1/traces"


def build_tracer(
    settings: TraceSettings,
    registry: CollectorRegistry,
    *,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    rng: random.Random,
) -> Tracer:
    """Build a tracer that sends to the settings' collector, or does nothing if none is named.

    `clock` is the gateway's, `wall_clock` counts seconds since 1970. Raises SettingsError for an
    endpoint that cannot be used, and where the extra is not installed.
    """
    if settings.endpoint is None:
        return NULL_TRACER
    url = _url(settings.endpoint)
    try:
        from outrider.gateway.telemetry.otel import OtelTracer, make_provider
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"telemetry.traces.endpoint is set, but {error.name} is not installed. "
            "Install it with: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from None
    provider, counts = make_provider(url, settings.service_name, rng)
    registry.register(counts)
    return OtelTracer(
        provider, counts, share=settings.share, clock=clock, wall_clock=wall_clock, rng=rng
    )


def _url(endpoint: str) -> str:
    """Return the URL to post traces to. Raises SettingsError, without text that may be a
    password."""
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise SettingsError(
            "telemetry.traces.endpoint is not the address of a collector; write it like "
            "http://127.0.0.1:4318"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise SettingsError(
            "telemetry.traces.endpoint must hold no password and no query; name headers for the "
            "collector in OTEL_EXPORTER_OTLP_HEADERS"
        )
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path.removesuffix(_PATH)}{_PATH}"
