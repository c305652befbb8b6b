"""Parts that the commands share: options, flags for any setting, errors without tracebacks."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

import typer

from outrider.engine.errors import EngineError
from outrider.gateway.settings.tree import DEFAULT_FILE, NONE, SettingsError
from outrider.gateway.tools.commands.user_errors import ChatError, user_errors

if TYPE_CHECKING:
    from outrider.gateway.telemetry.logs import LogFormat

Params = ParamSpec("Params")
Result = TypeVar("Result")

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help=f"Settings file; default: {DEFAULT_FILE} in this folder, if it exists."
    ),
]
LargeOption = Annotated[
    str | None,
    typer.Option(help="Folder or Hugging Face id of the large model, or a server's URL."),
]
Small = Annotated[str | None, typer.Option(help="The same for the small model.")]
LargeRevision = Annotated[
    str | None,
    typer.Option(
        metavar="REVISION", help="Branch, tag or commit of the large model on the hub, not main."
    ),
]
SmallRevision = Annotated[
    str | None, typer.Option(metavar="REVISION", help="The same for the small model.")
]
DrafterRevision = Annotated[
    str | None, typer.Option(metavar="REVISION", help="The same for a drafter on the hub.")
]
QuantizeOption = Annotated[
    str | None,
    typer.Option(
        metavar="SCHEME",
        help="Round weights to 8 or 4 bits: int8 or int4 for both tiers, large=int8 for one. "
        "decode: make plain weights of those that a checkpoint stores quantised.",
    ),
]
ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Chat template (Jinja) in place of the checkpoints' own; large=FILE for one tier.",
    ),
]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
DtypeOption = Annotated[str | None, typer.Option(help="auto, bfloat16, float16 or float32.")]
Tiers = Annotated[
    list[str] | None,
    typer.Option(
        "--tier",
        metavar="NAME=URL",
        help="An upstream tier; repeat NAME with another URL to add a replica.",
    ),
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=FOLDER[@TIER]",
        help="A LoRA adapter that requests name as model; repeatable. Tier: large, small or auto.",
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.NAME=VALUE", help="Any setting; repeatable."),
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        help="Drafter that reads the large model (EAGLE-3, MTP, P-EAGLE, DFlash): folder or "
        "hub id; mtp for the one in its checkpoint."
    ),
]
ParallelOption = Annotated[
    int | None, typer.Option(min=1, help="Devices that share the large model.")
]
SpeculationOption = Annotated[
    bool | None,
    typer.Option("--speculation/--no-speculation", help="Turn speculative decoding on or off."),
]
MismatchOption = Annotated[
    bool | None,
    typer.Option("--allow-vocab-mismatch", help="Draft across different tokenizers."),
]
KVDtypeOption = Annotated[
    str | None, typer.Option(help="auto or fp8, which holds twice as many tokens.")
]
DeterministicOption = Annotated[
    bool | None,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="Same tokens whatever other requests run in the batch. Default: where it is free.",
    ),
]
GraphsOption = Annotated[
    bool | None,
    typer.Option("--cuda-graphs/--no-cuda-graphs", help="Replay recorded passes on a GPU."),
]
OverlapOption = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap", help="Finish a step's host work while the GPU runs the next step."
    ),
]
LogLevelOption = Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING, ERROR.")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads of the engine.")]


def reports_user_errors(command: Callable[Params, Result]) -> Callable[Params, Result]:
    """Turn errors that the user can fix into a message and an exit status, without a traceback."""

    @functools.wraps(command)
    def wrapped(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        with user_errors(usage=(SettingsError,), failed=(EngineError, ChatError)):
            return command(*args, **kwargs)

    return wrapped


def start_logging(level: str, log_format: "LogFormat" = "text", process: str = "gateway") -> None:
    """Log to standard error, unless the program that calls this command has its own handlers."""
    from outrider.gateway.telemetry.logs import configure_logging

    if not logging.getLogger().handlers:
        configure_logging(level, log_format, process=process)


def assigned(assignments: list[str]) -> dict[str, Any]:
    """`--set section.name=value` as flags. Raises SettingsError for another form."""
    flags: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise SettingsError(f"--set {assignment}: write it as --set section.name=value")
        flags[key.strip()] = value.strip()
    return flags


def model_flags(large: str | None, small: str | None) -> dict[str, Any]:
    """`--large` and `--small` as flags; a URL is a server in that model's part."""
    flags: dict[str, Any] = {"models.large": large, "models.small": small}
    for tier, model, part in (("cloud", large, "large"), ("device", small, "small")):
        if model is None or not model.startswith(("http://", "https://")):
            continue
        flags[f"models.{part}"] = NONE
        flags[f"tiers.{tier}.url"] = tuple(model.split(","))
        flags["handoff.tier" if part == "large" else "handoff.small"] = tier
        host = urlsplit(model).hostname or ""
        if host == "localhost" or host.startswith("127.") or host == "::1":
            flags[f"tiers.{tier}.local"] = True
    return flags


def tier_flags(tiers: list[str]) -> dict[str, Any]:
    """`--tier name=url` as flags. Raises SettingsError for another form."""
    flags: dict[str, Any] = {}
    for tier in tiers:
        name, equals, url = (part.strip() for part in tier.partition("="))
        if not equals or not name or not url or "." in name:
            raise SettingsError(f"--tier {tier}: write it as --tier cloud=https://host/v1")
        key = f"tiers.{name}.url"
        flags[key] = (*flags.get(key, ()), *url.split(","))
    return flags
