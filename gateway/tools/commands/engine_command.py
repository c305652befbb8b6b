"""`outrider engine`: an engine without a gateway, which gateways connect to; and its keys."""

import os
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.gateway.settings.tree import Settings, load_settings
from outrider.gateway.tools.commands.command import (
    Assignments,
    ChatTemplateOption,
    ConfigFile,
    DeterministicOption,
    DeviceOption,
    DrafterOption,
    DrafterRevision,
    DtypeOption,
    GraphsOption,
    KVDtypeOption,
    LargeOption,
    LargeRevision,
    LogLevelOption,
    LoraOption,
    MismatchOption,
    OverlapOption,
    ParallelOption,
    QuantizeOption,
    Small,
    SmallRevision,
    SpeculationOption,
    ThreadsOption,
    assigned,
    reports_user_errors,
    start_logging,
)
from outrider.gateway.tools.commands.serve_command import ended_by_signals

if TYPE_CHECKING:
    from outrider.gateway.engines.backends.engine_listener import EngineListener

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

_ENGINE_EXAMPLES = """
Run an engine that gateways on this and other machines share.

[bold]Examples[/bold]

  outrider engine keygen fleet.key  [dim]# once; copy the file to every engine and gateway[/dim]

  outrider engine --listen tcp://0.0.0.0:7600 --key fleet.key --large Qwen/Qwen3-8B

  outrider serve --engines tcp://10.0.0.5:7600 --engine-key fleet.key --large Qwen/Qwen3-8B \
  [dim]# a gateway to it, on another machine[/dim]

  outrider engine --listen tcp://127.0.0.1:7600  [dim]# for gateways of this machine: no key[/dim]

SIGTERM lets running answers end (server.drain_timeout_s), a second one does not.
"""


@app.callback(invoke_without_command=True, help=_ENGINE_EXAMPLES)
@reports_user_errors
def engine(  # noqa: PLR0913 - a flag each
    context: typer.Context,
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where gateways connect; port 0 for any free.")
    ] = "tcp://127.0.0.1:7600",
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keys of the fleet; see keygen.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines without keys.")
    ] = False,
    with_parent: Annotated[
        bool, typer.Option("--with-parent", hidden=True, help="End when standard input ends.")
    ] = False,
    config: ConfigFile = None,
    large: LargeOption = None,
    small: Small = None,
    large_revision: LargeRevision = None,
    small_revision: SmallRevision = None,
    drafter: DrafterOption = None,
    drafter_revision: DrafterRevision = None,
    quantize: QuantizeOption = None,
    chat_template: ChatTemplateOption = None,
    lora: LoraOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    num_threads: ThreadsOption = None,
    tensor_parallel: ParallelOption = None,
    speculation: SpeculationOption = None,
    allow_vocab_mismatch: MismatchOption = None,
    kv_cache_dtype: KVDtypeOption = None,
    deterministic: DeterministicOption = None,
    cuda_graphs: GraphsOption = None,
    overlap: OverlapOption = None,
    kv_events: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Publish what the prefix cache keeps and drops, as vLLM does; tcp://127.0.0.1:5557.",
        ),
    ] = None,
    log_level: LogLevelOption = None,
    assignments: Assignments = None,
) -> None:
    """Run an engine; the help is `_ENGINE_EXAMPLES`."""
    if context.invoked_subcommand is not None:
        return
    flags = {
        "models.large": large,
        "models.small": small,
        "models.large_revision": large_revision,
        "models.small_revision": small_revision,
        "models.drafter": drafter,
        "models.drafter_revision": drafter_revision,
        "models.quantize": quantize,
        "models.chat_template": chat_template,
        "adapters.lora": tuple(lora) if lora else None,
        "engine.device": device,
        "engine.dtype": dtype,
        "engine.num_threads": num_threads,
        "engine.tensor_parallel": tensor_parallel,
        "engine.kv_cache_dtype": kv_cache_dtype,
        "engine.deterministic": deterministic,
        "engine.cuda_graphs": cuda_graphs,
        "engine.overlap": overlap,
        "engine.kv_events": kv_events,
        "engine.replicas_key": key,
        "engine.replicas_insecure": insecure or None,
        "speculation.enabled": speculation,
        "speculation.allow_vocab_mismatch": allow_vocab_mismatch,
        "log_level": log_level,
    }
    settings = load_settings(config_file=config, flags=assigned(assignments or []) | flags)
    if with_parent:
        threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    _run(settings, listen, key, insecure=insecure)


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
    from outrider.gateway.wiring.replica import listen_for_gateways

    start_logging(settings.log_level, settings.telemetry.log_format, process="engine")
    keys = None if key is None else read_fleet_keys(key)
    require_safe(endpoint, keys, insecure=insecure)
    with ended_by_signals(), closing(listen_for_gateways(settings, endpoint, keys)) as listener:
        status = _serve(settings, listener, key)
    sys.stderr.flush()
    sys.stdout.flush()
    # Taking torch and Triton apart takes time, and their bindings complain about each other.
    os._exit(status)


def _serve(settings: Settings, listener: "EngineListener", key: Path | None) -> int:
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

        return run_replica(settings, listener, on_progress=progress.report, on_ready=on_ready)
