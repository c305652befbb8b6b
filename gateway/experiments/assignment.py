"""Putting units into arms by keyed hashes, fast enough for every request.

A unit has one slot in each layer, which gives its experiment, if any, and another in each
experiment, which gives its arm: two independent hashes. Both are
BLAKE2 (Aumasson et al., 2013) keyed with a secret, so that names cannot be chosen for an arm.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from outrider.gateway.contract.answers.outcomes import ArmRef
from outrider.gateway.experiments.assigner import (
    ARM_HEADER,
    Assignment,
    PassedOver,
    PassReason,
    Subject,
    unknown_arm,
)
from outrider.gateway.experiments.eligibility import Eligibility, unit_of
from outrider.gateway.experiments.records import ExperimentRecord
from outrider.gateway.experiments.slots import NUM_SLOTS, Ranges
from outrider.gateway.settings.arm_overlay import NO_OVERLAY, Overlay
from outrider.gateway.settings.experiments import UnitKind

_Item = TypeVar("_Item")

NUM_UNIT_BUCKETS: Final = 64
_DIGEST_BYTES: Final = 16
_KEY_BYTES: Final = 64
_MAX_COMBINED: Final = 4096


class UnitHash:
    """A unit's slot, and its bucket for statistics, for one purpose."""

    __slots__ = ("_hash",)

    def __init__(self, secret: bytes, purpose: str, name: str) -> None:
        """Derive the key. `purpose` and `name` make independent hashes."""
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=secret[:_KEY_BYTES])
        self._hash.update(f"{purpose}\0{name}\0".encode())

    def of(self, unit: bytes) -> tuple[int, int]:
        """Return a slot in [0, NUM_SLOTS) and a bucket in [0, 64), independent of each other."""
        copy = self._hash.copy()
        copy.update(unit)
        digest = copy.digest()
        return int.from_bytes(digest[:8]) % NUM_SLOTS, digest[8] % NUM_UNIT_BUCKETS


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadyArm:
    """An arm's assignments by the unit's bucket; a stopped one's are the control's, uncounted."""

    by_bucket: tuple[Assignment | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadyExperiment:
    name: str
    version: int
    eligibility: Eligibility
    hash: UnitHash
    arms: tuple[_ReadyArm, ...]
    """The arm of each slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    unit: UnitKind
    hash: UnitHash
    experiments: tuple[_ReadyExperiment | None, ...]
    """The experiment of each slot."""
    running: tuple[_ReadyExperiment, ...]


class HashAssigner:
    """Assigns by the experiments as they are at one moment."""

    def __init__(self, records: Iterable[ExperimentRecord], secret: bytes) -> None:
        """Build the table. `secret`: up to 64 bytes, the same in all processes that must agree on
        arms."""
        records = list(records)
        self._forced = {
            f"{record.name}/{arm}": _forced(record, arm)
            for record in records
            for arm in record.spec.arms
        }
        self._eligibility = {record.name: Eligibility.of(record.spec) for record in records}
        self._layers = _layers([one for one in records if one.is_running], secret)
        self._wants_conversation = any(layer.unit == "conversation" for layer in self._layers)
        self._sets_models = any(forced.overlay.model for forced in self._forced.values())
        self._combined: dict[tuple[int, ...], tuple[Overlay, str]] = {}

    @property
    def wants_conversation(self) -> bool:
        """Return whether an experiment assigns by conversation."""
        return self._wants_conversation

    @property
    def sets_models(self) -> bool:
        """Return whether an arm names a model, of experiments that run or could be forced."""
        return self._sets_models

    def assign(self, subject: Subject) -> Assignment | None:
        """Return the arms of a request; None for none.

        Raises BadRequestError where the header forces an arm that does not exist.
        """
        if ARM_HEADER in subject.headers:
            return self._force(subject.headers[ARM_HEADER].strip(), subject)
        first: Assignment | None = None
        more: list[Assignment] = []
        for layer in self._layers:
            found = _assigned(layer, subject)
            if found is None:
                continue
            if first is None:
                first = found
            else:
                more.append(found)
        if first is None or not more:
            return first
        return self._together([first, *more])

    def passed_over(self, subject: Subject) -> list[PassedOver]:
        """Return the running experiments that this request takes no part in."""
        if ARM_HEADER in subject.headers:
            return []
        return [
            PassedOver(experiment=each.name, version=each.version, reason=reason)
            for layer in self._layers
            for each in layer.running
            if (reason := _refusal(layer, each, subject)) is not None
        ]

    def _force(self, wanted: str, subject: Subject) -> Assignment:
        """Return the arm that the request forces. It sets nothing beyond the request's permissions.

        Experiments of other tenants stay hidden from principals that cannot be in them.
        """
        found = self._forced.get(wanted)
        if found is None or not self._shows(found, subject):
            shown = (name for name, arm in self._forced.items() if self._shows(arm, subject))
            raise unknown_arm(wanted, sorted(shown))
        return found

    def _shows(self, forced: Assignment, subject: Subject) -> bool:
        (ref,) = forced.arms
        return subject.is_admin or self._eligibility[ref.experiment].is_open_to(subject)

    def _together(self, parts: list[Assignment]) -> Assignment:
        """Join the assignments of several layers, which set different fields."""
        # Overlays live as long as this object, one for each arm.
        key = tuple([id(part.overlay) for part in parts])
        found = self._combined.get(key)
        if found is None:
            overlay = NO_OVERLAY
            for part in parts:
                overlay = part.overlay.over(overlay)
            found = overlay, ",".join(part.label for part in parts if part.label)
            if len(self._combined) < _MAX_COMBINED:
                self._combined[key] = found
        overlay, label = found
        arms = tuple([arm for part in parts for arm in part.arms])
        return Assignment(arms=arms, overlay=overlay, label=label)


def _assigned(layer: _Layer, subject: Subject) -> Assignment | None:
    """Return the layer's assignment of a request."""
    unit = unit_of(layer.unit, subject)
    if not unit:
        return None
    encoded = unit.encode("utf-8", "surrogatepass")
    slot, _ = layer.hash.of(encoded)
    experiment = layer.experiments[slot]
    if experiment is None or not experiment.eligibility.admits(subject):
        return None
    slot, bucket = experiment.hash.of(encoded)
    return experiment.arms[slot].by_bucket[bucket]


def _refusal(layer: _Layer, one: _ReadyExperiment, subject: Subject) -> PassReason | None:
    """Return why a request takes no part in an experiment of the layer; None where it does."""
    unit = unit_of(layer.unit, subject)
    if not unit:
        return "no-unit"
    if (refusal := one.eligibility.refusal(subject)) is not None:
        return refusal
    slot, _ = layer.hash.of(unit.encode("utf-8", "surrogatepass"))
    return None if layer.experiments[slot] is one else "share"


def _layers(running: list[ExperimentRecord], secret: bytes) -> tuple[_Layer, ...]:
    by_layer: dict[str, list[ExperimentRecord]] = {}
    for record in running:
        by_layer.setdefault(record.spec.layer, []).append(record)
    layers = []
    for name, records in sorted(by_layer.items()):
        table: list[_ReadyExperiment | None] = [None] * NUM_SLOTS
        in_layer = [_ready(record, secret) for record in records]
        for record, ready in zip(records, in_layer, strict=True):
            _fill(table, record.slots, ready)
        layers.append(
            _Layer(
                unit=records[0].spec.unit,
                hash=UnitHash(secret, "layer", name),
                experiments=tuple(table),
                running=tuple(in_layer),
            )
        )
    return tuple(layers)


def _ready(record: ExperimentRecord, secret: bytes) -> _ReadyExperiment:
    control = _ready_arm(record, record.control)
    idle = _ReadyArm(by_bucket=(_uncounted(record),) * NUM_UNIT_BUCKETS)
    table: list[_ReadyArm | None] = [None] * NUM_SLOTS
    live = set(record.live_arms)
    for arm, ranges in record.current.arm_slots.items():
        _fill(table, ranges, _ready_arm(record, arm) if arm in live else idle)
    return _ReadyExperiment(
        name=record.name,
        version=record.version,
        eligibility=Eligibility.of(record.spec),
        hash=UnitHash(secret, "arm", record.spec.salt or record.name),
        arms=tuple(control if arm is None else arm for arm in table),
    )


def _fill(table: list[_Item | None], ranges: Ranges, item: _Item) -> None:
    for start, end in ranges:
        table[start:end] = [item] * (end - start)


def _ready_arm(record: ExperimentRecord, arm: str) -> _ReadyArm:
    overlay = record.spec.overlay(arm)
    label = _label(record, arm)
    return _ReadyArm(
        by_bucket=tuple(
            Assignment(
                arms=(
                    ArmRef(
                        experiment=record.name,
                        version=record.version,
                        arm=arm,
                        unit_bucket=bucket,
                    ),
                ),
                overlay=overlay,
                label=label,
            )
            for bucket in range(NUM_UNIT_BUCKETS)
        )
    )


def _uncounted(record: ExperimentRecord) -> Assignment | None:
    """Return the assignment of a stopped arm's units: the control's settings, not counted."""
    overlay = record.spec.overlay(record.control)
    return Assignment(arms=(), overlay=overlay) if overlay.fields else None


def _forced(record: ExperimentRecord, arm: str) -> Assignment:
    ref = ArmRef(experiment=record.name, version=record.version, arm=arm)
    return Assignment(
        arms=(ref,),
        overlay=record.spec.overlay(arm),
        label=f"forced:{_label(record, arm)}",
        is_forced=True,
    )


def _label(record: ExperimentRecord, arm: str) -> str:
    return f"{record.name}:{record.version}/{arm}"
