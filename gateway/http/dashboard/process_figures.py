"""The figures of the gateway's own process on the live page."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from outrider.gateway.http.dashboard.recent import WINDOW_S, RecentRows
from outrider.gateway.http.dashboard.schema import GatewayFigures

LagReader = Callable[[float], float | None]
"""From a share to the event loop's lag in seconds that so many measurements did not exceed."""
StageReader = Callable[[float], Mapping[str, float]]
"""From a share to the seconds that so many of each stage's times on the loop did not exceed."""


@dataclass(slots=True, kw_only=True)
class ProcessMoments:
    """Samples of the process's processor time, for as long as requests are remembered."""

    read_cpu_s: Callable[[], float] = time.process_time
    _moments: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, at_s: float) -> None:
        """Keep the processor time of this moment; earlier moments than the window's are dropped."""
        self._moments.append((at_s, self.read_cpu_s()))
        while at_s - self._moments[0][0] > WINDOW_S:
            self._moments.popleft()

    def figures(self, rows: RecentRows, lag_s: LagReader, stages_s: StageReader) -> GatewayFigures:
        """Return the figures; `rows` are the requests of all tenants."""
        return GatewayFigures(
            loop_lag_p50_ms=_ms(lag_s(0.5)),
            loop_lag_p99_ms=_ms(lag_s(0.99)),
            stages_p99_ms={name: held_s * 1000.0 for name, held_s in stages_s(0.99).items()},
            cpu_ms_per_request=_ms(self._cpu_s_per_request(rows)),
        )

    @staticmethod
    def joined(parts: Sequence[tuple[RecentRows, GatewayFigures]]) -> GatewayFigures:
        """Return the figures of several processes: the longest lags, the mean processor time."""
        lags50 = [f.loop_lag_p50_ms for _, f in parts if f.loop_lag_p50_ms is not None]
        lags99 = [f.loop_lag_p99_ms for _, f in parts if f.loop_lag_p99_ms is not None]
        times = [
            (len(rows), figures.cpu_ms_per_request)
            for rows, figures in parts
            if figures.cpu_ms_per_request is not None
        ]
        num_requests = sum(count for count, _ in times)
        stages: dict[str, float] = {}
        for name, held_ms in chain.from_iterable(f.stages_p99_ms.items() for _, f in parts):
            stages[name] = max(held_ms, stages.get(name, 0.0))
        return GatewayFigures(
            loop_lag_p50_ms=max(lags50, default=None),
            loop_lag_p99_ms=max(lags99, default=None),
            stages_p99_ms=stages,
            cpu_ms_per_request=sum(count * ms for count, ms in times) / num_requests
            if num_requests
            else None,
        )

    def _cpu_s_per_request(self, rows: RecentRows) -> float | None:
        if not self._moments:
            return None
        first_s, first_cpu_s = self._moments[0]
        num_requests = int((rows["at_s"] >= first_s).sum())
        return (self.read_cpu_s() - first_cpu_s) / num_requests if num_requests else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000.0
