"""Rules under which an experiment runs: limits that stop an arm, and how traffic is shared out."""

from dataclasses import dataclass
from typing import Final, Literal

AllocationKind = Literal["fixed", "thompson", "track_and_stop"]
GuardrailName = Literal["p95_ttft_ms", "error_share", "cost_per_request_usd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardrailLimits:
    """What no arm may surely exceed; None where nothing is set.

    `error_share` in [0, 1] is of the requests that the client did not give up. `alpha` in (0, 1)
    bounds the probability that, over the whole run, any arm that keeps its limits is stopped.
    """

    p95_ttft_ms: float | None = None
    error_share: float | None = None
    cost_per_request_usd: float | None = None
    alpha: float = 0.05

    @property
    def names(self) -> tuple[GuardrailName, ...]:
        """Those that are set."""
        found: list[GuardrailName] = []
        if self.p95_ttft_ms is not None:
            found.append("p95_ttft_ms")
        if self.error_share is not None:
            found.append("error_share")
        if self.cost_per_request_usd is not None:
            found.append("cost_per_request_usd")
        return tuple(found)


NO_GUARDRAILS: Final = GuardrailLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationRule:
    """How weights change while the experiment runs, on attainment.

    `min_share` of the traffic goes to each arm at least (at most 1 / arms); weights are thought
    over every `every_s` seconds, and not before `min_requests` of each arm.
    """

    kind: AllocationKind = "fixed"
    min_share: float = 0.05
    every_s: float = 30.0
    min_requests: int = 50


FIXED_ALLOCATION: Final = AllocationRule()
