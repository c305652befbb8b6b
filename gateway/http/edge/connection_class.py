"""The choice of the connections that uvicorn serves: bounded ones, or its own."""

import asyncio
import logging
from typing import Final, Literal

from outrider.gateway.http.edge.bounds import ConnectionBounds, usable_connections
from outrider.gateway.http.edge.edge_metrics import EdgeMetrics
from outrider.gateway.http.edge.uvicorn_parts import CONNECTION, SERVER, installed, lacking
from outrider.gateway.settings.http_bounds import HttpSettings
from outrider.gateway.settings.tree import SettingsError

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT: Final = (
    *("header_timeout_s", "body_timeout_s", "write_timeout_s", "max_header_bytes"),
    "max_connections",
)


def check_uvicorn(http: HttpSettings) -> None:
    """Raise SettingsError where the installed uvicorn lacks parts that the gateway rests on."""
    missing = lacking({**SERVER, **CONNECTION} if http.edge else SERVER)
    if missing:
        own = "" if lacking(SERVER) else ", or set http.edge = false and put a proxy in front"
        raise SettingsError(
            f"{installed()} lacks {', '.join(missing)}, which the gateway needs. Install the "
            f'tested one: pip install "uvicorn<0.55"{own}.'
        )


def log_unbounded(http: HttpSettings) -> None:
    """Warn which bounds are the proxy's task, if uvicorn's own connections serve."""
    if not http.edge:
        logger.warning(
            "connections are not bounded http.edge=false without_effect=%s: a proxy in front has "
            "to bound these, pipelining, trailers and upgrades, and to refuse ambiguous framing "
            "and repeated headers",
            ",".join(_WITHOUT_EFFECT),
        )


def connection_class(
    http: HttpSettings, metrics: EdgeMetrics | None
) -> type[asyncio.Protocol] | Literal["httptools"]:
    """Return uvicorn's argument `http`."""
    if not http.edge:
        usable_connections(http.max_connections)
        return "httptools"
    # Not before: with another uvicorn this import may fail, and without it the gateway runs.
    from outrider.gateway.http.edge.protocol import edge_protocol

    return edge_protocol(ConnectionBounds.of(http), metrics)
