"""`outrider serve`: the settings' flags, then a gateway until a signal ends it."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.gateway.contract.schema.kinds import AUTO
from outrider.gateway.settings.tree import (
    KEY_VARIABLE,
    NONE,
    Settings,
    SettingsError,
    load_settings,
)
from outrider.gateway.tools.commands.command_parts import (
    CommonFlags,
    ModelFlags,
    Tiers,
    assigned,
    reports_user_errors,
    start_logging,
    tier_flags,
    url_flags,
)
from outrider.gateway.tools.commands.flags import Sets, setting_flags, takes_flags
from outrider.gateway.tools.commands.foreign_flags import ForgivingCommand

if TYPE_CHECKING:
    from socket import socket

    from outrider.engine.events import EngineInfo
    from outrider.gateway.engines.backends.spawning import EngineProcess
    from outrider.gateway.wiring.crew import Crew
    from outrider.gateway.wiring.serving import GatewayRun

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

_SERVE_EXAMPLES = """
Start the gateway and keep it up.

[bold]Examples[/bold]

  outrider serve  [dim]# the pair that comes with Outrider[/dim]

  outrider serve --large Qwen/Qwen3-8B --small Qwen/Qwen3-0.6B --device cuda

  outrider serve smollm2-135m  [dim]# after: outrider models get smollm2-135m[/dim]

  outrider serve ./my-model --port 9000  [dim]# one tier, drafts from text alone[/dim]

  outrider serve --config prod.toml --set engine.max_sequences=128

  outrider serve --workers 4  [dim]# four processes at one port, and one engine[/dim]

  outrider serve --small ./small-model --tier cloud=https://host/v1 \
  --set tiers.cloud.api_key_env=KEY [dim]# a small model here, an upstream large one[/dim]

  outrider serve --small http://127.0.0.1:11434/v1 --large ./large-model \
  [dim]# Ollama, llama.cpp … as the small model[/dim]

  outrider serve --large none --small none --tier gpu=http://a:8000/v1 --tier gpu=http://b:8000/v1 \
  [dim]# no model here: one door to two replicas[/dim]

