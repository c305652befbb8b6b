"""Parts that the commands share: options, flags for any setting, errors without tracebacks."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

import typer

from outrider.engine.errors import EngineError
from outrider.gateway.settings.tree import DEFAULT_FILE, NONE, SettingsError
from outrider.gateway.tools.commands.flags import Sets
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
    typer.Option(
        help="Folder, GGUF file or Hugging Face id of the large model, a name of `outrider models "
        "list`, or a server's URL."
    ),
    Sets("models.large"),
]
Small = Annotated[
    str | None, typer.Option(help="The same for the small model."), Sets("models.small")
]
LargeRevision = Annotated[
    str | None,
    typer.Option(
        metavar="REVISION", help="Branch, tag or commit of the large model on the hub, not main."
    ),
    Sets("models.large_revision"),
]
SmallRevision = Annotated[
    str | None,
    typer.Option(metavar="REVISION", help="The same for the small model."),
    Sets("models.small_revision"),
]
QuantizeOption = Annotated[
    str | None,
    typer.Option(
        metavar="SCHEME",
        help="Round weights to 8 or 4 bits: int8 or int4 for both tiers, large=int8 for one. "
        "Of weights that a checkpoint stores quantised: exact multiplies them in bfloat16, not "
        "with rows in 8 bits; decode makes plain ones of them.",
    ),
    Sets("models.quantize"),
]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu or cuda."), Sets("engine.device")]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="auto, bfloat16, float16 or float32."),
    Sets("engine.dtype"),
]
Tiers = Annotated[
    list[str] | None,
    typer.Option(
        "--tier",
        metavar="NAME=URL",
        help="An upstream tier; repeat NAME with another URL to add a replica.",
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.NAME=VALUE", help="Any setting; repeatable."),
]
ParallelOption = Annotated[
    int | None,
    typer.Option(
        *("--tensor-parallel", "--tensor-parallel-size", "--tp-size", "--tp", "-tp"),
        min=1,
        help="Devices that share the large model.",
    ),
    Sets("engine.tensor_parallel"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFlags:
    """The settings file and the two models."""

    config: ConfigFile = None
    large: LargeOption = None
    small: Small = None
    large_revision: LargeRevision = None
    small_revision: SmallRevision = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags(PairFlags):
    """Models, and how an engine runs them."""

    drafter: Annotated[
        str | None,
        typer.Option(
            help="Drafter that reads the large model (EAGLE-3, MTP, P-EAGLE, DFlash): folder or "
            "hub id; mtp for the one in its checkpoint."
        ),
        Sets("models.drafter"),
    ] = None
    drafter_revision: Annotated[
        str | None,
        typer.Option(metavar="REVISION", help="The same for a drafter on the hub."),
        Sets("models.drafter_revision"),
    ] = None
    quantize: QuantizeOption = None
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Chat template (Jinja) in place of the checkpoints' own; large=FILE for one tier.",
        ),
        Sets("models.chat_template"),
    ] = None
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER[@TIER]",
            help="A LoRA adapter that requests name as model; repeatable. Tier: large, small or "
            "auto.",
        ),
        Sets("adapters.lora"),
    ] = None
    device: DeviceOption = None
    dtype: DtypeOption = None
    num_threads: Annotated[
        int | None,
        typer.Option("--num-threads", "--threads", "-t", help="CPU threads of the engine."),
        Sets("engine.num_threads"),
    ] = None
    tensor_parallel: ParallelOption = None
    speculation: Annotated[
        bool | None,
        typer.Option("--speculation/--no-speculation", help="Turn speculative decoding on or off."),
        Sets("speculation.enabled"),
    ] = None
    allow_vocab_mismatch: Annotated[
        bool | None,
        typer.Option("--allow-vocab-mismatch", help="Draft across different tokenizers."),
        Sets("speculation.allow_vocab_mismatch"),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(help="auto or fp8, which holds twice as many tokens."),
        Sets("engine.kv_cache_dtype"),
    ] = None
    kv_folder: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep keys and values that leave the memory in this folder, sealed: prompts that "
            "return need not be computed again, after a restart neither.",
        ),
        Sets("engine.kv_folder"),
    ] = None
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--no-deterministic",
            help="Same tokens whatever other requests run in the batch. Default: where it is free.",
        ),
        Sets("engine.deterministic"),
    ] = None
    numerics: Annotated[
        str | None,
        typer.Option(
            metavar="auto|portable",
            help="portable: the same bits on every CPU, so that a fleet may mix them.",
        ),
        Sets("engine.numerics"),
    ] = None
    cuda_graphs: Annotated[
        bool | None,
        typer.Option("--cuda-graphs/--no-cuda-graphs", help="Replay recorded passes on a GPU."),
        Sets("engine.cuda_graphs"),
    ] = None
    overlap: Annotated[
        bool | None,
        typer.Option(
            "--overlap/--no-overlap",
            help="Finish a step's host work while the GPU runs the next step.",
        ),
        Sets("engine.overlap"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonFlags:
    """What every process that serves takes, after its own flags."""

    log_level: Annotated[
        str | None, typer.Option(help="DEBUG, INFO, WARNING, ERROR."), Sets("log_level")
    ] = None
    assignments: Assignments = None


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


def assigned(assignments: list[str] | None) -> dict[str, Any]:
    """`--set section.name=value` as flags. Raises SettingsError for another form."""
    flags: dict[str, Any] = {}
    for assignment in assignments or ():
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise SettingsError(f"--set {assignment}: write it as --set section.name=value")
        flags[key.strip()] = value.strip()
    return flags


def url_flags(large: str | None, small: str | None) -> dict[str, Any]:
    """Return the settings of URLs in place of models: a server plays that model's part."""
    flags: dict[str, Any] = {}
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


def tier_flags(tiers: list[str] | None) -> dict[str, Any]:
    """`--tier name=url` as flags. Raises SettingsError for another form."""
    flags: dict[str, Any] = {}
    for tier in tiers or ():
        name, equals, url = (part.strip() for part in tier.partition("="))
        if not equals or not name or not url or "." in name:
            raise SettingsError(f"--tier {tier}: write it as --tier cloud=https://host/v1")
        key = f"tiers.{name}.url"
        flags[key] = (*flags.get(key, ()), *url.split(","))
    return flags
