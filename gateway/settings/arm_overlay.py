"""Settings of an arm: options that a request may carry, applied where the request sets none."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError, create_model, model_validator

from outrider.gateway.contract.schema.common import (
    GenerationFields,
    OutriderOptions,
    RequestModel,
    ServiceTierName,
)
from outrider.gateway.settings.paths import did_you_mean

OPTION_FIELDS: Final = (
    "speculation",
    "max_draft_nodes",
    "max_draft_depth",
    "sources",
    "quality",
    "tier",
    "prefer",
    "min_quality",
    "threshold",
    "hold_back_tokens",
    "hold_back_ms",
    "policy",
    "slo",
)
"""Fields of OutriderOptions that an arm may set; the others are promises to the client."""
MODEL: Final = "model"
MODELS: Final = "models"
SERVICE_TIER: Final = "service_tier"
SAMPLING_FIELDS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
REQUEST_FIELDS: Final = (MODEL, SERVICE_TIER, *SAMPLING_FIELDS)
"""Fields beside the `outrider` object that an arm may set."""
OVERLAY_FIELDS: Final = (*OPTION_FIELDS, *REQUEST_FIELDS)

_CHOICE: Final = frozenset({MODEL, MODELS, "tier", "min_quality", "threshold"})
"""Settings that exclude each other: a model or a fixed tier leaves nothing to choose, and there is
one quality target."""
_GROUPS: Final = (
    frozenset({"speculation", "max_draft_nodes", "max_draft_depth", "sources"}),
    _CHOICE | {"prefer", "policy", "hold_back_tokens", "hold_back_ms"},
)


class _SettingsBase(RequestModel):
    """Settings that an arm may set, with the names and bounds that they have in requests."""

    @model_validator(mode="before")
    @classmethod
    def _are_settings(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            for name in value:
                if name not in OVERLAY_FIELDS:
                    raise ValueError(_not_a_setting(str(name)))
        return value


_FIELDS: Final[dict[str, Any]] = {
    name: (info.annotation, info) for name, info in OutriderOptions.model_fields.items()
}
_OF_REQUESTS: Final[dict[str, Any]] = {
    name: (info.annotation, info)
    for name, info in GenerationFields.model_fields.items()
    if name in REQUEST_FIELDS and name != MODEL
}
_NAME: Final = GenerationFields.model_fields[MODEL].rebuild_annotation()

if TYPE_CHECKING:
    ArmOverlay = _SettingsBase
else:
    ArmOverlay = create_model(
        "ArmOverlay",
        __base__=_SettingsBase,
        __doc__=_SettingsBase.__doc__,
        **{name: _FIELDS[name] for name in OPTION_FIELDS},
        **{MODEL: (_NAME | None, None)},
        **_OF_REQUESTS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """The settings of an arm. `request`: fields beside the `outrider` object, by name."""

    options: OutriderOptions = field(default_factory=OutriderOptions)
    request: Mapping[str, Any] = field(default_factory=dict)
    fields: frozenset[str] = field(init=False)
    """Names of the settings that are set."""
    _values: tuple[tuple[str, Any], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Collect the settings that are set."""
        pairs = ((name, getattr(self.options, name)) for name in OPTION_FIELDS)
        values = tuple(pair for pair in pairs if pair[1] is not None)
        names = {name for name, _ in values} | self.request.keys()
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "fields", frozenset(names))

    @property
    def model(self) -> str | None:
        """The model that stands in place of the one that requests name."""
        return self.request.get(MODEL)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling fields, for requests that leave them out."""
        return {name: value for name, value in self.request.items() if name in SAMPLING_FIELDS}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Overlay":
        """Parse an overlay. Raises ValueError for an unknown setting."""
        try:
            parsed = ArmOverlay.model_validate(document)
        except ValidationError as error:
            details = error.errors(include_url=False, include_input=False)
            # A union complains once a branch; the branch that got deepest is the one meant.
            detail = max(details, key=lambda one: len(one["loc"]))
            where = ".".join(str(part) for part in detail["loc"])
            what = detail["msg"].removeprefix("Value error, ")
            raise ValueError(f"{where}: {what}" if where else what) from None
        return cls.of_model(parsed)

    @classmethod
    def of_model(cls, parsed: RequestModel) -> "Overlay":
        """Build an overlay from a parsed ArmOverlay."""
        given: dict[str, Any] = {
            name: value for name in OVERLAY_FIELDS if (value := getattr(parsed, name)) is not None
        }
        request: dict[str, Any] = {
            name: given.pop(name) for name in REQUEST_FIELDS if name in given
        }
        return cls(options=OutriderOptions.model_construct(**given), request=request)

    def merge(self, own: OutriderOptions | None) -> OutriderOptions | None:
        """Return the request's options with unset ones filled in from this overlay."""
        if not self._values:
            return own
        if own is None:
            return self.options
        left_open = {name: value for name, value in self._values if getattr(own, name) is None}
        return own.model_copy(update=left_open) if left_open else own

    def merge_service_tier(self, own: ServiceTierName | None) -> ServiceTierName | None:
        """Return the request's service tier, or this overlay's if the request sets none."""
        return self.request.get(SERVICE_TIER) if own is None else own

    def over(self, below: "Overlay") -> "Overlay":
        """Return both overlays merged; where both set an option, this one wins."""
        return Overlay(
            options=self.merge(None if not below.fields else self._filled(below)) or below.options,
            request={**below.request, **self.request},
        )

    def _filled(self, below: "Overlay") -> OutriderOptions:
        update = dict.fromkeys(self.fields - self.request.keys())
        return below.options.model_copy(update=update)

    def document(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        document: dict[str, Any] = self.options.model_dump(
            mode="json", exclude_none=True, by_alias=True
        )
        return document | dict(self.request)


NO_OVERLAY: Final = Overlay()


def related_fields(fields: Iterable[str]) -> frozenset[str]:
    """Return these settings and those that contradict them.

    A request that sets one of them itself takes no part in the experiment.
    """
    names = frozenset(fields)
    groups = (group for group in _GROUPS if names & group)
    return names.union(*groups)


def contradictions(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    """Return the settings of two overlays that contradict each other; may be empty."""
    both, choice = first & second, (first | second) & _CHOICE
    return both | (choice if len(choice) > 1 else frozenset())


def _not_a_setting(name: str) -> str:
    if name in OutriderOptions.model_fields:
        return f"{name} is for the request alone to set, and not for an arm"
    return f"{name} is not a setting that an arm can set{did_you_mean(name, OVERLAY_FIELDS)}"
