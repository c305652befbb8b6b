"""fleet.toml: which engines a fleet has, and how many of each."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider.gateway.settings.tree import SettingsError
from outrider.verifier.params import TIERS, Tier

NumReplicas = Annotated[int, Field(ge=1, le=10_000)]
Positive = Annotated[float, Field(gt=0)]

EXAMPLE: Final = """\
key = "fleet.key"            # outrider engine keygen fleet.key

[engines.chat]
large = "Qwen/Qwen3-8B"
small = "Qwen/Qwen3-0.6B"
min_replicas = 1             # 0: the first request starts an engine, and waits for it
max_replicas = 4
num_gpus = 1
first_token_s = 1.0          # the objective that the number of replicas follows

[engines.chat.settings]      # as outrider serve --set
"engine.dtype" = "bfloat16"
"""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EnginePlan(_Section):
    """One deployment: replicas of an engine, all alike."""

    large: str | None = None
    """A folder or hub id."""
    small: str | None = None
    """A folder or hub id."""
    min_replicas: Annotated[int, Field(ge=0, le=10_000)] = 1
    """With 0, the first request starts a replica, and waits for it."""
    max_replicas: NumReplicas = 1
    first_token_s: Positive = 1.0
    """The objective that the number of replicas follows."""
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPU cores that Ray reserves for a replica."""
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs that Ray reserves for a replica."""
    upscale_delay_s: Annotated[float, Field(ge=0)] = 10.0
    downscale_delay_s: Annotated[float, Field(ge=0)] = 300.0
    drain_timeout_s: Positive = 30.0
    """Time for answers to end before a replica goes."""
    settings: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """The engine's settings, by their dotted names."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.large is None and self.small is None:
            raise ValueError("it names no model: set large, small or both")
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas = {self.min_replicas} is above max_replicas = {self.max_replicas}"
            )
        return self

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that a replica has."""
        models = {"small": self.small, "large": self.large}
        return tuple(tier for tier in TIERS if models[tier] is not None)

    def flags(self) -> list[str]:
        """Return the flags of `outrider engine` that name the models and settings."""
        found: list[str] = []
        for name, model in (("--large", self.large), ("--small", self.small)):
            found += [name, model or "none"]
        settings = {"server.drain_timeout_s": self.drain_timeout_s, **self.settings}
        for name, value in settings.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            found += ["--set", f"{name}={text}"]
        return found


class FleetPlan(_Section):
    """A fleet."""

    key: Path | None = None
    """Read where the plan is, and given to the replicas."""
    host: str | None = None
    """The address at which a replica's machine is reached; unset: as Ray knows it."""
    http_host: str = "127.0.0.1"
    http_port: Annotated[int, Field(ge=0, le=65_535)] = 7800
    """The port of Serve's proxy, which reports the replicas' addresses to gateways."""
    engines: Annotated[dict[str, EnginePlan], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for name in self.engines:
            if not name.replace("-", "").isalnum() or name == "directory":
                raise ValueError(
                    f"engines.{name[:50]}: a deployment's name has letters, digits and - only, and "
                    "is not directory"
                )
        return self


def read_plan(file: Path) -> FleetPlan:
    """Read fleet.toml; a relative `key` is beside it. Raises SettingsError."""
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{file} is not there. It looks like this:\n\n{EXAMPLE}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{file} cannot be read: {error}") from None
    plan = parse_plan(raw, str(file))
    if plan.key is None:
        return plan
    return plan.model_copy(update={"key": (file.parent / plan.key).resolve()})


def parse_plan(raw: dict[str, Any], name: str) -> FleetPlan:
    """Return the plan of a document. Raises SettingsError that says where it is wrong."""
    try:
        return FleetPlan.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        said = str(first["msg"]).removeprefix("Value error, ")
        raise SettingsError(f"{name}: {place}: {said}" if place else f"{name}: {said}") from None
