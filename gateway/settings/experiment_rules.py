"""Rules of an experiment: limits that stop an arm, and how traffic is allocated."""

from dataclasses import dataclass
from typing import Final, Literal

AllocationKind = Literal["fixed", "thompson", "track_and_stop"]
GuardrailName = Literal["p95_ttft_ms", "error_share", "cost_per_request_usd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardrailLimits:
    """Limits that stop an arm which provably exceeds one; None: no limit."""

    p95_ttft_ms: float | None = None
    error_share: float | None = None
    """In [0, 1], of requests that the client did not cancel."""
    cost_per_request_usd: float | None = None
    alpha: float = 0.05
    """In (0, 1). It bounds the probability that, over the whole run, any arm that keeps its limits
    is stopped."""

    @property
    def names(self) -> tuple[GuardrailName, ...]:
        """Names of the limits that are set."""
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
    """Rule by which weights change while the experiment runs, based on attainment."""

    kind: AllocationKind = "fixed"
    min_share: float = 0.05
    """Each arm gets at least this share of the traffic; at most 1 / arms."""
    every_s: float = 30.0
    """Seconds between two computations of the weights."""
    min_requests: int = 50
    """Weights change once each arm has had so many."""


FIXED_ALLOCATION: Final = AllocationRule()
