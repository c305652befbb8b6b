"""Metrics of checks."""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram

Outcome = Literal["pass", "block", "rewrite", "failed"]
"""failed: there was no verdict."""


class CheckMetrics:
    """Counts verdicts, and times them."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = registry or CollectorRegistry()
        self._verdicts = Counter(
            "outrider_checks",
            "Verdicts on requests, answers and windows of streams.",
            ["check", "where", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "outrider_check_seconds",
            "Time until a verdict, or until it was given up.",
            ["check"],
            registry=registry,
        )

    def count(self, check: str, where: str, outcome: Outcome, seconds: float) -> None:
        """Count a verdict."""
        self._verdicts.labels(check, where, outcome).inc()
        self._seconds.labels(check).observe(seconds)
