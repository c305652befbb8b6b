"""The command line: `outrider serve | chat | bench | plan | experiment | keys | usage | …`."""

import importlib.util
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.events import EngineInfo
from gateway.schema.kinds import Policy
from gateway.settings.tree import (
    DEFAULT_FILE,
    KEY_VARIABLE,
    Settings,
    SettingsError,
    load_settings,
    to_toml,
)
from gateway.tools.admin.experiments_cli import app as experiment_app
from gateway.tools.admin.keys_cli import app as keys_app
from gateway.tools.admin.usage_cli import USAGE_HELP, usage
from gateway.tools.bench.options import BENCH_HELP, bench
from gateway.tools.console.command import (
    EXIT_FAILED,
    Assignments,
    ConfigFile,
    Device,
    Dtype,
    Large,
    NumThreads,
    Small,
    Tiers,
    assigned,
    reports_user_errors,
    tier_flags,
)
from gateway.tools.plan.command import PLAN_HELP, plan

DEFAULT_URL = "http://127.0.0.1:8000"

app = typer.Typer(
    name="outrider",
    help="A latency-first gateway for language models.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
config_app = typer.Typer(name="config", help="See and write settings.", no_args_is_help=True)
app.add_typer(config_app)
app.add_typer(keys_app)
app.add_typer(experiment_app)
app.command("usage", help=USAGE_HELP)(usage)
app.command("bench", help=BENCH_HELP)(bench)
app.command("plan", help=PLAN_HELP)(plan)
if importlib.util.find_spec("gateway.tools.routers.commands") is not None:
    from gateway.tools.routers.commands import app as router_app

    app.add_typer(router_app)
if importlib.util.find_spec("gateway.tools.drafters.commands") is not None:
    from gateway.tools.drafters.commands import app as draft_app

    app.add_typer(draft_app)


def main() -> None:
    """Entry point of the `outrider` command."""
    app()


_SERVE_EXAMPLES = """
Start the gateway and keep it up.

[bold]Examples[/bold]

  outrider serve  [dim]# the pair that comes with Outrider[/dim]

  outrider serve --large Qwen/Qwen3-8B --small Qwen/Qwen3-0.6B --device cuda

  outrider serve --large ./my-model --port 9000  [dim]# one tier, no speculation[/dim]

  outrider serve --config prod.toml --set engine.max_sequences=128

  outrider serve --large none --tier cloud=https://host/v1 --set tiers.cloud.api_key_env=KEY \
  [dim]# a small model here, a large one elsewhere[/dim]

  outrider serve --large none --small none --tier gpu=http://a:8000/v1 --tier gpu=http://b:8000/v1 \
  [dim]# no model here: one door to two replicas[/dim]

Every setting can also come from outrider.toml ([bold]outrider config init[/bold] writes one) or
the environment (OUTRIDER_SERVER__PORT=9000). Flags win over the environment, which wins over the
file.
"""


@app.command(help=_SERVE_EXAMPLES)
@reports_user_errors
def serve(  # noqa: PLR0913 - a flag each
    config: ConfigFile = None,
    large: Large = None,
    small: Small = None,
    router: Annotated[str | None, typer.Option(help="Folder of a trained router.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 for any free.")] = None,
    num_threads: NumThreads = None,
    speculation: Annotated[
        bool | None, typer.Option("--speculation/--no-speculation", help="Draft or not.")
    ] = None,
    allow_vocab_mismatch: Annotated[
        bool | None,
        typer.Option("--allow-vocab-mismatch", help="Draft across different tokenizers."),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="auto or fp8, which holds twice as many tokens.")
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--no-deterministic", help="The same tokens whatever runs beside them."
        ),
    ] = None,
    cuda_graphs: Annotated[
        bool | None,
        typer.Option("--cuda-graphs/--no-cuda-graphs", help="Replay recorded passes on a GPU."),
    ] = None,
    overlap: Annotated[
        bool | None,
        typer.Option(
            "--overlap/--no-overlap", help="Do what is left of a step while the GPU runs the next."
        ),
    ] = None,
    tiers: Tiers = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING, ERROR.")] = None,
    assignments: Assignments = None,
) -> None:
    """Start the gateway; the help is `_SERVE_EXAMPLES`."""
    from gateway.tools.doctor.doctor import refuse_conflicts

    refuse_conflicts()
    flags = {
        "models.large": large,
        "models.small": small,
        "models.router": router,
        "engine.device": device,
        "engine.dtype": dtype,
        "engine.num_threads": num_threads,
        "engine.kv_cache_dtype": kv_cache_dtype,
        "engine.deterministic": deterministic,
        "engine.cuda_graphs": cuda_graphs,
        "engine.overlap": overlap,
        "server.host": host,
        "server.port": port,
        "speculation.enabled": speculation,
        "speculation.allow_vocab_mismatch": allow_vocab_mismatch,
        "log_level": log_level,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    given |= tier_flags(tiers or [])
    settings = load_settings(config_file=config, flags=assigned(assignments or []) | given)
    _serve(settings)


def _serve(settings: Settings) -> None:
    """Run until a signal says otherwise."""
    from gateway.wiring.build import keep_torch_out

    _configure_logging(settings.log_level, settings.telemetry.log_format)
    if settings.engine.process or not settings.models.is_any:
        keep_torch_out()
    from gateway.server.serving import GatewayRun, listen, serve_until_signalled, url_of
    from gateway.tools.console.terminal import LoadingProgress, make_console, print_banner
    from gateway.wiring.tenancy import serving_host

    host, warning = serving_host(settings)
    if warning is not None:
        typer.secho(f"outrider: {warning}", fg=typer.colors.YELLOW, err=True)
    listener = listen(host, settings.server.port)
    url = url_of(listener)
    with LoadingProgress(make_console(stderr=True)) as progress:

        def on_ready(info: EngineInfo) -> None:
            progress.stop()
            print_banner(make_console(), url, info, settings.tiers)

        serve_until_signalled(
            GatewayRun(settings, listener, on_progress=progress.report, on_ready=on_ready)
        )


_CHAT_HELP = """
Ask a question; without one, talk. Tokens that the small model drafted are green.

Uses the gateway at --url if one answers there, else starts an engine of its own for this chat.

[bold]Examples[/bold]

  outrider chat "What is 4786 + 3957?"

  outrider chat --model large --temperature 0.8 --seed 7 "Add 4827 and 1965."

  outrider chat --model cloud "Who are you?"  [dim]# a tier elsewhere[/dim]

  outrider chat --policy prefer_cloud --deadline-ms 2000 "Who are you?"

  outrider chat
"""


@app.command(help=_CHAT_HELP)
@reports_user_errors
def chat(  # noqa: PLR0913 - a flag each
    prompt: Annotated[str | None, typer.Argument(help="The question.")] = None,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="OUTRIDER_URL", help=f"A running gateway; else {DEFAULT_URL} is tried."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="auto, small, large, a tier elsewhere or a model that it lists.")
    ] = "auto",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Length of an answer.")] = None,
    speculation: Annotated[
        bool, typer.Option("--speculation/--no-speculation", help="Draft or not.")
    ] = True,
    policy: Annotated[
        Policy | None, typer.Option(help="Who may answer: models here, a tier elsewhere.")
    ] = None,
    is_private: Annotated[
        bool, typer.Option("--private", help="Nothing leaves the gateway's machine.")
    ] = False,
    deadline_ms: Annotated[
        float | None, typer.Option(min=1.0, help="The time for a whole answer.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(envvar=KEY_VARIABLE, help="Your key, where the gateway wants one."),
    ] = None,
    config: ConfigFile = None,
    large: Large = None,
    small: Small = None,
    tiers: Tiers = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Chat in the terminal; the help is `_CHAT_HELP`."""
    import httpx

    from gateway.tools.console.terminal import make_console
    from gateway.tools.console.terminal_chat import (
        ChatError,
        ChatOptions,
        converse,
        is_reachable,
        say,
    )

    console = make_console()
    options = ChatOptions(
        model=model,
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        speculation=speculation,
        policy=policy,
        is_private=is_private,
        deadline_ms=deadline_ms,
    )

    def talk(base_url: str) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(30.0, read=None)
        with httpx.Client(base_url=base_url, timeout=timeout, headers=headers) as client:
            if prompt is None:
                converse(console, client, options)
            else:
                say(console, client, options, [{"role": "user", "content": prompt}])

    flags = {
        "models.large": large,
        "models.small": small,
        "engine.device": device,
        "engine.dtype": dtype,
        **tier_flags(tiers or []),
    }
    wants_own_engine = config is not None or any(value is not None for value in flags.values())
    # People have the address at hand as OpenAI's clients take it.
    running = (url or DEFAULT_URL).rstrip("/").removesuffix("/v1")
    if not wants_own_engine and is_reachable(running):
        talk(running)
    elif url is not None and not wants_own_engine:
        raise ChatError(f"no gateway answers at {url}; start one with `outrider serve`")
    else:
        _chat_with_own_engine(load_settings(config_file=config, flags=flags), talk)


def _chat_with_own_engine(settings: Settings, talk: Callable[[str], None]) -> None:
    """Start a private gateway for the length of a conversation."""
    from gateway.tools.console.terminal import LoadingProgress, make_console
    from gateway.tools.doctor.doctor import refuse_conflicts
    from gateway.wiring.build import keep_torch_out

    refuse_conflicts()
    _configure_logging("WARNING")
    if settings.engine.process or not settings.models.is_any:
        keep_torch_out()
    from gateway.server.serving import background_gateway

    with (
        LoadingProgress(make_console(stderr=True)) as progress,
        background_gateway(settings, progress.report) as base_url,
    ):
        progress.stop()
        talk(base_url)


@app.command()
@reports_user_errors
def doctor(  # noqa: PLR0913 - a flag each
    config: ConfigFile = None,
    large: Large = None,
    small: Small = None,
    device: Device = None,
    port: Annotated[int | None, typer.Option(help="The port that is to be free.")] = None,
    tiers: Tiers = None,
    assignments: Assignments = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check whether Outrider can run here; exit status 1 if something stands in its way."""
    from gateway.tools.console.terminal import make_console, print_check
    from gateway.tools.doctor.doctor import examine

    flags = {
        "models.large": large,
        "models.small": small,
        "engine.device": device,
        "server.port": port,
        **tier_flags(tiers or []),
    }
    checks = []
    console = make_console()
    given = {key: value for key, value in flags.items() if value is not None}
    settings = load_settings(config_file=config, flags=assigned(assignments or []) | given)
    for check in examine(settings):
        checks.append(check)
        if not as_json:
            print_check(console, check.status, check.name, check.detail, check.advice)
    is_well = all(check.status != "failed" for check in checks)
    if as_json:
        document = {"ok": is_well, "checks": [asdict(check) for check in checks]}
        typer.echo(json.dumps(document, indent=2))
    if not is_well:
        raise typer.Exit(EXIT_FAILED)


@config_app.command("show")
@reports_user_errors
def config_show(config: ConfigFile = None) -> None:
    """Print the settings in effect: file and environment over the defaults."""
    typer.echo(to_toml(load_settings(config_file=config)), nl=False)


@config_app.command("init")
@reports_user_errors
def config_init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path(DEFAULT_FILE),
) -> None:
    """Write a settings file with every default and what it means."""
    text = to_toml(Settings())
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise SettingsError(f"{path} exists already; name another file") from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from None
    typer.echo(f"wrote {path}")


def _configure_logging(level: str, log_format: Literal["text", "json"] = "text") -> None:
    from gateway.telemetry.logs import configure_logging

    if not logging.getLogger().handlers:  # else another program has its own, and calls us
        configure_logging(level, log_format)


if __name__ == "__main__":
    sys.exit(main())  # type: ignore[func-returns-value]
