"""Experiments as rows of their tables, there and back."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import RowMapping

from outrider.gateway.experiments.records import ExperimentRecord, StoppedArm, VersionRecord
from outrider.gateway.experiments.slots import Ranges
from outrider.gateway.settings.experiments import ExperimentSpec


def experiment_of(row: RowMapping) -> ExperimentRecord:
    """Return an experiment and its newest version. Raises ValueError for an invalid row."""
    return ExperimentRecord(
        name=row["name"],
        state=row["state"],
        share=row["share"],
        slots=_ranges(json.loads(row["slots"])),
        source=row["source"],
        fingerprint=row["fingerprint"],
        created_at=row["created_at"],
        current=_version(row, number=row["version"], created_at=row["version_created_at"]),
    )


def version_of(row: RowMapping) -> VersionRecord:
    """Return one of its versions. Raises ValueError for an invalid row."""
    return _version(row, number=row["version"], created_at=row["created_at"])


def row_of_experiment(record: ExperimentRecord) -> dict[str, Any]:
    """Return the columns of an experiment's present state."""
    return {
        "name": record.name,
        "version": record.version,
        "state": record.state,
        "share": record.share,
        "slots": json.dumps(record.slots),
        "source": record.source,
        "fingerprint": record.fingerprint,
        "created_at": record.created_at,
    }


def row_of_version(name: str, version: VersionRecord) -> dict[str, Any]:
    """Return the columns of a version."""
    return {
        "experiment": name,
        "version": version.number,
        "document": json.dumps(spec_document(version.spec)),
        "arm_slots": json.dumps(dict(version.arm_slots)),
        "stopped_arms": json.dumps({arm: asdict(one) for arm, one in version.stopped_arms.items()}),
        "created_at": version.created_at,
        "started_at": version.started_at,
        "stopped_at": version.stopped_at,
    }


def spec_document(spec: ExperimentSpec) -> dict[str, Any]:
    """Return a spec as JSON, without its unset fields."""
    document: dict[str, Any] = spec.model_dump(mode="json", exclude_defaults=True, by_alias=True)
    return document


def _version(row: Mapping[Any, Any], *, number: int, created_at: float) -> VersionRecord:
    slots = json.loads(row["arm_slots"])
    stopped = json.loads(row["stopped_arms"])
    return VersionRecord(
        number=number,
        spec=ExperimentSpec.model_validate_json(row["document"]),
        arm_slots={arm: _ranges(ranges) for arm, ranges in slots.items()},
        stopped_arms={arm: StoppedArm(**one) for arm, one in stopped.items()},
        created_at=created_at,
        started_at=row["started_at"],
        stopped_at=row["stopped_at"],
    )


def _ranges(document: Any) -> Ranges:
    return tuple((int(start), int(end)) for start, end in document)
