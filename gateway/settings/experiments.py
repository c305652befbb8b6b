"""Settings of experiments, with the same names in outrider.toml and at /admin/experiments."""

import math
from typing import Annotated, Final, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from outrider.gateway.contract.schema.common import WHOLE, RequestModel, SloOptions
from outrider.gateway.settings.arm_overlay import ArmOverlay, Overlay, contradictions
from outrider.gateway.settings.experiment_rules import AllocationKind
from outrider.gateway.settings.sections import Share

UnitKind = Literal["user", "key", "conversation", "request"]
ExperimentState = Literal["draft", "running", "stopped"]
ExperimentMetric = Literal["attainment", "ttft", "tpot", "e2e", "cost", "feedback"]

MAX_ARMS: Final = 16
CONTROL: Final = "control"
_SHARES_SUM_TOLERANCE: Final = 0.005
_NAME: Final = r"^[a-z0-9][a-z0-9-]*$"
_ONE_LINE: Final = r"^[^\x00-\x1f\x7f]*$"
_SECRET_HEADERS: Final = frozenset(
    {"authorization", "x-api-key", "api-key", "cookie", "proxy-authorization"}
)

ExperimentName = Annotated[str, Field(min_length=1, max_length=24, pattern=_NAME)]
ArmName = Annotated[str, Field(min_length=1, max_length=16, pattern=_NAME)]
_Words = Annotated[str, Field(min_length=1, max_length=256, pattern=_ONE_LINE)]
_Names = Annotated[list[_Words], Field(min_length=1, max_length=256)]
_Header = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-z0-9][a-z0-9_-]*$")]
_Alpha = Annotated[float, Field(ge=1e-6, le=0.5)]


class ArmSpec(RequestModel):
    """An arm: its weight and the settings that it applies to its requests."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share of the units, relative to the other arms. Weights below 1 are shares and must add up to
    1."""
    set: ArmOverlay = Field(default_factory=ArmOverlay)
    """Settings as in a request's `outrider` object, and service_tier. A setting in the request
    wins."""


class Eligible(RequestModel):
    """Requests that take part; unset: all."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    keys: _Names | None = None
    """Ids of keys."""
    teams: _Names | None = None
    """Ids of teams."""
    models: _Names | None = None
    """Model names in requests, such as auto."""
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
    """Required request headers, by lower-case name; the value * accepts any value."""

    @model_validator(mode="after")
    def _no_secrets(self) -> Self:
        for name in _SECRET_HEADERS & self.headers.keys():
            raise ValueError(f"headers.{name} holds a secret; name the key's id in keys")
        return self


class GuardrailSpec(RequestModel):
    """Limits that stop an arm automatically when it provably exceeds one."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    p95_ttft_ms: Annotated[float, Field(ge=0.01, le=3_600_000)] | None = None
    """Largest 95th percentile of the time to the first token."""
    error_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Largest share of failed requests, among those that the client did not cancel."""
    cost_per_request_usd: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Largest mean cost of a request."""
    alpha: _Alpha = 0.05
    """Probability that an arm is stopped although none exceeds its limits."""


class AllocationSpec(RequestModel):
    """Change of weights while the experiment runs, based on attainment; fixed: none."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    kind: AllocationKind = "fixed"
    """fixed, thompson (more units for arms that may be the best) or track_and_stop (the earliest
    decision)."""
    min_share: Annotated[float, Field(ge=0.01, le=0.5)] = 0.05
    """Smallest share of the traffic for each arm."""
    every_s: Annotated[float, Field(ge=1, le=86_400)] = 30.0
    """Interval between two changes of the weights."""
    min_requests: Annotated[int, Field(ge=1, le=1_000_000), WHOLE] = 50
    """Requests of each arm before its weight may change."""


class ExperimentSpec(RequestModel):
    """An A/B experiment: arms that differ in settings, and the assignment of units to them."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    description: Annotated[str, Field(max_length=1024)] = ""
    """The question behind the experiment, as free text."""
    unit: UnitKind = "user"
    """Unit of assignment: user (the request's safety_identifier or user, within its team or key),
    key, conversation (its first messages and its key) or request."""
    layer: ExperimentName = "default"
    """Experiments in the same layer share no units; experiments in different layers overlap."""
    salt: Annotated[str, Field(max_length=64)] = ""
    """Seed of the assignment; a new salt reassigns all units. Empty: the experiment's name."""
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
    """Arm that the others are compared with; unset: the arm called control, else the first."""
    eligible: Eligible = Field(default_factory=Eligible)
    """Requests that take part."""
    slo: SloOptions | None = None
    """Latency objectives of all arms, for requests that set none."""
    metric: ExperimentMetric = "attainment"
    """The metric that decides."""
    alpha: _Alpha = 0.05
    """Probability of a false decision when arms do not differ, however often results are
    checked."""
    min_effect: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Smallest difference from the control that matters, in the metric's unit."""
    feedback_name: Annotated[str, Field(max_length=64)] = ""
    """Name of the feedback that the metric `feedback` uses."""
    guardrails: GuardrailSpec = Field(default_factory=GuardrailSpec)
    """Limits that stop an arm."""
    allocation: AllocationSpec = Field(default_factory=AllocationSpec)
    """Automatic change of weights."""

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
        """Return an arm's settings over the objectives that all arms share."""
        own = Overlay.of_model(self.arms[arm].set)
        if self.slo is None:
            return own
        return own.over(Overlay.of_model(ArmOverlay.model_validate({"slo": self.slo})))

    @property
    def about(self) -> frozenset[str]:
        """Settings that at least one arm sets: those in which arms may differ."""
        fields = (Overlay.of_model(arm.set).fields for arm in self.arms.values())
        return frozenset[str]().union(*fields)

    @property
    def sets(self) -> frozenset[str]:
        """Settings in `about`, and those that all arms share."""
        return self.about if self.slo is None else self.about | {"slo"}


class ExperimentSettings(ExperimentSpec):
    """An A/B experiment: arms that differ in settings, and the assignment of units to them."""

    model_config = ConfigDict(strict=False)

    share: Share = 1.0
    """Share of the units that take part; raising it keeps the units that take part already."""
    state: ExperimentState = "draft"
    """draft, running or stopped. Applied when this setting changes; until then, changes by
    `outrider experiment` and /admin/experiments hold."""

    def spec(self) -> ExperimentSpec:
        """Return the experiment without `share` and `state`."""
        fields = ExperimentSpec.model_fields
        return ExperimentSpec.model_construct(**{name: getattr(self, name) for name in fields})


def _check_weights(weights: dict[str, float]) -> None:
    """Raise ValueError for weights that are shares and do not add up to 1."""
    total = math.fsum(weights.values())
    if max(weights.values()) < 1 and abs(total - 1) > _SHARES_SUM_TOLERANCE:
        listed = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
        raise ValueError(
            f"the arms' weights ({listed}) are shares that add up to {total:g}, not to 1; for "
            "relative weights use numbers of at least 1, such as 1 and 1"
        )
    for name, weight in weights.items():
        if weight / total < 1e-3:
            raise ValueError(f"arms.{name}.weight = {weight:g} is less than 0.1 % of all weights")
