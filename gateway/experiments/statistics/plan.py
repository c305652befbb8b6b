"""The statistics' description of an experiment: its arms, its question, its way to run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

PlanMetric = Literal["attainment", "ttft", "tpot", "e2e", "cost", "feedback"]
UnitName = Literal["user", "key", "conversation", "request"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Guardrails: the limits of every arm; None where there is none. As `GuardrailLimits`."""

    p95_ttft_ms: float | None = None
    error_share: float | None = None
    cost_per_request_usd: float | None = None
    alpha: float = 0.05


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlan:
    """One version of an experiment.

    Raises ValueError for a control that is no arm, or a single arm.
    """

    name: str
    version: int
    control: str
    weights: Mapping[str, float]
    """Weights of its arms, positive, in any scale."""
    metric: PlanMetric = "attainment"
    """The deciding one; times and cost by their mean."""
    alpha: float = 0.05
    """Probability that any arm is ever wrongly reported to differ from the control."""
    unit: UnitName = "user"
    state: str = "running"
    is_adaptive: bool = False
    """Weights follow attainment."""
    stopped: Mapping[str, str] = field(default_factory=dict)
    """Arms that were stopped, with the reason."""
    limits: Limits = NO_LIMITS
    min_effect: float | None = None
    """A smaller difference of the metric (in its unit: shares, seconds, dollars) does not
    matter."""
    feedback_name: str = ""
    """Which feedback, where that is the metric."""

    def __post_init__(self) -> None:
        if self.control not in self.weights:
            raise ValueError(
                f"the control {self.control!r} is not among the arms {', '.join(self.weights)}"
            )
        if len(self.weights) < 2:
            raise ValueError(f"{self.name} has a single arm: there is nothing to compare")

    @property
    def is_independent(self) -> bool:
        """Return whether each request is a unit of its own."""
        return self.unit == "request"

    @property
    def others(self) -> tuple[str, ...]:
        """Return all arms but the control."""
        return tuple(name for name in self.weights if name != self.control)

    @property
    def comparison_alpha(self) -> float:
        """Return alpha of each deciding comparison: divided among the arms (Bonferroni)."""
        return self.alpha / len(self.others)
