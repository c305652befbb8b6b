"""The gateway's parts for latency objectives."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from outrider.gateway.experiments.slo.classes import SloClasses
from outrider.gateway.experiments.slo.goodput import GoodputSink
from outrider.gateway.settings.slo import SloSettings


def _default_goodput() -> GoodputSink:
    return GoodputSink(SloClasses().names, clock=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloParts:
    """The parts that deal with latency objectives."""

    classes: SloClasses = field(default_factory=SloClasses)
    """Resolves a request's objective."""
    goodput: GoodputSink = field(default_factory=_default_goodput)
    """Counts how often the objective was met."""


def build_slo(
    settings: SloSettings,
    registry: CollectorRegistry | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> SloParts:
    """Build the parts of the settings; metrics go to `registry`."""
    classes = SloClasses(settings)
    goodput = GoodputSink(classes.names, clock=clock, window_s=settings.window_s, registry=registry)
    return SloParts(classes=classes, goodput=goodput)
