"""Figures of a simulated run: latencies, rates, and the share of objectives that were met."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.gateway.tools.measuring.plan.simulate import Served

_WARM_UP: Final = 0.2
"""Share of a closed loop's requests that start on an empty engine and are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationFigures:
    """Figures of a simulated run, in seconds, and rates a second."""

    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    requests_per_s: float
    tokens_per_s: float
    attainment: float
    small_share: float

    @property
    def goodput_per_s(self) -> float:
        """Requests a second that attain their objectives."""
        return self.requests_per_s * self.attainment


def figures(
    served: list[Served], *, ttft_s: float | None = None, inter_token_s: float | None = None
) -> SimulationFigures:
    """Return the figures of all but the first requests, which met an empty engine."""
    by_end = sorted(served, key=lambda one: one.end_s)
    num_first = int(len(by_end) * _WARM_UP)
    begun_s = by_end[num_first - 1].end_s if num_first else 0.0
    # Those that ended together with the last of the first are over, too.
    counted = [one for one in by_end if one.end_s > begun_s] or by_end
    span_s = max(counted[-1].end_s - begun_s, 1e-9)
    ttft = np.array([one.ttft_s for one in counted])
    tpot = np.array([one.tpot_s for one in counted])
    is_good = np.ones(len(counted), dtype=bool)
    if ttft_s is not None:
        is_good &= ttft <= ttft_s
    if inter_token_s is not None:
        is_good &= tpot <= inter_token_s
    return SimulationFigures(
        ttft_p50_s=float(np.quantile(ttft, 0.5)),
        ttft_p95_s=float(np.quantile(ttft, 0.95)),
        tpot_p50_s=float(np.quantile(tpot, 0.5)),
        tpot_p95_s=float(np.quantile(tpot, 0.95)),
        requests_per_s=len(counted) / span_s,
        tokens_per_s=sum(one.num_answer for one in counted) / span_s,
        attainment=float(is_good.mean()),
        small_share=sum(one.tier == "small" for one in counted) / len(counted),
    )
