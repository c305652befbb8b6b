"""The changes of an experiment's state: records in, records out.

Every function raises ConflictError where the experiment is not in a state for it, or where another
running one conflicts with it. `others` are all other experiments, `now_s` seconds since 1970.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from outrider.gateway.contract.errors.tree import BadRequestError, ConflictError
from outrider.gateway.experiments.records import (
    ExperimentRecord,
    ExperimentSource,
    StoppedArm,
    VersionRecord,
)
from outrider.gateway.experiments.slots import (
    NUM_SLOTS,
    NoRoomError,
    Ranges,
    count_of,
    dealt,
    resized,
)
from outrider.gateway.settings.arm_overlay import contradictions
from outrider.gateway.settings.experiments import ExperimentSpec

Others = Iterable[ExperimentRecord]

_MAX_REASON_CHARS: Final = 500


def created(
    name: str,
    spec: ExperimentSpec,
    *,
    share: float,
    now_s: float,
    first_version: int = 1,
    source: ExperimentSource = "admin",
) -> ExperimentRecord:
    """Return a new experiment, which does not run yet."""
    version = VersionRecord(
        number=first_version,
        spec=spec,
        arm_slots=dealt(_weights(spec), {}),
        created_at=now_s,
    )
    return ExperimentRecord(
        name=name, state="draft", share=share, current=version, source=source, created_at=now_s
    )


def started(record: ExperimentRecord, others: Others, now_s: float) -> ExperimentRecord:
    """Return the experiment, running, for the first time or again. Stopped arms stay stopped."""
    if record.is_running:
        return record
    slots = _room(record, record.share, others)
    current = replace(
        record.current, started_at=record.current.started_at or now_s, stopped_at=None
    )
    return replace(record, state="running", slots=slots, current=current)


def stopped(record: ExperimentRecord, now_s: float) -> ExperimentRecord:
    """Return the experiment without units; its slots are free for others of its layer."""
    if not record.is_running:
        return record
    current = replace(record.current, stopped_at=now_s)
    return replace(record, state="stopped", slots=(), current=current)


def ramped(record: ExperimentRecord, share: float, others: Others) -> ExperimentRecord:
    """Change the share of the units that take part; when it grows, no unit leaves."""
    slots = _room(record, share, others) if record.is_running else ()
    return replace(record, share=share, slots=slots)


def edited(
    record: ExperimentRecord, spec: ExperimentSpec, others: Others, now_s: float
) -> ExperimentRecord:
    """Return the experiment with another spec: a new version, if this one has ever run.

    As few units as possible change their arm. Descriptions and guardrails change in place: the
    data of before and after may be counted together.
    """
    old = record.current
    if _measured_alike(old.spec) == _measured_alike(spec):
        return replace(record, current=replace(old, spec=spec))
    is_redealt = old.spec.salt != spec.salt
    current = VersionRecord(
        number=old.number if old.started_at is None else old.number + 1,
        spec=spec,
        arm_slots=dealt(_weights(spec), {} if is_redealt else old.arm_slots),
        created_at=now_s,
        started_at=now_s if record.is_running else None,
    )
    renewed = replace(record, current=current)
    if record.is_running:
        is_moved = old.spec.layer != spec.layer
        slots = _room(
            replace(renewed, slots=() if is_moved else record.slots), record.share, others
        )
        return replace(renewed, slots=slots)
    return renewed


def arm_stopped(
    record: ExperimentRecord, version: int, arm: str, reason: str, now_s: float
) -> ExperimentRecord:
    """Return the experiment without an arm; its units get the control's settings, uncounted.

    Without its control, or with its control alone, it is stopped. The same experiment is returned
    where the version is not the newest one any more, or the arm was stopped before.
    """
    current = record.current
    is_known = arm in current.spec.arms and arm not in current.stopped_arms
    if version != current.number or not is_known:
        return record
    stop = StoppedArm(reason=reason[:_MAX_REASON_CHARS], at=now_s)
    stopped_arms = {**current.stopped_arms, arm: stop}
    without = replace(record, current=replace(current, stopped_arms=stopped_arms))
    if arm == record.control or without.live_arms == (record.control,):
        return stopped(without, now_s) if record.is_running else without
    return without


def reweighted(
    record: ExperimentRecord, version: int, weights: Mapping[str, float]
) -> ExperimentRecord:
    """Return the same version with other weights for the arms that are not stopped.

    Stopped arms keep their slots, so that their units are counted in no arm. The same experiment is
    returned where the version is not the newest one any more, or does not run.
    """
    current = record.current
    if version != current.number or not record.is_running:
        return record
    if set(weights) != set(record.live_arms) or min(weights.values()) <= 0:
        raise BadRequestError(
            f"Weights are wanted for {', '.join(record.live_arms)}, all above 0.", param="weights"
        )
    before = current.weights
    room = sum(before[arm] for arm in weights)
    total = sum(weights.values())
    wanted = before | {arm: weight / total * room for arm, weight in weights.items()}
    return replace(record, current=replace(current, arm_slots=dealt(wanted, current.arm_slots)))


def _weights(spec: ExperimentSpec) -> dict[str, float]:
    return {name: arm.weight for name, arm in spec.arms.items()}


def _measured_alike(spec: ExperimentSpec) -> str:
    """Return the parts of a spec that, if equal in two, let them be counted together."""
    return spec.model_copy(
        update={"description": "", "guardrails": type(spec.guardrails)()}
    ).model_dump_json()


def _room(record: ExperimentRecord, share: float, others: Others) -> Ranges:
    """Return the slots of its layer for this share. Raises ConflictError."""
    running = [other for other in others if other.is_running and other.name != record.name]
    beside = [other for other in running if other.spec.layer == record.spec.layer]
    for other in beside:
        if other.spec.unit != record.spec.unit:
            raise ConflictError(
                f"The experiment {other.name!r} of the same layer {other.spec.layer!r} assigns by "
                f"{other.spec.unit} and this one by {record.spec.unit}, so they could not exclude "
                "each other. Use the same unit, or another layer.",
                param="unit",
            )
    _check_crossing(record, running)
    try:
        return resized(record.slots, count_of(share), [other.slots for other in beside])
    except NoRoomError as error:
        names = ", ".join(repr(other.name) for other in beside)
        raise ConflictError(
            f"A share of {share:g} is wanted, and {error.free / NUM_SLOTS:g} of the layer "
            f"{record.spec.layer!r} is free beside {names}. Take less, stop one of them, or use "
            "another layer.",
            param="share",
        ) from None


def _check_crossing(record: ExperimentRecord, running: Others) -> None:
    """Raise ConflictError where two layers could set the same field of a request."""
    for other in running:
        if other.spec.layer == record.spec.layer:
            continue
        clash = contradictions(record.spec.sets, other.spec.sets)
        if clash:
            raise ConflictError(
                f"The experiment {other.name!r} of the layer {other.spec.layer!r} runs and sets "
                f"{', '.join(sorted(clash))} too. Stop it, or put both into one layer.",
                param="layer",
            )
