"""All settings in one frozen tree: flags over environment over outrider.toml over defaults."""

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as SourceError

from engine.request import SOURCES, Source

ENV_PREFIX = "OUTRIDER_"
CONFIG_VARIABLE = "OUTRIDER_CONFIG"
DEFAULT_FILE = "outrider.toml"
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "OUTRIDER_URL", "OUTRIDER_DATA"})
"""Variables with our prefix that are not settings of the server."""

NONE = "none"
"""The model name that means: do not load this tier."""

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


def _split(value: object) -> object:
    """Flags and variables write a list with commas."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


Sources = Annotated[tuple[Source, ...], NoDecode, BeforeValidator(_split)]


def is_missing_folder(name: str) -> bool:
    """Whether a model's name is meant as a folder, but there is none. Hub ids are `owner/name`."""
    if Path(name).expanduser().is_dir():
        return False
    return name.startswith(("/", ".", "~")) or name.count("/") != 1


def bundled_pair() -> Path:
    """The folder of the pair of models that comes with Outrider."""
    return Path(str(files("draft"))) / "pair"


class SettingsError(Exception):
    """Settings that cannot be used; the message names each one, its source and what it may be."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ServerSettings(_Section):
    """Where the gateway listens."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 for any free one."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """How long answers may take to finish after SIGTERM or Ctrl-C."""
    access_log: bool = False
    """Log a line for every HTTP request."""


class ModelSettings(_Section):
    """Which models answer. None given: the pair that comes with Outrider."""

    large: str | None = None
    """Folder or Hugging Face id of the large model; "none" for no such tier."""
    small: str | None = None
    """The same for the small model, which answers easy prompts and drafts for the large one."""
    router: Path | None = None
    """Folder of a trained router. It belongs to a pair of models."""
    tool_format: Literal["auto", "hermes", "llama3", "mistral"] = "auto"
    """How the models write tool calls; auto: as their chat templates say."""

    @model_validator(mode="after")
    def _one_is_left(self) -> "ModelSettings":
        if self.resolved() == {"large": None, "small": None}:
            raise ValueError("both tiers are switched off; name a model for one of them")
        return self

    def resolved(self) -> dict[Literal["large", "small"], str | None]:
        """Path or hub id of each tier, None where there is none.

        A model of one's own never shares an engine with half of the bundled pair: whoever names one
        tier only gets that tier only.
        """
        named = {"large": self.large, "small": self.small}
        if all(name in (None, NONE) for name in named.values()):
            bundled = {tier: str(bundled_pair() / tier) for tier in named}
            named = {tier: name or bundled[tier] for tier, name in named.items()}
        found = {tier: None if name == NONE else name for tier, name in named.items()}
        return {"large": found["large"], "small": found["small"]}

    def resolved_router(self) -> Path | None:
        """The router's folder: the configured one, or with the bundled pair its own."""
        if self.router is None and self.large is None and self.small is None:
            router = bundled_pair() / "router"
            return router if router.is_dir() else None
        return self.router


class EngineSettings(_Section):
    """How the engine runs the models."""

    device: Device = "auto"
    """Where the models run; auto takes a GPU when there is one."""
    dtype: Dtype = "auto"
    """Precision of weights and KV cache; auto is the checkpoint's own."""
    num_threads: Count | None = None
    """CPU threads of the engine; unset: by the models' size, at most the physical cores."""
    block_size: int = Field(default=16, ge=1, le=256)
    """Tokens in a block of the KV cache."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory for both KV caches; unset: a share of what is free. Excludes num_blocks."""
    num_blocks: Count | None = None
    """Blocks in each tier's KV cache. Excludes kv_cache_gib."""
    max_context: Count | None = None
    """Tokens of prompt and answer together; unset: what the model was trained for."""
    max_sequences: Count = 64
    """Answers that are written at the same time."""
    max_tokens_per_step: Count = 2048
    """Rows in one forward pass; long prompts are cut to it."""
    max_waiting: int = Field(default=512, ge=0)
    """Requests that may wait; more are refused with status 429."""
    prefix_caching: bool = True
    """Keep the KV of prompts for the next request that begins the same."""
    process: bool = True
    """Run the engine in a process of its own, which is restarted when it dies."""
    stall_timeout_s: Seconds = 120.0
    """After this long without an answer the engine's process is killed and restarted."""

    @model_validator(mode="after")
    def _one_size(self) -> "EngineSettings":
        if self.kv_cache_gib is not None and self.num_blocks is not None:
            raise ValueError("kv_cache_gib and num_blocks exclude each other; set one of them")
        return self


