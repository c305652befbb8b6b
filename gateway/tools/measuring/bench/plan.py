"""Plan of a run: target, workload, load, objectives."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from outrider.gateway.tools.measuring.bench.client import TargetSettings
from outrider.gateway.tools.measuring.bench.results import LoopKind, Objectives
from outrider.gateway.tools.measuring.bench.search import SearchSettings
from outrider.gateway.tools.measuring.bench.summary import BenchPrices
from outrider.gateway.tools.measuring.bench.workloads import WorkloadSettings

DEFAULT_DURATION_S: Final = 30.0


class PlanError(Exception):
    """Parts of a plan do not go together; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """Load on the target. At least one of `duration_s` and `num_requests` is given."""

    rate_per_s: float | None = None
    """Of an open loop; None: a trace's own."""
    concurrency: int | None = None
    """Makes a closed loop of so many users; without it the loop is open."""
    duration_s: float | None = DEFAULT_DURATION_S
    num_requests: int | None = None
    warm_up_s: float = 0.0
    """Comes before the `duration_s`; its requests are sent and not measured."""
    max_in_flight: int = 1024
    drain_s: float = 60.0

    @property
    def loop(self) -> LoopKind:
        """The kind of loop: open or closed."""
        return "open" if self.concurrency is None else "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """A whole run."""

    target: TargetSettings
    workload: WorkloadSettings
    load: LoadSettings
    objectives: Objectives = field(default_factory=Objectives)
    request_fields: Mapping[str, Any] = field(default_factory=dict)
    """Merged into every request's body."""
    prices: BenchPrices | None = None
    """Instead of the target's own."""
    search: SearchSettings | None = None
    seed: int = 0
    salt: str = ""
    """Part of every text that is made, so that no cache knows it; "" is drawn for the run."""
    arm: str = ""
    """What the run is called in a comparison."""
    shares_noise: bool = False
    """Each prompt of a file goes with a seed that the other side of the comparison sends too."""
    commit: str | None = None

    def check(self) -> None:
        """Raises PlanError for what does not go together."""
        load = self.load
        if load.rate_per_s is not None and load.concurrency is not None:
            raise PlanError("a rate makes an open loop and a concurrency a closed one: choose one")
        if load.duration_s is None and load.num_requests is None:
            raise PlanError("a run needs an end: a duration or a number of requests")
        has_rate = load.rate_per_s is not None or self.search is not None
        if load.loop == "open" and not has_rate and self.workload.kind != "trace":
            raise PlanError("an open loop needs a rate, unless a trace gives the times")
        if self.search is not None and (load.loop == "closed" or not self.objectives.are_any):
            raise PlanError(
                "a search needs objectives (--slo) and no --concurrency: it sets the rates"
            )
        asks_for_gaps = (self.objectives.ttft_ms, self.objectives.inter_token_ms) != (None, None)
        if asks_for_gaps and not self.target.is_stream:
            raise PlanError(
                "without streaming the first token is not seen: only e2e_ms can be an objective"
            )
