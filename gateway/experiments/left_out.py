"""Requests that an arm would have made fail: they are served without it, and counted here."""

import logging
from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from outrider.gateway.experiments.assigner import Assignment

logger = logging.getLogger(__name__)

_TELL_AGAIN_S: Final = 60.0
_MAX_TOLD: Final = 1024


class LeftOut:
    """Counts them by experiment, and says each reason once a minute. For one event loop."""

    def __init__(self, registry: CollectorRegistry, *, clock: Callable[[], float]) -> None:
        """Store the arguments. `clock` is monotonic, in seconds."""
        self._clock = clock
        self._told_s: dict[tuple[str, str], float] = {}
        self._requests = Counter(
            "outrider_experiment_left_out",
            "Requests left out of an experiment because their arm's settings could not be applied.",
            ["experiment", "arm"],
            registry=registry,
        )

    def note(self, assignment: Assignment, error: Exception) -> None:
        """Count a request that took no part in these arms, which led to this error."""
        for ref in assignment.arms:
            self._requests.labels(ref.experiment, ref.arm).inc()
        reason = str(getattr(error, "code", None) or getattr(error, "param", None) or "")
        key = (assignment.label, reason)
        now_s = self._clock()
        if now_s - self._told_s.get(key, -_TELL_AGAIN_S) < _TELL_AGAIN_S:
            return
        if len(self._told_s) >= _MAX_TOLD:
            self._told_s.clear()
        self._told_s[key] = now_s
        logger.warning(
            "request left out of an experiment, which would have made it fail arm=%s error=%s "
            "reason=%s",
            assignment.label or "control's settings",
            type(error).__name__,
            reason or "-",
        )