Every setting can also come from outrider.toml ([bold]outrider config init[/bold] writes one) or
the environment (OUTRIDER_SERVER__PORT=9000). Flags win over the environment, which wins over the
file.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """The gateway's own flags, behind those of its models."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="The same as --large, with no small model unless one is named."
        ),
    ] = None
    named_model: Annotated[
        str | None,
        typer.Option(
            *("--model", "-m", "--model-path"),
            metavar="MODEL",
            help="The same as MODEL, as other servers have it.",
        ),
    ] = None
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="REVISION", help="The same as --large-revision."),
    ] = None
    aliases: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            "--alias",
            "-a",
            metavar="NAME",
            help="A name that requests may use for the model as well (auto); repeatable.",
        ),
    ] = None
    max_context: Annotated[
        int | None,
        typer.Option(
            *("--max-context", "--max-model-len", "--context-length", "--ctx-size", "-c"),
            metavar="N",
            help="Tokens of prompt and answer together; the model's own limit by default.",
        ),
        Sets("engine.max_context"),
    ] = None
    max_sequences: Annotated[
        int | None,
        typer.Option(
            *("--max-sequences", "--max-num-seqs", "--max-running-requests", "--parallel", "-np"),
            metavar="N",
            help="Answers generated concurrently; 64 by default.",
        ),
        Sets("engine.max_sequences"),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="A key that every request needs. Other users of this machine can see it here: "
            "OUTRIDER_API_KEY keeps it from them.",
        ),
        Sets("keys.api_key"),
    ] = None
    router: Annotated[
        str | None, typer.Option(help="Folder of a trained router."), Sets("models.router")
    ] = None
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on; 127.0.0.1 by default, 0.0.0.0 for all."),
        Sets("server.host"),
    ] = None
    port: Annotated[
        int | None,
        typer.Option(help="Port to listen on; 8000 by default, 0 for any free."),
        Sets("server.port"),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Processes that answer requests; 1 by default."),
        Sets("server.workers"),
    ] = None
    engines: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS,…",
            help="Engines that run elsewhere (outrider engine): tcp://HOST:PORT, dns://NAME:PORT, "
            "http://... of outrider fleet.",
        ),
        Sets("engine.replicas"),
    ] = None
    engine_key: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Their keys (outrider engine keygen)."),
        Sets("engine.replicas_key"),
    ] = None
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="Allow engines of other machines without keys."),
        Sets("engine.replicas_insecure"),
    ] = None
    tiers: Tiers = None


@app.command("serve", cls=ForgivingCommand, help=_SERVE_EXAMPLES)
@reports_user_errors
@takes_flags
def serve(models: ModelFlags, own: ServeFlags, common: CommonFlags) -> None:
    """Start the gateway; the help is `_SERVE_EXAMPLES`."""
    models = _with_model(models, own)
    flags = {
        **_alias_flags(own.aliases),
        **_key_in_environment(),
        **assigned(common.assignments),
        **setting_flags(models, own, common),
        **url_flags(models.large, models.small),
        **tier_flags(own.tiers),
    }
    _serve(load_settings(config_file=models.config, flags=flags))


def _with_model(models: ModelFlags, own: ServeFlags) -> ModelFlags:
    """Return the models with the one that is named as other servers do. Raises SettingsError."""
    names = {name for name in (own.model, own.named_model, models.large) if name is not None}
    if len(names) > 1:
        raise SettingsError(f"two large models are named, {' and '.join(sorted(names))}; name one")
    revisions = {name for name in (own.revision, models.large_revision) if name is not None}
    if len(revisions) > 1:
        raise SettingsError("--revision and --large-revision differ; give one of them")
    is_alone = models.large is None and bool(names)
    return replace(
        models,
        large=next(iter(names), None),
        small=NONE if is_alone and models.small is None else models.small,
        large_revision=next(iter(revisions), None),
    )


def _alias_flags(names: list[str] | None) -> dict[str, Any]:
    """Return the setting of further names, which may have dots."""
    return {"aliases": {name: {"models": (AUTO,)} for name in names}} if names else {}


def _key_in_environment() -> dict[str, str]:
    """Return the setting of the key in OUTRIDER_API_KEY.

    One that `outrider keys create` has made is a client's, as `outrider chat` reads it there.
    """
    from outrider.gateway.tenancy.keys.keys import id_in

    key = os.environ.get(KEY_VARIABLE, "")
    if key in ("", NONE):  # what clients are told to send where no key is required
        return {}
    if id_in(key):
        typer.secho(f"outrider: {KEY_VARIABLE} holds a client's key, not this gateway's", err=True)
        return {}
    return {"keys.api_key": key}


def _serve(settings: Settings) -> None:
    """Run until a signal says otherwise. The port is taken before anything is started."""
    from outrider.gateway.http.server.listening import listen
    from outrider.gateway.tools.demo.grown_pair import with_grown_pair
    from outrider.gateway.wiring.start import (
        check_extras,
        keep_torch_out,
        serving_host,
        start_engine,
    )

    check_extras(settings)
    start_logging(settings.log_level, settings.telemetry.log_format)
    options = settings.engine
    if options.process or options.replicas or not settings.models.is_any:
        keep_torch_out()
    host, warning = serving_host(settings)
    if warning is not None:
        typer.secho(f"outrider: {warning}", fg=typer.colors.YELLOW, err=True)
    with ended_by_signals(), closing(listen(host, settings.server.port)) as listener:
        settings, shown = with_grown_pair(settings, partial(typer.echo, err=True))
        with start_engine(settings) or nullcontext() as engine_process:
            _serve_with(settings, listener, engine_process, shown)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the command with status 0 before the server handles them."""
    before = {number: signal.signal(number, _leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(*_: object) -> None:
    raise SystemExit(0)


def _serve_with(
    settings: Settings, listener: "socket", engine_process: "EngineProcess | None", shown: str
) -> None:
    """Import the gateway, while the engine's process loads, and run it.

    `shown`: a line for the banner on the models.
    """
    from outrider.gateway.http.server.listening import url_of
    from outrider.gateway.tools.commands.terminal import LoadingProgress, make_console, print_banner
    from outrider.gateway.wiring.until_signalled import serve_until_signalled
    from outrider.gateway.workers.watchdog import LoopWatchdog

    url, workers = url_of(listener), settings.server.workers
    with (
        LoadingProgress(make_console(stderr=True)) as progress,
        LoopWatchdog(settings.server.stall_timeout_s) as watchdog,
    ):

        def on_ready(info: "EngineInfo", routing: str) -> None:
            progress.stop()
            watchdog.start()
            adapters = (text.partition("=")[0] for text in settings.adapters.lora)
            names = (*settings.aliases, *adapters)
            notes = [shown] if shown else []
            if workers > 1:
                notes.append(f"workers {workers} processes answer requests")
            print_banner(make_console(), url, info, settings.tiers, routing, names, notes)

        make_run = _gateway_run() if workers == 1 else _crew(settings)
        run = make_run(
            settings,
            listener,
            on_progress=progress.report,
            on_ready=on_ready,
            engine_process=engine_process,
        )
        serve_until_signalled(run)


def _gateway_run() -> "type[GatewayRun]":
    from outrider.gateway.wiring.serving import GatewayRun

    return GatewayRun


def _crew(settings: Settings) -> "type[Crew]":
    from outrider.gateway.wiring.crew import Crew, prepare_database

    prepare_database(settings)
    return Crew
