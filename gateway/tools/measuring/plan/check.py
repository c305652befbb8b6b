"""A plan beside what was measured (`outrider bench --json`): by how much it is wrong."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.gateway.tools.measuring.bench.results import BenchResult, RequestRow
from outrider.gateway.tools.measuring.plan.simulate import SimulatedRequest, Simulation, System
from outrider.gateway.tools.measuring.plan.simulation_figures import figures
from outrider.gateway.tools.measuring.plan.workload import LengthPairs, measured_lengths

_MS: Final = 1000.0


class RunMismatchError(ValueError):
    """A run that nothing can be compared with; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedFigure:
    """A figure as it was predicted and as it was measured, in `unit`."""

    name: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to what was measured: 0.1 is ten percent too much."""
        return self.predicted / self.measured - 1.0 if self.measured else float("inf")


def lengths_of(result: BenchResult) -> LengthPairs:
    """Return the lengths of the run's requests. Raises RunMismatchError if unknown."""
    rows = _usable(result)
    pairs = [(row.num_prompt_tokens or 1, row.num_completion_tokens) for row in rows]
    return measured_lengths("as measured", pairs)


def compare(
    system: System, result: BenchResult, *, overhead_s: float = 0.0
) -> list[PredictedFigure]:
    """The run's own requests, simulated as they came. Raises RunMismatchError.

    `overhead_s`: what lies between the engine and the client, added to the first token.
    """
    rows = _usable(result)
    concurrency = result.meta.settings.get("concurrency")
    is_open = not isinstance(concurrency, int)
    asks = [
        SimulatedRequest(
            num_prompt=row.num_prompt_tokens or 1,
            num_answer=row.num_completion_tokens,
            tier="small" if row.tier == "small" else "large",
            at_s=row.scheduled_s if is_open else None,
        )
        for row in sorted(rows, key=lambda row: row.scheduled_s)
    ]
    found = figures(Simulation(system).run(asks, num_users=None if is_open else concurrency))
    ttft = [row.ttft_ms for row in rows if row.ttft_ms is not None]
    tpot = [row.tpot_ms for row in rows if row.tpot_ms is not None]
    if not ttft or not tpot:
        raise RunMismatchError(
            "the measured run has no streamed answers, so its token times are unknown"
        )
    pairs = (
        ("TTFT p50", "ms", (found.ttft_p50_s + overhead_s) * _MS, float(np.quantile(ttft, 0.5))),
        ("TPOT p50", "ms", found.tpot_p50_s * _MS, float(np.quantile(tpot, 0.5))),
        ("tokens", "1/s", found.tokens_per_s, result.summary.completion_tokens_per_s),
    )
    return [PredictedFigure(name=n, unit=u, predicted=p, measured=m) for n, u, p, m in pairs]


def _usable(result: BenchResult) -> list[RequestRow]:
    """Whole answers with known lengths. Raises RunMismatchError where there are none."""
    rows = [row for row in result.measured if row.is_success and row.num_completion_tokens]
    if not rows:
        raise RunMismatchError("the measured run has no successful request with a known length")
    return rows
