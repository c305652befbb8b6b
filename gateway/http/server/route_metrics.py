"""The statistics of the router's guard, as gauges in /metrics."""

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.router.guard import GuardNumbers, RouteGuard

_GAUGES: Final = {
    "strong_share": "Share of the latest answers that the large model gave.",
    "expected_share": "The share that the calibration, or the autopilot's target, expects.",
    "quality_shift": (
        "Population stability index of the prompts' qualities against the calibration's; above "
        "0.25 they have changed."
    ),
    "escalated_confidence": "Mean confidence in small answers that were escalated.",
    "escalated_agreement": "Mean share of their tokens that the large model wrote too.",
    "threshold": "The quality from which on the small model's answer stands.",
    "num_outcomes": "Answers in the window.",
    "is_drifting": "1 where a share or the shift has passed its limit.",
}


class RouteCollector(Collector):
    """Reads the guard at each scrape."""

    def __init__(self, guard: RouteGuard) -> None:
        self._guard = guard

    def collect(self) -> Iterator[Metric]:
        """Yield one gauge a number; none for numbers that are not known yet."""
        numbers: GuardNumbers = self._guard.numbers()
        for name, text in _GAUGES.items():
            value = getattr(numbers, name)
            if value is not None:
                stem = name.removeprefix("num_").removeprefix("is_")
                yield GaugeMetricFamily(f"outrider_router_{stem}", text, value=float(value))
