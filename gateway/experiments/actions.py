"""The operations on experiments, for any kind of store."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from outrider.gateway.experiments import lifecycle
from outrider.gateway.experiments.records import (
    EventKind,
    ExperimentEvent,
    ExperimentRecord,
    ExperimentSource,
    ExperimentTable,
    VersionRecord,
)
from outrider.gateway.settings.experiments import ExperimentSpec, ExperimentState

MAX_EVENTS: Final = 100

Step = Callable[[ExperimentRecord, Sequence[ExperimentRecord]], ExperimentRecord]
"""An experiment and all others in, the experiment as it is to be out."""


class ExperimentActions(ABC):
    """Makes, finds and changes experiments. Blocks: in an event loop, use a thread.

    Every method that names an experiment raises NotFoundError where there is none, and
    ConflictError as in gateway/experiments/lifecycle.py.
    """

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        """Store the arguments. `wall_clock` is seconds since 1970 (UTC)."""
        self.wall_clock = wall_clock

    @abstractmethod
    def version(self) -> int:
        """Return a number that changes with every change of an experiment."""

    @abstractmethod
    def load(self) -> ExperimentTable:
        """Return all experiments, by name; rows that cannot be read are left out, and logged."""

    @abstractmethod
    def get(self, name: str) -> ExperimentRecord:
        """Return one experiment."""

    @abstractmethod
    def versions(self, name: str) -> list[VersionRecord]:
        """Return all its versions, the oldest first."""

    @abstractmethod
    def events(self, name: str, *, limit: int = MAX_EVENTS) -> list[ExperimentEvent]:
        """Return the changes of an experiment, the newest first."""

    @abstractmethod
    def create(
        self,
        name: str,
        spec: ExperimentSpec,
        *,
        share: float = 1.0,
        source: ExperimentSource = "admin",
    ) -> ExperimentRecord:
        """Make an experiment, which does not run yet. Raises ConflictError for a taken name."""

    @abstractmethod
    def mark(self, name: str, *, fingerprint: str | None) -> None:
        """Remember which settings were applied; None: the settings have it no more."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Forget it with all its versions. Raises ConflictError while it runs."""

    def update(
        self,
        name: str,
        *,
        spec: ExperimentSpec | None = None,
        share: float | None = None,
        state: ExperimentState | None = None,
        detail: str = "",
    ) -> ExperimentRecord:
        """Make all of these changes, or none; None leaves a field as it is.

        Another spec makes a new version, where the present one has ever run. `state` "draft" means
        "stopped" for an experiment that was started.
        """
        now_s = self.wall_clock()

        def step(record: ExperimentRecord, others: Sequence[ExperimentRecord]) -> ExperimentRecord:
            if state in {"stopped", "draft"} and record.is_running:
                record = lifecycle.stopped(record, now_s)
            if spec is not None:
                wanted = record.share if share is None else share
                record = lifecycle.edited(replace(record, share=wanted), spec, others, now_s)
            if share is not None:
                record = lifecycle.ramped(record, share, others)
            if state == "running":
                record = lifecycle.started(record, others, now_s)
            return record

        return self._change(name, _kind(spec, share, state), step, detail)

    def edit(self, name: str, spec: ExperimentSpec) -> ExperimentRecord:
        """Make it another one: a new version, where the present one has ever run."""
        return self.update(name, spec=spec)

    def start(self, name: str) -> ExperimentRecord:
        """Let it run."""
        return self.update(name, state="running")

    def stop(self, name: str, *, reason: str = "") -> ExperimentRecord:
        """Let it run no more. Its data stay."""
        return self.update(name, state="stopped", detail=reason)

    def ramp(self, name: str, share: float) -> ExperimentRecord:
        """Change the share of the units that take part; when it grows, no unit leaves."""
        return self.update(name, share=share, detail=f"{share:g}")

    def stop_arm(self, name: str, version: int, arm: str, reason: str) -> ExperimentRecord:
        """Take an arm out of this version, if it is still the newest one; its control: stop it."""
        now_s = self.wall_clock()
        return self._change(
            name,
            "arm_stopped",
            lambda record, _: lifecycle.arm_stopped(record, version, arm, reason, now_s),
            f"{arm}: {reason}",
        )

    def set_weights(
        self, name: str, version: int, weights: Mapping[str, float]
    ) -> ExperimentRecord:
        """Give the arms that are not stopped other weights, within the same version."""
        detail = json.dumps({arm: round(weight, 6) for arm, weight in weights.items()})
        return self._change(
            name,
            "weights_changed",
            lambda record, _: lifecycle.reweighted(record, version, weights),
            detail,
        )

    @abstractmethod
    def _change(self, name: str, kind: EventKind, step: Step, detail: str = "") -> ExperimentRecord:
        """Do something to an experiment, and note it where it changed anything."""


def _kind(
    spec: ExperimentSpec | None, share: float | None, state: ExperimentState | None
) -> EventKind:
    """Return the event kind of a change, named after its greatest part."""
    if spec is not None:
        return "edited"
    if state is not None:
        return "started" if state == "running" else "stopped"
    return "ramped"
