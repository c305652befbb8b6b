"""Settings of experiments: the same words in outrider.toml and at /admin/experiments."""

import math
from typing import Annotated, Final, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from gateway.schema.common import WHOLE, RequestModel, SloOptions
from gateway.settings.arm_overlay import ArmOverlay, Overlay, contradictions
from gateway.settings.experiment_rules import AllocationKind
from gateway.settings.sections import Share

UnitKind = Literal["user", "key", "conversation", "request"]
ExperimentState = Literal["draft", "running", "stopped"]
ExperimentMetric = Literal["attainment", "ttft", "tpot", "e2e", "cost", "feedback"]

MAX_ARMS: Final = 16
CONTROL: Final = "control"
_SHARES_SUM_TOLERANCE: Final = 0.005
_NAME: Final = r"^[a-z0-9][a-z0-9-]*$"
_ONE_LINE: Final = r"^[^\x00-\x1f\x7f]*$"
_SECRET_HEADERS: Final = frozenset({"authorization", "x-api-key", "cookie", "proxy-authorization"})

ExperimentName = Annotated[str, Field(min_length=1, max_length=24, pattern=_NAME)]
ArmName = Annotated[str, Field(min_length=1, max_length=16, pattern=_NAME)]
_Words = Annotated[str, Field(min_length=1, max_length=256, pattern=_ONE_LINE)]
_Names = Annotated[list[_Words], Field(min_length=1, max_length=256)]
_Header = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-z0-9][a-z0-9_-]*$")]
_Alpha = Annotated[float, Field(ge=1e-6, le=0.5)]


class ArmSpec(RequestModel):
    """An arm: its weight, and the settings that it gives to its requests."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Its share of the units, relative to the other arms. Weights below 1 are shares: they must
    add up to 1."""
    set: ArmOverlay = Field(default_factory=ArmOverlay)
    """Settings as in a request's `outrider` object, and service_tier. What a request sets itself
    stays."""


class Eligible(RequestModel):
    """Requests that take part; unset: all."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    keys: _Names | None = None
    """Ids of keys."""
    teams: _Names | None = None
    """Ids of teams."""
    models: _Names | None = None
    """Names that requests ask for, such as auto."""
    endpoints: _Names | None = None
    """Endpoints, such as chat, completions, responses or messages."""
    headers: Annotated[
        dict[_Header, _Words],
        Field(
            max_length=16,
            # pydantic says patternProperties, which would let other names pass.
            json_schema_extra={
                "propertyNames": {
                    "pattern": r"^[a-z0-9][a-z0-9_-]*$",
                    "maxLength": 64,
                    "not": {"enum": sorted(_SECRET_HEADERS)},
                }
            },
        ),
    ] = Field(default_factory=dict)
    """Headers that a request must have, by names in lower case; * is any value."""

    @model_validator(mode="after")
    def _no_secrets(self) -> Self:
        for name in _SECRET_HEADERS & self.headers.keys():
            raise ValueError(f"headers.{name} holds a secret; name the key's id in keys")
        return self


class GuardrailSpec(RequestModel):
    """Limits that stop an arm by themselves as soon as it surely exceeds one."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    p95_ttft_ms: Annotated[float, Field(ge=0.01, le=3_600_000)] | None = None
    """Largest 95th percentile of the time to the first token."""
    error_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Largest share of failed requests, among those that the client did not cancel."""
    cost_per_request_usd: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Largest mean cost of a request."""
    alpha: _Alpha = 0.05
    """The probability that an arm is stopped though none exceeds its limits."""


