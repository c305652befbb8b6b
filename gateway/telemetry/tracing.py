"""Traces as the settings and OTEL_* variables want them.

OpenTelemetry is loaded only where any are wanted. A setting wins over the variable.
"""

import logging
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry

from outrider.gateway.settings.extras import MissingExtraError
from outrider.gateway.settings.telemetry import TraceSettings
from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.telemetry.tracer import NULL_TRACER, Tracer

if TYPE_CHECKING:
    from opentelemetry.propagators.textmap import TextMapPropagator

logger = logging.getLogger(__name__)

Signal = Literal["traces", "metrics"]

_PROTOCOL: Final = "http/protobuf"
_CONTENT: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


def build_tracer(
    settings: TraceSettings,
    registry: CollectorRegistry,
    *,
    environ: Mapping[str, str],
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
) -> Tracer:
    """Build a tracer that sends to a collector, or does nothing if none is named.

    `clock` is the gateway's, `wall_clock` counts seconds since 1970. Raises SettingsError for an
    endpoint that cannot be used, and where the extra is not installed.
    """
    if not is_sent("traces", settings.endpoint, environ):
        return NULL_TRACER
    url = collector_url("traces", settings.endpoint)
    try:
        import outrider.gateway.telemetry.otel as otel
    except ModuleNotFoundError as error:
        missing_extra("traces", settings.endpoint, error)
        return NULL_TRACER
    share = settings.share
    if share is None and not environ.get("OTEL_TRACES_SAMPLER"):
        share = 1.0
    provider = otel.make_provider(
        None if share is None else otel.sample(share, clock),
        service_name=settings.service_name,
        has_content=wants_content(settings, environ),
    )
    counts = otel.SpanCounts(registry)
    provider.add_span_processor(otel.batches(url, counts))
    carried = propagator(environ.get("OTEL_PROPAGATORS") or "tracecontext")
    return otel.OtelTracer(provider, counts, carried, clock=clock, wall_clock=wall_clock)


def is_sent(signal: Signal, endpoint: str | None, environ: Mapping[str, str]) -> bool:
    """Return whether a signal goes to a collector. Raises SettingsError for other protocols.

    OTEL_EXPORTER_OTLP_ENDPOINT alone asks for traces, not for metrics: these can be scraped.
    """
    name = signal.upper()
    exporter = environ.get(f"OTEL_{name}_EXPORTER", "")
    names = [f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT"]
    names += ["OTEL_EXPORTER_OTLP_ENDPOINT"] if signal == "traces" else []
    is_named = not exporter and any(environ.get(each) for each in names)
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if endpoint is None and not is_named and "otlp" not in exporter:
        return False
    protocol = environ.get(f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL") or environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", _PROTOCOL
    )
    if endpoint is None and protocol != _PROTOCOL:
        raise SettingsError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r} is not available; set it to {_PROTOCOL}, "
            "and the endpoint to the collector's port for it (4318)"
        )
    return True


def missing_extra(signal: Signal, endpoint: str | None, error: ModuleNotFoundError) -> None:
    """Say that the extra is missing: raise where a setting wants it, warn where a variable does.

    An environment that is the same for all of a host's services must not keep a gateway down.
    """
    advice = f'{error.name} is not installed: pip install "outrider[otel]"'
    if endpoint is not None:
        raise MissingExtraError(f"telemetry.{signal}.endpoint is set, but {advice}")
    logger.warning(
        "telemetry that OTEL_* variables want is off signal=%s advice=%s", signal, advice
    )


def wants_content(settings: TraceSettings, environ: Mapping[str, str]) -> bool:
    """Return whether texts of requests and answers go into traces."""
    if settings.content is not None:
        return settings.content
    return environ.get(_CONTENT, "").lower() in ("true", "span_only", "span_and_event")


def propagator(names: str) -> "TextMapPropagator":
    """Return what reads and writes trace headers. Raises SettingsError for unknown names.

    Without the variable it is trace context alone: baggage would take what clients write to
    servers of others.
    """
    from opentelemetry.propagators.composite import CompositePropagator

    found = entry_points(group="opentelemetry_propagator")
    wanted = [name for each in names.split(",") if (name := each.strip()) and name != "none"]
    if unknown := set(wanted) - found.names:
        raise SettingsError(
            f"OTEL_PROPAGATORS: unknown {', '.join(sorted(unknown))}; "
            f"available: {', '.join(sorted(found.names))}, none"
        )
    return CompositePropagator([found[name].load()() for name in wanted])


def collector_url(signal: Signal, endpoint: str | None) -> str | None:
    """Return the URL to post to; None: OTEL_* variables name it.

    Raises SettingsError, without text that may be a password.
    """
    if endpoint is None:
        return None
    setting = f"telemetry.{signal}.endpoint"
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise SettingsError(
            f"{setting} is not the address of a collector; write it like http://127.0.0.1:4318"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise SettingsError(
            f"{setting} must hold no password and no query; name headers for the collector in "
            "OTEL_EXPORTER_OTLP_HEADERS"
        )
    path = parts.path.rstrip("/").removesuffix(f"/v1/{signal}")
    return f"{parts.scheme}://{parts.netloc}{path}/v1/{signal}"