class SpeculationSettings(_Section):
    """How the small model drafts for the large one. Requests can ask for less, not for more."""

    enabled: bool = True
    """Draft at all."""
    adaptive: bool = True
    """Size the trees by what passes cost on this machine; off: always up to the limits."""
    max_draft_nodes: int = Field(default=64, ge=0, le=255)
    """Drafted tokens in one answer's tree."""
    max_draft_depth: int = Field(default=16, ge=0, le=255)
    """Tokens in a row that the small model drafts."""
    max_text_depth: int = Field(default=48, ge=0, le=255)
    """Tokens in a row that earlier text, predictions and grammars draft."""
    max_branching: int = Field(default=3, ge=1, le=64)
    """Alternatives for one token."""
    max_frontier: int = Field(default=4, ge=1, le=64)
    """Nodes of one answer's tree that a pass of the small model continues."""
    sources: Sources = SOURCES
    """Where guesses may come from: the small model, text that repeats, predictions, a grammar."""
    allow_vocab_mismatch: bool = False
    """Draft across different tokenizers, through the tokens that both have. Off: refused."""


class LimitSettings(_Section):
    """What one request may ask for."""

    default_max_tokens: Count | None = None
    """Tokens of an answer when the request does not say; unset: what the context leaves."""
    max_body_bytes: Count = 8 * 1024 * 1024
    """Size of a request's body."""


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
            section, _, name = key.rpartition(".")
            (values.setdefault(section, {}) if section else values)[name] = value
    return _Source("flag", values)


def _environment_source(environ: Mapping[str, str]) -> _Source:
    ours = {k: v for k, v in environ.items() if k.upper().startswith(ENV_PREFIX) and v}
    known = [f"{ENV_PREFIX}{'__'.join(path).upper()}" for path in setting_paths()]
    sections = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields}
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


def setting_paths() -> Iterator[tuple[str, ...]]:
    """The path of every setting, e.g. ("engine", "device")."""
    for name, section in Settings.model_fields.items():
        kind = section.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from ((name, field) for field in kind.model_fields)
        else:
            yield (name,)


def _explain(detail: ErrorDetails, sources: Sequence[_Source]) -> str:
    """One line: the setting, where its value came from, what is wrong with it."""
    path = [str(part) for part in detail["loc"]]
    name = ".".join(path)
    if detail["type"] == "value_error":  # our own, about a section as a whole
        return f"{name}: {detail['msg'].removeprefix('Value error, ')}"
    setting = path[:2]  # what is wrong may be an item of a list
    origin = next((s.describe(setting) for s in sources if _contains(s.values, setting)), "default")
    where = f"{name} ({origin})"
    if detail["type"] == "extra_forbidden":
        return f"{where} is not a setting{_did_you_mean(path[-1], _siblings(path))}"
    if len(path) == 1 and path[0] not in {".".join(p) for p in setting_paths()}:
        what = f"it is a section; write [{name}] and the settings below it"
    else:
        what = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{where} = {detail['input']!r}: {what}"


def _siblings(path: Sequence[str]) -> list[str]:
    """Names that may stand in place of the last part of an unknown path."""
    known = list(setting_paths())
    if len(path) > 1:
        return [other[-1] for other in known if other[0] == path[0]]
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
    lines = [*_toml_lines("", settings)]
    for name in Settings.model_fields:
        section = getattr(settings, name)
        if isinstance(section, BaseModel):
            lines += ["", f"# {type(section).__doc__}", f"[{name}]", *_toml_lines(name, section)]
    return "\n".join(lines) + "\n"


def _toml_lines(section_name: str, section: BaseModel) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            continue
        yield f"# {field.description}"
        yield f"#{name} =" if value is None else f"{name} = {_toml_value(value)}"


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