class AllocationSpec(RequestModel):
    """How weights change while it runs, on attainment; fixed: not at all."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    kind: AllocationKind = "fixed"
    """fixed, thompson (more units for arms that may be the best) or track_and_stop (the soonest
    decision)."""
    min_share: Annotated[float, Field(ge=0.01, le=0.5)] = 0.05
    """Smallest share of the traffic for each arm."""
    every_s: Annotated[float, Field(ge=1, le=86_400)] = 30.0
    """Interval between two changes of the weights."""
    min_requests: Annotated[int, Field(ge=1, le=1_000_000), WHOLE] = 50
    """Requests of each arm before its weight may change."""


class ExperimentSpec(RequestModel):
    """An A/B experiment: arms that differ in settings, and how units are assigned to them."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    description: Annotated[str, Field(max_length=1024)] = ""
    """The question behind the experiment, for people."""
    unit: UnitKind = "user"
    """What stays in its arm: user (the request's safety_identifier or user, within its team or
    key), key, conversation (how it began, and its key) or request."""
    layer: ExperimentName = "default"
    """Experiments of one layer have no unit in common; those of different layers cross."""
    salt: Annotated[str, Field(max_length=64)] = ""
    """A new salt reassigns all units to arms; empty: the experiment's name."""
    arms: Annotated[
        dict[ArmName, ArmSpec],
        Field(
            min_length=2,
            max_length=MAX_ARMS,
            json_schema_extra={"propertyNames": {"pattern": _NAME, "maxLength": 16}},
        ),
    ]
    """The arms, by name."""
    control: ArmName | None = None
    """The arm that the others are compared with; unset: the one called control, else the first."""
    eligible: Eligible = Field(default_factory=Eligible)
    """Requests that take part."""
    slo: SloOptions | None = None
    """Objectives of all arms, for requests that name none."""
    metric: ExperimentMetric = "attainment"
    """The metric that decides."""
    alpha: _Alpha = 0.05
    """The probability of a decision where there is no difference, however often one looks."""
    min_effect: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """A difference from the control that is too small to matter, in the metric's unit."""
    feedback_name: Annotated[str, Field(max_length=64)] = ""
    """The name of the feedback that the metric feedback is about."""
    guardrails: GuardrailSpec = Field(default_factory=GuardrailSpec)
    """Limits that stop an arm."""
    allocation: AllocationSpec = Field(default_factory=AllocationSpec)
    """Whether weights change by themselves."""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if len(self.arms) < 2:
            raise ValueError(f"an experiment needs at least two arms, not {len(self.arms)}")
        if self.control is not None and self.control not in self.arms:
            raise ValueError(f"control = {self.control!r} is not an arm; available: {self._names}")
        if self.allocation.min_share * len(self.arms) > 1 + 1e-9:
            raise ValueError(
                f"allocation.min_share = {self.allocation.min_share:g} is too much for "
                f"{len(self.arms)} arms; use at most {1 / len(self.arms):.3g}"
            )
        _check_weights({name: arm.weight for name, arm in self.arms.items()})
        for name in self.arms:
            fields = self.overlay(name).fields
            if clash := contradictions(fields, frozenset()):
                raise ValueError(
                    f"arms.{name} sets {' and '.join(sorted(clash))}, which exclude each other; "
                    "set one of them"
                )
        return self

    @property
    def _names(self) -> str:
        return ", ".join(self.arms)

    @property
    def control_arm(self) -> str:
        """The arm that the others are compared with."""
        if self.control is not None:
            return self.control
        return CONTROL if CONTROL in self.arms else next(iter(self.arms))

    def overlay(self, arm: str) -> Overlay:
        """What an arm sets, with the objectives of all arms below it."""
        own = Overlay.of_model(self.arms[arm].set)
        if self.slo is None:
            return own
        return own.over(Overlay.of_model(ArmOverlay.model_validate({"slo": self.slo})))

    @property
    def about(self) -> frozenset[str]:
        """The settings in which arms differ or may differ: all that any of them sets."""
        fields = (Overlay.of_model(arm.set).fields for arm in self.arms.values())
        return frozenset[str]().union(*fields)

    @property
    def sets(self) -> frozenset[str]:
        """The same, and what all arms set."""
        return self.about if self.slo is None else self.about | {"slo"}


class ExperimentSettings(ExperimentSpec):
    """An A/B experiment: arms that differ in settings, and how units are assigned to them."""

    model_config = ConfigDict(strict=False)

    share: Share = 1.0
    """Share of the units that take part; units that take part still do when it grows."""
    state: ExperimentState = "draft"
    """draft, running or stopped. Applied when it changes here; what `outrider experiment` and
    /admin/experiments do meanwhile holds until then."""

    def spec(self) -> ExperimentSpec:
        """The experiment itself."""
        fields = ExperimentSpec.model_fields
        return ExperimentSpec.model_construct(**{name: getattr(self, name) for name in fields})


def _check_weights(weights: dict[str, float]) -> None:
    """Raise ValueError for weights that are shares and do not add up to 1."""
    total = math.fsum(weights.values())
    if max(weights.values()) < 1 and abs(total - 1) > _SHARES_SUM_TOLERANCE:
        listed = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
        raise ValueError(
            f"the arms' weights ({listed}) are shares that add up to {total:g}, not to 1; write "
            "parts such as 1 and 1 instead if that is meant"
        )
    for name, weight in weights.items():
        if weight / total < 1e-3:
            raise ValueError(f"arms.{name}.weight = {weight:g} is less than 0.1 % of all weights")
