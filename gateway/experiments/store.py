"""Experiments in the database."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update

from outrider.gateway.audit.chain import Change, differences
from outrider.gateway.audit.chain import record as record_change
from outrider.gateway.contract.errors.tree import ConflictError, NotFoundError
from outrider.gateway.experiments import lifecycle
from outrider.gateway.experiments.records import (
    EventKind,
    ExperimentEvent,
    ExperimentRecord,
    ExperimentSource,
    ExperimentTable,
    VersionRecord,
)
from outrider.gateway.experiments.rows import (
    experiment_of,
    row_of_experiment,
    row_of_version,
    spec_document,
    version_of,
)
from outrider.gateway.settings.experiments import ExperimentSpec, ExperimentState
from outrider.gateway.storage import tables
from outrider.gateway.storage.change_counter import ChangeCounter
from outrider.gateway.storage.database import Database

logger = logging.getLogger(__name__)


MAX_EVENTS: Final = 100

Step = Callable[[ExperimentRecord, Sequence[ExperimentRecord]], ExperimentRecord]
"""An experiment and all others in, the experiment as it is to be out."""


class ExperimentStore:
    """Makes, finds and changes experiments. Blocks: in an event loop, use a thread.

    Every method that names an experiment raises NotFoundError where there is none, and
    ConflictError as in gateway/experiments/lifecycle.py; all raise DatabaseError.
    """

    def __init__(self, database: Database, *, wall_clock: Callable[[], float] = time.time) -> None:
        """`wall_clock` is seconds since 1970 (UTC)."""
        self.wall_clock = wall_clock
        self._database = database
        self._changes = ChangeCounter(database, tables.experiment_changes)

    def version(self) -> int:
        """Return a number that changes with every change of an experiment."""
        return self._changes.read()

    def load(self) -> ExperimentTable:
        """Return all experiments, by name; rows that cannot be read are left out, and logged."""
        with self._database.read() as connection:
            # First: rows that are newer are only read once more.
            version = self._changes.value(connection)
            records = _all(connection)
        return ExperimentTable(version=version, experiments={one.name: one for one in records})

    def get(self, name: str) -> ExperimentRecord:
        """Return one experiment."""
        with self._database.read() as connection:
            return _get(connection, name)

    def versions(self, name: str) -> list[VersionRecord]:
        """Return all its versions, the oldest first."""
        versions = tables.experiment_versions
        query = select(versions).where(versions.c.experiment == name).order_by(versions.c.version)
        with self._database.read() as connection:
            _get(connection, name)
            return [version_of(row) for row in connection.execute(query).mappings()]

    def events(self, name: str, *, limit: int = MAX_EVENTS) -> list[ExperimentEvent]:
        """Return the changes of an experiment, the newest first."""
        events = tables.experiment_events
        query = select(events).where(events.c.experiment == name).order_by(events.c.id.desc())
        with self._database.read() as connection:
            rows = connection.execute(query.limit(limit)).mappings().all()
        fields = ("experiment", "version", "at", "kind", "detail")
        return [ExperimentEvent(**{name: row[name] for name in fields}) for row in rows]

    def create(
        self,
        name: str,
        spec: ExperimentSpec,
        *,
        share: float = 1.0,
        source: ExperimentSource = "admin",
    ) -> ExperimentRecord:
        """Make an experiment, which does not run yet. Raises ConflictError for a taken name.

        Version numbers continue those of a deleted namesake, whose data may still come in.
        """
        now_s = self.wall_clock()
        with self._changes.changing() as connection:
            experiments = tables.experiments
            taken = select(experiments.c.name).where(experiments.c.name == name)
            if connection.execute(taken).first() is not None:
                raise ConflictError(f"The experiment {name!r} already exists.", param="name")
            record = lifecycle.created(
                name,
                spec,
                share=share,
                now_s=now_s,
                first_version=_last_counted(connection, name) + 1,
                source=source,
            )
            connection.execute(insert(experiments).values(row_of_experiment(record)))
            row = row_of_version(name, record.current)
            connection.execute(insert(tables.experiment_versions).values(row))
            _note(connection, record, "created", now_s)
            _audit(connection, "created", None, record, now_s)
        return record

    def mark(self, name: str, *, fingerprint: str | None) -> None:
        """Remember which settings were applied; None: the settings have it no more."""
        source: ExperimentSource = "admin" if fingerprint is None else "file"
        row = {"fingerprint": fingerprint, "source": source}
        experiments = tables.experiments
        with self._changes.changing() as connection:
            connection.execute(update(experiments).where(experiments.c.name == name).values(row))

    def delete(self, name: str) -> None:
        """Forget it with all its versions. Raises ConflictError while it runs."""
        with self._changes.changing() as connection:
            found = _get(connection, name)
            if found.is_running:
                raise ConflictError(f"The experiment {name!r} is running. Stop it first.")
            for table in (tables.experiment_events, tables.experiment_versions):
                connection.execute(delete(table).where(table.c.experiment == name))
            experiments = tables.experiments
            connection.execute(delete(experiments).where(experiments.c.name == name))
            _audit(connection, "deleted", found, None, self.wall_clock())

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

    def _change(self, name: str, kind: EventKind, step: Step, detail: str = "") -> ExperimentRecord:
        """Do something to an experiment, and note it where it changed anything."""
        now_s = self.wall_clock()
        with self._changes.changing() as connection:
            before = _get(connection, name)
            after = step(before, [one for one in _all(connection) if one.name != name])
            if after != before:
                _save(connection, before, after, now_s)
                _note(connection, after, kind, now_s, detail)
                _audit(connection, kind, before, after, now_s)
        return after


def _kind(
    spec: ExperimentSpec | None, share: float | None, state: ExperimentState | None
) -> EventKind:
    """Return the event kind of a change, named after its greatest part."""
    if spec is not None:
        return "edited"
    if state is not None:
        return "started" if state == "running" else "stopped"
    return "ramped"


def _joined() -> Any:
    experiments, versions = tables.experiments, tables.experiment_versions
    is_newest = (versions.c.experiment == experiments.c.name) & (
        versions.c.version == experiments.c.version
    )
    # Names that both have are the version's, but for when it was made.
    columns = [
        *(column for column in experiments.c),
        versions.c.document,
        versions.c.arm_slots,
        versions.c.stopped_arms,
        versions.c.created_at.label("version_created_at"),
        versions.c.started_at,
        versions.c.stopped_at,
    ]
    return select(*columns).join(versions, is_newest).order_by(experiments.c.name)


def _all(connection: Connection) -> list[ExperimentRecord]:
    records = []
    for row in connection.execute(_joined()).mappings():
        record = _readable(row)
        if record is not None:
            records.append(record)
    return records


def _readable(row: RowMapping) -> ExperimentRecord | None:
    try:
        return experiment_of(row)
    except (ValueError, TypeError, KeyError) as error:
        # The error's text may contain anything.
        logger.error(
            "row of an experiment is damaged name=%s error=%s", row["name"], type(error).__name__
        )
        return None


def _get(connection: Connection, name: str) -> ExperimentRecord:
    query = _joined().where(tables.experiments.c.name == name)
    row = connection.execute(query).mappings().first()
    record = None if row is None else _readable(row)
    if record is None:
        raise NotFoundError("No experiment has this name.", param="experiment", code="not_found")
    return record


def _save(
    connection: Connection, before: ExperimentRecord, after: ExperimentRecord, now_s: float
) -> None:
    experiments, versions = tables.experiments, tables.experiment_versions
    row = row_of_experiment(after)
    connection.execute(update(experiments).where(experiments.c.name == after.name).values(row))
    version = row_of_version(after.name, after.current)
    if after.version == before.version:
        is_it = (versions.c.experiment == after.name) & (versions.c.version == after.version)
        connection.execute(update(versions).where(is_it).values(version))
        return
    connection.execute(insert(versions).values(version))
    if before.current.started_at is not None and before.current.stopped_at is None:
        is_old = (versions.c.experiment == after.name) & (versions.c.version == before.version)
        connection.execute(update(versions).where(is_old).values(stopped_at=now_s))


def _note(
    connection: Connection,
    record: ExperimentRecord,
    kind: EventKind,
    now_s: float,
    detail: str = "",
) -> None:
    row = {
        "experiment": record.name,
        "version": record.version,
        "at": now_s,
        "kind": kind,
        "detail": detail,
    }
    connection.execute(insert(tables.experiment_events).values(row))


def _audit(
    connection: Connection,
    kind: str,
    before: ExperimentRecord | None,
    after: ExperimentRecord | None,
    now_s: float,
) -> None:
    """Enter a change into the audit log, except for weights, which the gateway itself allocates."""
    one = before or after
    if one is None or kind == "weights_changed":
        return
    old, new = (None if each is None else _audited(each) for each in (before, after))
    if old is not None and new is not None:
        old, new = differences(old, new)
    target = f"experiment/{one.name}"
    change = Change(action=f"experiment.{kind}", target=target, before=old, after=new)
    record_change(connection, change, now_s)


def _audited(record: ExperimentRecord) -> dict[str, Any]:
    return {
        "version": record.version,
        "state": record.state,
        "share": record.share,
        "stopped_arms": sorted(record.current.stopped_arms),
        **spec_document(record.spec),
    }


def _last_counted(connection: Connection, name: str) -> int:
    """Return the newest version of a deleted namesake that has counts."""
    newest = 0
    for table in (tables.experiment_measures, tables.feedback):
        query = select(func.max(table.c.version)).where(table.c.experiment == name)
        newest = max(newest, connection.execute(query).scalar() or 0)
    return newest
