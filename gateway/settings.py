"""All settings in one frozen tree: flags over environment over outrider.toml over defaults."""

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as SourceError

from gateway.settings_sections import NONE as NONE
from gateway.settings_sections import (
    EngineSettings,
    LimitSettings,
    ModelSettings,
    RoutingSettings,
    ServerSettings,
)
from gateway.settings_sections import SpeculationSettings as SpeculationSettings
from gateway.settings_sections import bundled_pair as bundled_pair
from gateway.settings_sections import is_missing_folder as is_missing_folder

ENV_PREFIX = "OUTRIDER_"
CONFIG_VARIABLE = "OUTRIDER_CONFIG"
DEFAULT_FILE = "outrider.toml"
OTHER_VARIABLES = frozenset(
    {CONFIG_VARIABLE, "OUTRIDER_URL", "OUTRIDER_DATA", "OUTRIDER_KERNELS", "OUTRIDER_COMMIT"}
)
"""Variables with our prefix that are not settings of the server."""

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class SettingsError(Exception):
    """Settings that cannot be used; the message names each one, its source and what it may be."""


class Settings(BaseSettings):
    """Everything that can be set. Made by `load_settings`; reads nothing by itself."""

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
    engine: EngineSettings = Field(default_factory=EngineSettings)
    speculation: SpeculationSettings = Field(default_factory=SpeculationSettings)
    routing: RoutingSettings = Field(default_factory=RoutingSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    log_level: LogLevel = "INFO"
    """How much is logged."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed in: `load_settings` merges the sources, so that it can name them."""
        return (init_settings,)


@dataclass(frozen=True, slots=True)
class _Source:
    """Values of one origin, nested by section, and how its settings are called there."""

    name: str
    values: Mapping[str, Any]

    def describe(self, path: Sequence[str]) -> str:
        match self.name:
            case "flag" if len(path) > 2:
                return f"flag --set {'.'.join(path)}"
            case "flag":
                return f"flag --{path[-1].replace('_', '-')}"
            case "environment":
                return f"environment variable {ENV_PREFIX}{'__'.join(path).upper()}"
            case _:
                return f"file {self.name}"


def load_settings(
    *,
    config_file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge flags over environment over the configuration file over defaults.

    `flags` maps `section.name` to a value; None means not given. The file is `config_file`, else
    $OUTRIDER_CONFIG, else outrider.toml in the working folder if there is one.

    Raises SettingsError for what cannot be read, is not a setting, or has no meaning.
    """
    environ = os.environ if environ is None else environ
    sources = [_flag_source(flags or {}), _environment_source(environ)]
    path = config_file or _found_file(environ)
    if path is not None:
        sources.append(_file_source(path))
    merged: dict[str, Any] = {}
    for source in reversed(sources):
        _merge(merged, source.values)
    try:
        return Settings(**merged)
    except ValidationError as error:
        lines = [_explain(detail, sources) for detail in error.errors()]
        raise SettingsError("\n".join(lines)) from None


def _flag_source(flags: Mapping[str, Any]) -> _Source:
    values: dict[str, Any] = {}
    for key, value in flags.items():
        if value is not None:
            *sections, name = key.split(".")
            here = values
            for section in sections:
                here = here.setdefault(section, {})
            here[name] = value
    return _Source("flag", values)


def _environment_source(environ: Mapping[str, str]) -> _Source:
    ours = {k: v for k, v in environ.items() if k.upper().startswith(ENV_PREFIX) and v}
    known = [f"{ENV_PREFIX}{'__'.join(path).upper()}" for path in setting_paths()]
    parents = {path[:depth] for path in setting_paths() for depth in range(1, len(path))}
    sections = {f"{ENV_PREFIX}{'__'.join(path).upper()}" for path in parents}
    for name in ours:
        if name.upper() not in {*known, *sections, *OTHER_VARIABLES}:
            raise SettingsError(
                f"environment variable {name} is not a setting{_did_you_mean(name.upper(), known)}"
            )
    source = EnvSettingsSource(Settings)
    source.env_vars = {k.lower(): v for k, v in ours.items()}
    try:
        return _Source("environment", source())
    except SourceError as error:  # a whole section is written as JSON
        broken = next(
            name for name in ours if name.upper() in sections and not _is_json(ours[name])
        )
        raise SettingsError(
            f"environment variable {broken} is not valid JSON: {error.__cause__}"
        ) from None


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


def _file_source(path: Path) -> _Source:
    try:
        with path.open("rb") as file:
            return _Source(str(path), tomllib.load(file))
    except OSError as error:
        raise SettingsError(f"file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"file {path} is not valid TOML: {error}") from None


def _merge(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Lay `values` over `target`, section by section."""
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(target.get(name), dict):
            _merge(target[name], value)
        else:
            target[name] = dict(value) if isinstance(value, Mapping) else value


def setting_paths(model: type[BaseModel] = Settings) -> Iterator[tuple[str, ...]]:
    """The path of every setting, e.g. ("engine", "device")."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from ((name, *path) for path in setting_paths(kind))
        else:
            yield (name,)


def _explain(detail: ErrorDetails, sources: Sequence[_Source]) -> str:
    """One line: the setting, where its value came from, what is wrong with it."""
    path = [str(part) for part in detail["loc"]]
    name = ".".join(path)
    if detail["type"] == "value_error":  # our own, about a section as a whole
        return f"{name}: {detail['msg'].removeprefix('Value error, ')}"
    setting = _setting_of(path)
    origin = next((s.describe(setting) for s in sources if _contains(s.values, setting)), "default")
    where = f"{name} ({origin})"
    if detail["type"] == "extra_forbidden":
        return f"{where} is not a setting{_did_you_mean(path[-1], _siblings(path))}"
    if tuple(setting) not in set(setting_paths()):
        what = f"it is a section; write [{name}] and the settings below it"
    else:
        what = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{where} = {detail['input']!r}: {what}"


def _setting_of(path: list[str]) -> list[str]:
    """The setting at a path: what is wrong may be an item of a list."""
    known = set(setting_paths())
    return next((path[:n] for n in range(len(path), 0, -1) if tuple(path[:n]) in known), path)


def _siblings(path: Sequence[str]) -> list[str]:
    """Names that may stand in place of the last part of an unknown path."""
    known = list(setting_paths())
    if len(path) > 1:
        parent = tuple(path[:-1])
        inside = [other for other in known if other[: len(parent)] == parent]
        return list(dict.fromkeys(other[len(parent)] for other in inside))
    forgot_section = [".".join(other) for other in known if other[-1] == path[0]]
    return forgot_section or list(Settings.model_fields)


def _contains(values: Mapping[str, Any], path: Sequence[str]) -> bool:
    here: Any = values
    for part in path:
        if not isinstance(here, Mapping) or part not in here:
            return False
        here = here[part]
    return True


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    close = known[:1] if len(known) == 1 else difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"


def to_toml(settings: Settings) -> str:
    """The settings as a commented outrider.toml. Unset ones are commented out."""
    return "\n".join(_toml_lines("", settings)) + "\n"


def _toml_lines(path: str, section: BaseModel) -> Iterator[str]:
    """A section's own settings, then the sections in it."""
    inner = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            inner[f"{path}.{name}" if path else name] = value
            continue
        yield f"# {' '.join((field.description or '').split())}"
        yield f"#{name} =" if value is None else f"{name} = {_toml_value(value)}"
    for inner_path, value in inner.items():
        yield from ("", f"# {type(value).__doc__}", f"[{inner_path}]")
        yield from _toml_lines(inner_path, value)


def _toml_value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case tuple():
            return f"[{', '.join(_toml_value(item) for item in value)}]"
        case _:
            escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
            return f'"{escaped}"'
