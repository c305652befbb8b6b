"""`outrider engine`: an engine without a gateway, which gateways connect to; and its keys."""

import os
import sys
import threading
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outrider.gateway.settings.tree import Settings, load_settings
from outrider.gateway.tools.commands.command_parts import (
    CommonFlags,
    ModelFlags,
    assigned,
    reports_user_errors,
    start_logging,
)
from outrider.gateway.tools.commands.flags import Sets, setting_flags, takes_flags
from outrider.gateway.tools.commands.serve_command import ended_by_signals

if TYPE_CHECKING:
    from outrider.gateway.engines.backends.engine_listener import EngineListener
    from outrider.gateway.engines.backends.peer_lines import PeerLines

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

_ENGINE_EXAMPLES = """
Run an engine that gateways on this and other machines share.

[bold]Examples[/bold]

  outrider engine keygen fleet.key  [dim]# once; copy the file to every engine and gateway[/dim]

  outrider engine --listen tcp://0.0.0.0:7600 --key fleet.key --large Qwen/Qwen3-8B

  outrider serve --engines tcp://10.0.0.5:7600 --engine-key fleet.key --large Qwen/Qwen3-8B \
  [dim]# a gateway to it, on another machine[/dim]

  outrider engine --listen tcp://0.0.0.0:7601 --key fleet.key --large Qwen/Qwen3-8B --role prefill \
  [dim]# computes long prompts for engines with --role decode[/dim]

  outrider engine --listen tcp://127.0.0.1:7600  [dim]# for gateways of this machine: no key[/dim]

SIGTERM lets running answers end (server.drain_timeout_s), a second one does not.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenFlags:
    """Where an engine listens, and for whom."""

    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where gateways connect; port 0 for any free.")
    ] = "tcp://127.0.0.1:7600"
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keys of the fleet; see keygen."),
        Sets("engine.replicas_key"),
    ] = None
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="Serve other machines without keys."),
        Sets("engine.replicas_insecure"),
    ] = None
    with_parent: Annotated[
        bool, typer.Option("--with-parent", hidden=True, help="End when standard input ends.")
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags(ModelFlags):
    """An engine's models, its events, and its part among others."""

    role: Annotated[
        Literal["both", "prefill", "decode"] | None,
        typer.Option(help="Beside other engines: compute prompts for them, or have it done there."),
        Sets("engine.role"),
    ] = None

    kv_events: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Publish what the prefix cache keeps and drops, as vLLM does; tcp://127.0.0.1:5557.",
        ),
        Sets("engine.kv_events"),
    ] = None


@app.callback(invoke_without_command=True, help=_ENGINE_EXAMPLES)
@reports_user_errors
@takes_flags
def engine(
    context: typer.Context, own: ListenFlags, models: EngineFlags, common: CommonFlags
) -> None:
    """Run an engine; the help is `_ENGINE_EXAMPLES`."""
    if context.invoked_subcommand is not None:
        return
    flags = assigned(common.assignments) | setting_flags(own, models, common)
    settings = load_settings(config_file=models.config, flags=flags)
    if own.with_parent:
        threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    _run(settings, own.listen, own.key, insecure=bool(own.insecure))


def _end_with_parent() -> None:
    """Wait for the end of standard input: whatever started this process has ended."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


@app.command()
@reports_user_errors
def keygen(
    file: Annotated[Path, typer.Argument(help="A new file; engines and gateways need a copy.")],
) -> None:
    """Write the keys with which a fleet's engines and gateways know each other."""
    from outrider.gateway.engines.backends.fleet_keys import write_fleet_keys

    write_fleet_keys(file)
    typer.echo(
        f"{file} is written. Copy it to every engine (--key) and gateway (--engine-key), by a "
        "secret way: whoever has it can use the engines."
    )


def _run(settings: Settings, endpoint: str, key: Path | None, *, insecure: bool) -> None:
    """Take the address, then load and serve until a signal says otherwise."""
    from outrider.gateway.engines.backends.fleet_keys import read_fleet_keys, require_safe
    from outrider.gateway.engines.backends.peer_lines import PeerLines
    from outrider.gateway.wiring.replica import listen_for_gateways

    start_logging(settings.log_level, settings.telemetry.log_format, process="engine")
    keys = None if key is None else read_fleet_keys(key)
    require_safe(endpoint, keys, insecure=insecure)
    with (
        ended_by_signals(),
        closing(listen_for_gateways(settings, endpoint, keys)) as listener,
        closing(PeerLines(keys, is_insecure=insecure)) as peers,
    ):
        status = _serve(settings, listener, peers, key)
    sys.stderr.flush()
    sys.stdout.flush()
    # Taking torch and Triton apart takes time, and their bindings complain about each other.
    os._exit(status)


def _serve(
    settings: Settings, listener: "EngineListener", peers: "PeerLines", key: Path | None
) -> int:
    from outrider.engine.events import EngineInfo
    from outrider.gateway.tools.commands.terminal import (
        LoadingProgress,
        make_console,
        print_engine_banner,
    )
    from outrider.gateway.wiring.replica import run_replica

    with LoadingProgress(make_console(stderr=True)) as progress:

        def on_ready(info: EngineInfo) -> None:
            progress.stop()
            named = None if key is None else str(key)
            print_engine_banner(make_console(), listener.endpoint, info, named)

        return run_replica(
            settings, listener, peers, on_progress=progress.report, on_ready=on_ready
        )
