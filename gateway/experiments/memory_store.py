"""Experiments of a gateway without a database: they last as long as it runs."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from outrider.gateway.contract.errors.tree import ConflictError, NotFoundError
from outrider.gateway.experiments import lifecycle
from outrider.gateway.experiments.actions import MAX_EVENTS, ExperimentActions, Step
from outrider.gateway.experiments.records import (
    EventKind,
    ExperimentEvent,
    ExperimentRecord,
    ExperimentSource,
    ExperimentTable,
    VersionRecord,
)
from outrider.gateway.settings.experiments import ExperimentSpec


class MemoryExperimentStore(ExperimentActions):
    """The same as the database's, in memory. Safe for several threads."""

    def __init__(self, *, wall_clock: Callable[[], float] = time.time) -> None:
        super().__init__(wall_clock)
        self._lock = threading.RLock()
        self._version = 0
        self._records: dict[str, ExperimentRecord] = {}
        self._versions: dict[str, dict[int, VersionRecord]] = {}
        self._events: dict[str, list[ExperimentEvent]] = {}
        self._last_numbers: dict[str, int] = {}

    def version(self) -> int:
        """Return a number that changes with every change of an experiment."""
        return self._version

    def load(self) -> ExperimentTable:
        """Return all experiments, by name."""
        with self._lock:
            return ExperimentTable(
                version=self._version, experiments=dict(sorted(self._records.items()))
            )

    def get(self, name: str) -> ExperimentRecord:
        """Return one experiment."""
        record = self._records.get(name)
        if record is None:
            raise NotFoundError(
                "No experiment has this name.", param="experiment", code="not_found"
            )
        return record

    def versions(self, name: str) -> list[VersionRecord]:
        """Return all its versions, the oldest first."""
        with self._lock:
            self.get(name)
            return [version for _, version in sorted(self._versions[name].items())]

    def events(self, name: str, *, limit: int = MAX_EVENTS) -> list[ExperimentEvent]:
        """Return the changes of an experiment, the newest first."""
        with self._lock:
            return self._events.get(name, [])[: -limit - 1 : -1]

    def create(
        self,
        name: str,
        spec: ExperimentSpec,
        *,
        share: float = 1.0,
        source: ExperimentSource = "admin",
    ) -> ExperimentRecord:
        """Make an experiment, which does not run yet. Raises ConflictError for a taken name."""
        with self._lock:
            if name in self._records:
                raise ConflictError(f"The experiment {name!r} already exists.", param="name")
            record = lifecycle.created(
                name,
                spec,
                share=share,
                now_s=self.wall_clock(),
                first_version=self._last_numbers.get(name, 0) + 1,
                source=source,
            )
            self._put(record)
            self._note(record, "created", "")
            return record

    def mark(self, name: str, *, fingerprint: str | None) -> None:
        """Remember which settings were applied; None: the settings have it no more."""
        with self._lock:
            source: ExperimentSource = "admin" if fingerprint is None else "file"
            self._put(replace(self.get(name), fingerprint=fingerprint, source=source))

    def delete(self, name: str) -> None:
        """Forget it with all its versions. Raises ConflictError while it runs."""
        with self._lock:
            if self.get(name).is_running:
                raise ConflictError(f"The experiment {name!r} is running. Stop it first.")
            del self._records[name], self._versions[name], self._events[name]
            self._version += 1

    def _change(self, name: str, kind: EventKind, step: Step, detail: str = "") -> ExperimentRecord:
        with self._lock:
            before = self.get(name)
            others = [one for one in self._records.values() if one.name != name]
            after = step(before, others)
            if after != before:
                if after.version != before.version and before.current.stopped_at is None:
                    ended = replace(before.current, stopped_at=self.wall_clock())
                    self._versions[name][before.version] = ended
                self._put(after)
                self._note(after, kind, detail)
            return after

    def _put(self, record: ExperimentRecord) -> None:
        self._records[record.name] = record
        self._versions.setdefault(record.name, {})[record.version] = record.current
        self._last_numbers[record.name] = record.version
        self._version += 1

    def _note(self, record: ExperimentRecord, kind: EventKind, detail: str) -> None:
        events = self._events.setdefault(record.name, [])
        events.append(
            ExperimentEvent(
                experiment=record.name,
                version=record.version,
                at=self.wall_clock(),
                kind=kind,
                detail=detail,
            )
        )
        del events[:-MAX_EVENTS]
