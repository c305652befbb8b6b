"""Experiments as they are kept."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from outrider.gateway.experiments.slots import Ranges, shares_of
from outrider.gateway.settings.experiment_rules import AllocationRule, GuardrailLimits
from outrider.gateway.settings.experiments import ExperimentSpec, ExperimentState

EventKind = Literal[
    "created", "edited", "started", "stopped", "ramped", "arm_stopped", "weights_changed"
]
ExperimentSource = Literal["admin", "file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedArm:
    """The reason and time of an arm's exclusion. `at`: seconds since 1970 (UTC)."""

    reason: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """An experiment between two edits; its data are apart from other versions'.

    Times are seconds since 1970 (UTC).
    """

    number: int
    spec: ExperimentSpec
    arm_slots: Mapping[str, Ranges]
    """The slots of units by arm."""
    stopped_arms: Mapping[str, StoppedArm] = field(default_factory=dict)
    created_at: float
    started_at: float | None = None
    stopped_at: float | None = None

    @property
    def weights(self) -> dict[str, float]:
        """Return the arms' shares of the units, stopped arms included; they add up to 1."""
        return shares_of(self.arm_slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRecord:
    """An experiment and its newest version."""

    name: str
    state: ExperimentState
    share: float
    """The share of the units that takes part while it runs."""
    current: VersionRecord
    slots: Ranges = ()
    """The slots that it has of its layer; none while it does not run."""
    source: ExperimentSource = "admin"
    fingerprint: str | None = None
    """The digest of the settings in outrider.toml that were last applied."""
    created_at: float

    @property
    def version(self) -> int:
        """Return the newest version's number."""
        return self.current.number

    @property
    def spec(self) -> ExperimentSpec:
        """Return its present spec."""
        return self.current.spec

    @property
    def control(self) -> str:
        """Return the arm that the others are compared with."""
        return self.current.spec.control_arm

    @property
    def started_at(self) -> float | None:
        """Return the time when the newest version began to run."""
        return self.current.started_at

    @property
    def stopped_at(self) -> float | None:
        """Return the time when it stopped; None while it runs, and before."""
        return self.current.stopped_at

    @property
    def is_running(self) -> bool:
        """Return whether units are assigned to its arms."""
        return self.state == "running"

    @property
    def live_arms(self) -> tuple[str, ...]:
        """Return the arms that are not stopped."""
        return tuple(arm for arm in self.spec.arms if arm not in self.current.stopped_arms)

    @property
    def guardrails(self) -> GuardrailLimits:
        """Return the limits that stop an arm."""
        return GuardrailLimits(**self.spec.guardrails.model_dump())

    @property
    def allocation(self) -> AllocationRule:
        """Return the rule by which weights change on their own."""
        return AllocationRule(**self.spec.allocation.model_dump())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentEvent:
    """Something that was done to an experiment. `at`: seconds since 1970 (UTC)."""

    experiment: str
    version: int
    at: float
    kind: EventKind
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentTable:
    """All experiments at one moment. `version` changes when any of them does."""

    version: int
    experiments: Mapping[str, ExperimentRecord] = field(default_factory=dict)
