"""Request and answer bodies of /admin/experiments."""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

from outrider.gateway.contract.schema.common import RequestModel, without_defaults
from outrider.gateway.contract.schema.structs import CompleteModel
from outrider.gateway.experiments.records import ExperimentEvent, ExperimentRecord, VersionRecord
from outrider.gateway.experiments.rows import spec_document
from outrider.gateway.settings.experiments import ExperimentName, ExperimentSpec, ExperimentState
from outrider.gateway.settings.sections import Share


class ExperimentCreate(ExperimentSpec):
    """A new experiment. It runs as soon as it is started."""

    name: ExperimentName
    """The experiment's name."""
    share: Share = 1.0
    """Share of the units that take part while it runs."""
    start: bool = False
    """Start it at once."""

    def spec(self) -> ExperimentSpec:
        """Return the experiment itself."""
        fields = ExperimentSpec.model_fields
        return ExperimentSpec.model_construct(**{name: getattr(self, name) for name in fields})


class _Update(RequestModel):
    """Changes of an experiment: the given fields change, each one as a whole.

    `share` and `state` change the running version; other fields, except `description` and
    `guardrails`, make a new one, whose data are kept apart.
    """

    model_config = ConfigDict(
        use_attribute_docstrings=True, json_schema_extra=without_defaults, title="ExperimentUpdate"
    )

    share: Share = 1.0
    """Share of the units that take part."""
    state: Literal["running", "stopped"] = "stopped"
    """Run or stop it."""


def _absent(info: FieldInfo) -> FieldInfo:
    """Return the field, made optional."""
    twin = copy(info)
    if twin.is_required():
        twin.default = None
    return twin


if TYPE_CHECKING:
    ExperimentUpdate = _Update
else:
    ExperimentUpdate = create_model(
        "ExperimentUpdate",
        __base__=_Update,
        __doc__=_Update.__doc__,
        **{
            name: (info.annotation, _absent(info))
            for name, info in ExperimentSpec.model_fields.items()
        },
    )


class StoppedReport(CompleteModel, kw_only=True):
    """The reason and time (seconds since 1970, UTC) of an arm's exclusion."""

    reason: str
    at: float


class ExperimentArmReport(CompleteModel, kw_only=True):
    """An arm; `share` of the experiment's units are in it, `set` holds its settings."""

    name: str
    share: float
    set: dict[str, Any]
    is_control: bool
    stopped: StoppedReport | None


class ExperimentReport(CompleteModel, kw_only=True):
    """An experiment as it is now. Times are seconds since 1970 (UTC).

    `definition`: all its fields that differ from the default. `source`: file, for one of the
    gateway's settings.
    """

    object: Literal["experiment"] = "experiment"
    name: str
    version: int
    state: ExperimentState
    share: float
    source: str
    unit: str
    layer: str
    metric: str
    alpha: float
    arms: list[ExperimentArmReport]
    definition: dict[str, Any]
    created_at: float
    started_at: float | None
    stopped_at: float | None


class VersionReport(CompleteModel, kw_only=True):
    """One version; its data are apart from those of others."""

    version: int
    definition: dict[str, Any]
    created_at: float
    started_at: float | None
    stopped_at: float | None


class EventReport(CompleteModel, kw_only=True):
    """Something that was done to it."""

    version: int
    at: float
    kind: str
    detail: str


class ExperimentDetail(ExperimentReport, kw_only=True):
    """An experiment with its versions, the oldest first, and its last events, newest first."""

    versions: list[VersionReport]
    events: list[EventReport]


class ExperimentList(CompleteModel, kw_only=True):
    """All experiments, by name."""

    object: Literal["list"] = "list"
    data: list[ExperimentReport]


class DeletedExperiment(CompleteModel, kw_only=True):
    """The experiment and its data are deleted."""

    object: Literal["experiment"] = "experiment"
    name: str
    deleted: bool = True


class ExperimentAnalysis(BaseModel):
    """The present report on an experiment: arms, comparisons with the control, the verdict."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    experiment: str
    version: int
    state: str
    metric: str
    alpha: float
    control: str
    verdict: dict[str, Any]
    arms: list[dict[str, Any]] = Field(description="Every arm with its intervals.")
    comparisons: list[dict[str, Any]]


def experiment_report(record: ExperimentRecord) -> ExperimentReport:
    """Describe an experiment."""
    return ExperimentReport(**_facts(record))


def experiment_detail(
    record: ExperimentRecord, versions: Sequence[VersionRecord], events: Sequence[ExperimentEvent]
) -> ExperimentDetail:
    """Describe an experiment with its versions and events."""
    return ExperimentDetail(
        **_facts(record),
        versions=[_version_report(version) for version in versions],
        events=[
            EventReport(version=event.version, at=event.at, kind=event.kind, detail=event.detail)
            for event in events
        ],
    )


def _facts(record: ExperimentRecord) -> dict[str, Any]:
    """Return the fields of an ExperimentReport."""
    spec, version = record.spec, record.current
    return {
        "name": record.name,
        "version": record.version,
        "state": record.state,
        "share": record.share,
        "source": record.source,
        "unit": spec.unit,
        "layer": spec.layer,
        "metric": spec.metric,
        "alpha": spec.alpha,
        "arms": [_arm_report(record, arm) for arm in spec.arms],
        "definition": spec_document(spec),
        "created_at": record.created_at,
        "started_at": version.started_at,
        "stopped_at": version.stopped_at,
    }


def _arm_report(record: ExperimentRecord, arm: str) -> ExperimentArmReport:
    stop = record.current.stopped_arms.get(arm)
    return ExperimentArmReport(
        name=arm,
        share=record.current.weights[arm],
        set=record.spec.overlay(arm).document(),
        is_control=arm == record.control,
        stopped=None if stop is None else StoppedReport(reason=stop.reason, at=stop.at),
    )


def _version_report(version: VersionRecord) -> VersionReport:
    return VersionReport(
        version=version.number,
        definition=spec_document(version.spec),
        created_at=version.created_at,
        started_at=version.started_at,
        stopped_at=version.stopped_at,
    )
