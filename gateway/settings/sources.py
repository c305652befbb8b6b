"""The sources of settings: values by section, and how a message names where one comes from."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.gateway.settings.errors import SettingsError

ENV_PREFIX = "OUTRIDER_"
_OWN_FLAGS: Final = {
    "speculation.enabled": "--speculation",
    "engine.replicas": "--engines",
    "engine.replicas_key": "--engine-key",
    "engine.replicas_insecure": "--insecure",
    **{
        path: f"--{path.rpartition('.')[2].replace('_', '-')}"
        for path in (
            "models.large",
            "models.small",
            "models.large_revision",
            "models.small_revision",
            "models.drafter_revision",
            "models.router",
            "models.quantize",
            "models.chat_template",
            "engine.device",
            "engine.dtype",
            "engine.num_threads",
            "engine.max_context",
            "engine.max_sequences",
            "keys.api_key",
            "engine.tensor_parallel",
            "engine.kv_cache_dtype",
            "engine.deterministic",
            "engine.numerics",
            "engine.cuda_graphs",
            "engine.overlap",
            "server.host",
            "server.port",
            "server.workers",
            "speculation.allow_vocab_mismatch",
            "log_level",
            "adapters.lora",
        )
    },
}
"""Settings with a command-line flag of their own; the others are set with --set."""


@dataclass(frozen=True, slots=True)
class SettingsSource:
    """Values of one source, nested by section."""

    name: str
    values: Mapping[str, Any]

    def describe(self, path: Sequence[str]) -> str:
        """Return the setting's name in this source."""
        match self.name:
            case "flag":
                name = ".".join(path)
                return f"flag {_OWN_FLAGS.get(name, f'--set {name}')}"
            case "environment":
                return f"environment variable {ENV_PREFIX}{'__'.join(path).upper()}"
            case _:
                return f"file {self.name}"


def flag_source(flags: Mapping[str, Any]) -> SettingsSource:
    """Nest the values of flags by section. Raises SettingsError."""
    values: dict[str, Any] = {}
    for key, value in flags.items():
        if value is not None:
            *sections, name = key.split(".")
            here = values
            for section in sections:
                here = here.setdefault(section, {})
                if not isinstance(here, dict):
                    raise SettingsError(
                        f"flag --set {key}: --set {section} contradicts it; give one of them"
                    )
            here[name] = value
    return SettingsSource("flag", values)


def file_source(path: Path) -> SettingsSource:
    """Read a settings file. Raises SettingsError."""
    try:
        with path.open("rb") as file:
            return SettingsSource(str(path), tomllib.load(file))
    except OSError as error:
        raise SettingsError(f"file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"file {path} is not valid TOML: {error}") from None


def merge(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Merge `values` into `target`, section by section."""
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(target.get(name), dict):
            merge(target[name], value)
        else:
            target[name] = dict(value) if isinstance(value, Mapping) else value


def origin(path: Sequence[str], sources: Sequence[SettingsSource]) -> str:
    """Return the setting's name in the source that wins."""
    return next((s.describe(path) for s in sources if _contains(s.values, path)), "default")


def _contains(values: Mapping[str, Any], path: Sequence[str]) -> bool:
    here: Any = values
    for part in path:
        if not isinstance(here, Mapping) or part not in here:
            return False
        here = here[part]
    return True
