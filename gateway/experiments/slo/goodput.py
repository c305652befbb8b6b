"""Goodput: requests per second that met all their objectives (Zhong et al., DistServe, 2024)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.gateway.contract.answers.outcomes import RequestOutcome

NO_CLASS: Final = "none"
"""The class of requests that ended before their class was known."""

_TOO_MANY: Final = 429
# Refusals by a key's own limits say nothing about the speed of this server.
_OWN_LIMITS: Final = frozenset({"rate_limit_exceeded", "insufficient_quota"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassGoodput:
    """One class over the window."""

    name: str
    num_requests: int
    num_attained: int
    goodput: float
    """Requests per second that met all their objectives."""

    @property
    def attainment(self) -> float | None:
        """Return the share of requests that met their objectives, in [0, 1]."""
        return self.num_attained / self.num_requests if self.num_requests else None


def attained(outcome: RequestOutcome) -> bool | None:
    """Return whether a request met its objectives; None where it does not count.

    Failed answers, and requests refused for lack of room, missed them. Requests that the client
    gave up, faulty requests, and refusals by a key's own limits do not count.
    """
    match outcome.ending:
        case "answered":
            return outcome.is_attained
        case "failed":
            return False
        case "refused":
            status = outcome.status or 0
            had_no_room = status == _TOO_MANY and outcome.error_code not in _OWN_LIMITS
            return False if had_no_room or status >= 500 else None
        case "cancelled":
            return None


class GoodputSink:
    """Counts requests by class, and how many of them met their objectives.

    Goodput is computed from cells of a second over the last `window_s`. Used on one thread.
    """

    def __init__(
        self,
        class_names: Sequence[str],
        *,
        clock: Callable[[], float],
        window_s: float = 60.0,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._clock = clock
        self._num_cells = max(1, round(window_s))
        self._started_s = clock()
        self._windows = {name: _Window(self._num_cells) for name in (*class_names, NO_CLASS)}
        total = Counter(
            "outrider_slo_requests",
            "Requests that ended, by whether they met all their objectives.",
            ("class", "attained"),
            registry=registry,
        )
        self._totals = {
            name: (total.labels(name, "false"), total.labels(name, "true"))
            for name in self._windows
        }
        if registry is not None:
            registry.register(_GoodputCollector(self))

    def observe(self, outcome: RequestOutcome) -> None:
        """Note a request that is over."""
        is_attained = attained(outcome)
        if is_attained is None:
            return
        name = outcome.slo_class if outcome.slo_class in self._windows else NO_CLASS
        self._totals[name][is_attained].inc()
        self._windows[name].add(int(self._clock()), is_attained=is_attained)

    def goodputs(self) -> tuple[ClassGoodput, ...]:
        """Return all classes over the window, or since the start where that is shorter."""
        now_s = self._clock()
        # The window ends with the second that has begun.
        over_s = min(self._num_cells - 1 + now_s % 1.0, now_s - self._started_s)
        return tuple(
            self._goodput(name, window.totals(int(now_s)), over_s)
            for name, window in self._windows.items()
        )

    @staticmethod
    def _goodput(name: str, totals: tuple[int, int], over_s: float) -> ClassGoodput:
        num_requests, num_attained = totals
        return ClassGoodput(
            name=name,
            num_requests=num_requests,
            num_attained=num_attained,
            goodput=num_attained / max(over_s, 1.0),
        )


class _Window:
    """Two counts for each second of a ring: [requests, attained]."""

    def __init__(self, num_cells: int) -> None:
        self._cells = [[-1, 0, 0] for _ in range(num_cells)]  # second, requests, attained

    def add(self, second: int, *, is_attained: bool) -> None:
        """Count a request in its second."""
        cell = self._cells[second % len(self._cells)]
        if cell[0] != second:
            cell[:] = [second, 0, 0]
        cell[1] += 1
        cell[2] += is_attained

    def totals(self, second: int) -> tuple[int, int]:
        """Return requests, and those attained, of the cells up to this second."""
        oldest = second - len(self._cells)
        live = [cell for cell in self._cells if oldest < cell[0] <= second]
        return sum(cell[1] for cell in live), sum(cell[2] for cell in live)


class _GoodputCollector(Collector):
    """Reads the windows at each scrape."""

    def __init__(self, sink: GoodputSink) -> None:
        self._sink = sink

    def collect(self) -> Iterator[Metric]:
        """Yield goodput of every class; attainment of those that had requests."""
        goodput = GaugeMetricFamily(
            "outrider_goodput_requests_per_second",
            "Requests per second that met all their objectives, over the last seconds.",
            labels=["class"],
        )
        attainment = GaugeMetricFamily(
            "outrider_slo_attainment_ratio",
            "Share of requests that met all their objectives, over the last seconds.",
            labels=["class"],
        )
        for one in self._sink.goodputs():
            goodput.add_metric([one.name], one.goodput)
            if one.attainment is not None:
                attainment.add_metric([one.name], one.attainment)
        yield goodput
        yield attainment
