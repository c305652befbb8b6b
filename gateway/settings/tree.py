"""All settings in one frozen tree: flags over environment over outrider.toml over defaults."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as SourceError

from outrider.gateway.contract.schema.kinds import ReasoningField
from outrider.gateway.settings import paths as settings_paths
from outrider.gateway.settings.adapters import AdapterSettings, adapter_complaints
from outrider.gateway.settings.alerts import AlertSettings, alert_complaints
from outrider.gateway.settings.aliases import AliasSettings, alias_complaints
from outrider.gateway.settings.batches import BatchSettings, batch_complaints
from outrider.gateway.settings.caching import CacheSettings, cache_complaints
from outrider.gateway.settings.checks import CheckSettings, check_complaints
from outrider.gateway.settings.errors import SettingsError as SettingsError
from outrider.gateway.settings.experiments import ExperimentName, ExperimentSettings
from outrider.gateway.settings.fleet import FleetSettings
from outrider.gateway.settings.http_bounds import HttpSettings
from outrider.gateway.settings.keys import KeySettings
from outrider.gateway.settings.kv_events import kv_event_complaints
from outrider.gateway.settings.kv_folder import kv_folder_complaints
from outrider.gateway.settings.ledger import LedgerSettings
from outrider.gateway.settings.on_demand import OnDemandPoolSettings, OnDemandSettings
from outrider.gateway.settings.passed import UpstreamPriceSettings
from outrider.gateway.settings.paths import did_you_mean, filled_in
from outrider.gateway.settings.receipts import ReceiptSettings
from outrider.gateway.settings.responses import ResponseSettings, response_complaints
from outrider.gateway.settings.retention import RetentionSettings, shortened
from outrider.gateway.settings.revisions import forget_revisions, revision_complaints
from outrider.gateway.settings.routing import RoutingSettings
from outrider.gateway.settings.sections import NONE as NONE
from outrider.gateway.settings.sections import (
    EngineSettings,
    LimitSettings,
    ModelSettings,
    ServerSettings,
)
from outrider.gateway.settings.sections import SpeculationSettings as SpeculationSettings
from outrider.gateway.settings.sections import bundled_pair as bundled_pair
from outrider.gateway.settings.sections import is_missing_folder as is_missing_folder
from outrider.gateway.settings.sign_in import SignInSettings
from outrider.gateway.settings.slo import SloSettings
from outrider.gateway.settings.sources import (
    ENV_PREFIX,
    SettingsSource,
    file_source,
    flag_source,
    merge,
    origin,
)
from outrider.gateway.settings.telemetry import TelemetrySettings
from outrider.gateway.settings.tiers import (
    Complaint,
    HandoffSettings,
    MirrorSettings,
    UpstreamSettings,
    tier_complaints,
)
from outrider.gateway.settings.toml_text import to_toml as to_toml
from outrider.gateway.settings.workers import worker_complaints

CONFIG_VARIABLE = "OUTRIDER_CONFIG"
DEFAULT_FILE = "outrider.toml"
KEY_VARIABLE = "OUTRIDER_API_KEY"
OTHER_VARIABLES = frozenset(
    {
        CONFIG_VARIABLE,
        KEY_VARIABLE,
        "OUTRIDER_URL",
        "OUTRIDER_DATA",
        "OUTRIDER_CPU",
        "OUTRIDER_KERNELS",
        "OUTRIDER_COMMIT",
    }
)
"""Variables with our prefix that are not settings of the server."""

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


_COMPLAINTS: Final = "settings_conflict"
_MAPPINGS: Final = frozenset({"headers", "defaults"})
"""Settings that are tables with names that users choose; a variable holds them as JSON."""


class Settings(BaseSettings):
    """All settings. Made by `load_settings`; reads no file or variable itself."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
    )

    server: ServerSettings = Field(default_factory=ServerSettings)
    models: ModelSettings = Field(default_factory=ModelSettings)
    adapters: AdapterSettings = Field(default_factory=AdapterSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    fleet: FleetSettings = Field(default_factory=FleetSettings)
    speculation: SpeculationSettings = Field(default_factory=SpeculationSettings)
    routing: RoutingSettings = Field(default_factory=RoutingSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    keys: KeySettings = Field(default_factory=KeySettings)
    sign_in: SignInSettings = Field(default_factory=SignInSettings)
    ledger: LedgerSettings = Field(default_factory=LedgerSettings)
    charges: dict[str, UpstreamPriceSettings] = Field(default_factory=dict)
    """Prices that clients pay, by tier, in USD per million tokens; unset tiers: what their tokens
    cost us."""
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
    slo: SloSettings = Field(default_factory=SloSettings)
    experiments: dict[ExperimentName, ExperimentSettings] = Field(default_factory=dict)
    """Experiments by name, in addition to those made with /admin/experiments."""
    log_level: LogLevel = "INFO"
    """Least severe level that is logged."""
    database_url: str | None = None
    """Database of keys and the ledger: sqlite:///FILE, postgresql://USER:PASSWORD@HOST/NAME, or
    "none"; unset: outrider.db in the user's state folder."""
    redis_url: str | None = None
    """Redis for the counters of limits that several gateways share; unset: this process's
    memory."""
    isolate_tenants: bool = True
    """Let only the same tenant's requests reuse a tenant's prompts in the prefix cache."""
    allow_private_upstreams: bool = True
    """Allow private addresses, including this machine's, for the servers of upstream tiers."""
    unknown_fields: Literal["refuse", "ignore"] = "ignore"
    """Request fields that a model does not know: refuse them with a 400, or ignore them and name
    them in the header x-outrider-ignored-fields. The local models always ignore verbosity.
    Tiers may set their own."""
    reasoning_field: ReasoningField = "reasoning_content"
    """Field of a chat's answer that has a local model's thinking: reasoning_content, reasoning as
    in newer versions of vLLM and at OpenRouter, or both."""
    tiers: dict[str, UpstreamSettings] = Field(default_factory=dict)
    """Upstream tiers, by the name that requests use as model."""
    on_demand: OnDemandPoolSettings = Field(default_factory=OnDemandPoolSettings)
    aliases: dict[str, AliasSettings] = Field(default_factory=dict)
    """Further names that requests use as model, each for a model or a chain of models."""
    checks: dict[str, CheckSettings] = Field(default_factory=dict)
    """Checks of requests and answers, by name, in the order in which they are made."""
    cache: CacheSettings = Field(default_factory=CacheSettings)
    responses: ResponseSettings = Field(default_factory=ResponseSettings)
    batches: BatchSettings = Field(default_factory=BatchSettings)
    receipts: ReceiptSettings = Field(default_factory=ReceiptSettings)
    alerts: AlertSettings = Field(default_factory=AlertSettings)
    retention: RetentionSettings = Field(default_factory=RetentionSettings)
    handoff: HandoffSettings = Field(default_factory=HandoffSettings)
    mirror: MirrorSettings = Field(default_factory=MirrorSettings)

    @model_validator(mode="after")
    def _has_room_for_a_body(self) -> Self:
        http, largest = self.http, self.limits.max_body_bytes
        if not largest <= http.max_bytes_in_flight_per_key <= http.max_bytes_in_flight:
            raise ValueError(
                f"limits.max_body_bytes={largest}, http.max_bytes_in_flight_per_key="
                f"{http.max_bytes_in_flight_per_key} and http.max_bytes_in_flight="
                f"{http.max_bytes_in_flight} must not decrease in this order: a body that is "
                "allowed must fit into a key's share, and that into the whole"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        complaints = [
            *tier_complaints(self.models, self.tiers, self.handoff, self.mirror),
            *revision_complaints(self.models, self.tiers),
            *alias_complaints(self.aliases, self.models, self.tiers),
            *cache_complaints(self.cache, self.tiers, has_redis=self.redis_url is not None),
            *response_complaints(self.responses, self.server, has_redis=self.redis_url is not None),
            *batch_complaints(self.batches, self.database_url),
            *check_complaints(self.checks),
            *adapter_complaints(self.adapters, self.models, (*self.tiers, *self.aliases)),
            *alert_complaints(self.alerts),
            *kv_event_complaints(self.engine),
            *kv_folder_complaints(self.engine),
            *worker_complaints(self.server, self.models, self.engine, self.database_url),
        ]
        if complaints:
            text = "\n".join(f"{'.'.join(path)}: {what}" for path, _, what in complaints)
            context = {"text": text, "complaints": complaints}
            raise PydanticCustomError(_COMPLAINTS, "{text}", context)
        return self

    @property
    def models_on_demand(self) -> dict[str, OnDemandSettings]:
        """Return the models that are loaded on demand, by tier."""
        found = ((name, tier.model_on_demand) for name, tier in self.tiers.items())
        return {name: model for name, model in found if model is not None}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use only the arguments: `load_settings` merges the sources, so that it can name them."""
        return (init_settings,)


def load_settings(
    *,
    config_file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge flags over environment over the configuration file over defaults.

    `flags` maps `section.name` to a value; None means not given. The file is `config_file`, else
    $OUTRIDER_CONFIG, else outrider.toml in the working folder if there is one.

    Raises SettingsError for unreadable sources, unknown settings and invalid values.
    """
    environ = os.environ if environ is None else environ
    sources = [flag_source(flags or {}), _environment_source(environ)]
    path = config_file or _found_file(environ)
    if path is not None:
        sources.append(file_source(path))
    merged: dict[str, Any] = {}
    for place in reversed(range(len(sources))):
        stronger = (each.values for each in sources[:place])
        merge(merged, reduce(forget_revisions, stronger, sources[place].values))
    _leave_out_demo(merged)
    try:
        return shortened(Settings(**merged))
    except ValidationError as error:
        lines = [line for detail in error.errors() for line in _explain(detail, sources)]
        raise SettingsError("\n".join(lines)) from None


def _leave_out_demo(merged: dict[str, Any]) -> None:
    """Load no model that nobody named beside upstream tiers: the bundled pair is for a first look.

    `demo` names it. So a tier that the user did not name is never played by a toy.
    """
    models = merged.setdefault("models", {})
    if not merged.get("tiers") or not isinstance(models, dict):
        return
    if all(models.get(tier) in (None, NONE) for tier in ("large", "small")):
        models |= {"large": NONE, "small": NONE}


def _environment_source(environ: Mapping[str, str]) -> SettingsSource:
    ours = {k: v for k, v in environ.items() if k.upper().startswith(ENV_PREFIX) and v}
    for name in ours:
        known = [_variable(path) for path in _known_paths(_path_of(name))]
        if name.upper() not in {*known, *OTHER_VARIABLES} and not _holds_json(name):
            raise SettingsError(
                f"environment variable {name} is not a setting{did_you_mean(name.upper(), known)}"
            )
    source = EnvSettingsSource(Settings)
    source.env_vars = {k.lower(): v for k, v in ours.items()}
    try:
        return SettingsSource("environment", source())
    except SourceError as error:  # a whole section is written as JSON
        broken = next(name for name in ours if _holds_json(name) and not _is_json(ours[name]))
        raise SettingsError(
            f"environment variable {broken} is not valid JSON: {error.__cause__}"
        ) from None


def _variable(path: Sequence[str]) -> str:
    return f"{ENV_PREFIX}{'__'.join(path).upper()}"


def _path_of(variable: str) -> tuple[str, ...]:
    return tuple(variable[len(ENV_PREFIX) :].lower().split("__"))


def _holds_json(variable: str) -> bool:
    """Return whether a variable is a whole section, or a setting that maps names to values."""
    path = _path_of(variable)
    depth = len(path)
    return any(
        known[:depth] == path and (len(known) > depth or known[-1] in _MAPPINGS)
        for known in _known_paths(path)
    )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _found_file(environ: Mapping[str, str]) -> Path | None:
    if named := environ.get(CONFIG_VARIABLE):
        return Path(named)
    return Path(DEFAULT_FILE) if Path(DEFAULT_FILE).is_file() else None


def setting_paths() -> Iterator[tuple[str, ...]]:
    """Yield the path of every setting, e.g. ("engine", "device") or ("tiers", "NAME", "url")."""
    return settings_paths.setting_paths(Settings)


def _known_paths(wanted: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all paths, with the tier's name that `wanted` has."""
    return filled_in(list(setting_paths()), wanted)


def _explain(detail: ErrorDetails, sources: Sequence[SettingsSource]) -> Iterator[str]:
    """Yield one line for each error: the setting, the source of its value, and what is wrong."""
    if detail["type"] == _COMPLAINTS:
        for complaint in detail["ctx"]["complaints"]:
            yield _complaint_line(complaint, sources)
        return
    path = [str(part) for part in detail["loc"]]
    name = ".".join(path)
    setting = _setting_of(path)
    is_setting = tuple(setting) in set(_known_paths(path))
    where = f"{name} ({origin(setting, sources)})"
    match detail["type"]:
        case "value_error":  # our own
            what = detail["msg"].removeprefix("Value error, ")
            yield f"{where if is_setting else name}: {what}"
        case "missing":
            yield f"{name} is missing; write it below [{'.'.join(path[:-1])}]"
        case "extra_forbidden":
            yield f"{where} is not a setting{did_you_mean(path[-1], _siblings(path))}"
        case _ if not is_setting:
            what = f"it is a section; write [{name}] and the settings below it"
            yield f"{where} = {detail['input']!r}: {what}"
        case _:
            yield f"{where} = {detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _complaint_line(complaint: Complaint, sources: Sequence[SettingsSource]) -> str:
    """Return the message about a setting that is valid itself, but contradicts another one."""
    name = ".".join(complaint.path)
    if complaint.value is None:
        return f"{name}: {complaint.what}"
    return f"{name} ({origin(complaint.path, sources)}) = {complaint.value!r}: {complaint.what}"


def _setting_of(path: list[str]) -> list[str]:
    """Return the setting at a path; an error's path may point into a list."""
    known = set(_known_paths(path))
    return next((path[:n] for n in range(len(path), 0, -1) if tuple(path[:n]) in known), path)


def _siblings(path: Sequence[str]) -> list[str]:
    """Return names that are valid in place of the last part of an unknown path."""
    known = _known_paths(path)
    if len(path) > 1:
        parent = tuple(path[:-1])
        inside = [other for other in known if other[: len(parent)] == parent]
        return list(dict.fromkeys(other[len(parent)] for other in inside))
    forgot_section = [".".join(other) for other in known if other[-1] == path[0]]
    return forgot_section or list(Settings.model_fields)
