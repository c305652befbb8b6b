"""`outrider fleet`: engines on a Ray cluster, as a fleet.toml says."""

import logging
import signal
import threading
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.tools.commands.command_parts import reports_user_errors
from outrider.gateway.tools.commands.fleet.status import status_table
from outrider.gateway.wiring.ray.patience import allow_slow_starts, quieten_serve
from outrider.gateway.wiring.ray.plan import EXAMPLE, FleetPlan, read_plan

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

APPLICATION: Final = "outrider"
_POLL_S: Final = 1.0

_EXAMPLES = """
Engines on one or many machines, started, watched and scaled by Ray Serve.

[bold]Examples[/bold]

  outrider fleet example > fleet.toml  [dim]# then name your models in it[/dim]

  outrider engine keygen fleet.key  [dim]# once[/dim]

  outrider fleet up fleet.toml  [dim]# on this machine alone, until Ctrl-C[/dim]

  ray start --head && outrider fleet up fleet.toml --address auto  [dim]# and stay[/dim]

  outrider fleet status  [dim]# what runs, and where[/dim]

  outrider serve --engines http://127.0.0.1:7800/ --engine-key fleet.key --large Qwen/Qwen3-8B \
  [dim]# a gateway to them; any number of gateways may run[/dim]

  outrider fleet down
"""

OwnOrAddress = Annotated[
    str | None,
    typer.Option(help="Of a Ray cluster, or auto for this machine's; unset: one of its own."),
]
Address = Annotated[
    str, typer.Option(help="Of the fleet's Ray cluster; auto: the one that this machine is in.")
]


@app.callback(help=_EXAMPLES)
def fleet() -> None:
    """Command group; the help is `_EXAMPLES`."""


@app.command()
@reports_user_errors
def up(
    file: Annotated[Path, typer.Argument(help="fleet.toml; see outrider fleet example.")],
    address: OwnOrAddress = None,
) -> None:
    """Start the engines of a fleet.toml, or change those that run to what it says now."""
    plan = read_plan(file)
    if plan.key is not None and not plan.key.is_file():
        raise SettingsError(
            f"key = {str(plan.key)!r} is not there; write it with outrider engine keygen "
            f"{plan.key}."
        )
    ray = _require_ray()
    _connect(ray, address, plan)
    from ray import serve

    from outrider.gateway.wiring.ray.deployments import build_application

    serve.run(build_application(plan), name=APPLICATION, route_prefix="/")
    _show_status()
    typer.echo(f"Gateways find the engines with\n  {_gateway_command(plan)}")
    if address is None:
        typer.echo("The cluster is this command's own; Ctrl-C ends it.")
        _wait_for_signal()
        serve.shutdown()
        ray.shutdown()


@app.command()
@reports_user_errors
def down(address: Address = "auto") -> None:
    """Let running answers end, then end the engines."""
    _connect(_require_ray(), address, None)
    from ray import serve

    serve.delete(APPLICATION)
    typer.echo("The engines have ended.")


@app.command()
@reports_user_errors
def status(address: Address = "auto") -> None:
    """Show the engines: models, replicas, state and addresses. Exit status 1 where none are up."""
    _connect(_require_ray(), address, None)
    if not _show_status():
        raise typer.Exit(1)


@app.command()
def example() -> None:
    """Print a fleet.toml."""
    typer.echo(EXAMPLE, nl=False)


def _require_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise SettingsError(
            "outrider fleet needs Ray Serve, which is not installed: pip install 'outrider[fleet]'."
        ) from None
    return ray


def _connect(ray: Any, address: str | None, plan: FleetPlan | None) -> None:
    """Join a cluster, or start one on this machine. Raises SettingsError."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    logging.getLogger("ray").setLevel(logging.ERROR)
    if address is None:
        allow_slow_starts()
        options["include_dashboard"] = False
    try:
        ray.init(address=address or "local", **options)  # None is any that runs here
    except ConnectionError:
        raise SettingsError(
            f"there is no Ray cluster at --address {address}. Start one with ray start --head; "
            "outrider fleet up without --address brings one of its own."
        ) from None
    from ray import serve

    quieten_serve()
    if plan is not None:
        serve.start(http_options={"host": plan.http_host, "port": plan.http_port})


def _show_status() -> bool:
    """Print the table; False where no fleet runs."""
    from rich.console import Console

    table = status_table(APPLICATION)
    if table is None:
        typer.echo(
            "No fleet runs on this Ray cluster. Start one: outrider fleet up fleet.toml "
            "--address auto",
            err=True,
        )
        return False
    Console().print(table)
    return True


def _gateway_command(plan: FleetPlan) -> str:
    words = ["outrider serve", f"--engines http://{plan.http_host}:{plan.http_port}/"]
    if plan.key is not None:
        words.append(f"--engine-key {plan.key}")
    models = {
        tier: model
        for engine in plan.engines.values()
        for tier, model in (("large", engine.large), ("small", engine.small))
        if model is not None
    }
    words += [f"--{tier} {models.get(tier, 'none')}" for tier in ("large", "small")]
    return " ".join(words)


def _wait_for_signal() -> None:
    """Return at Ctrl-C or SIGTERM, for which Ray has a handler that only prints where it was."""
    has_come = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: has_come.set())
    while not has_come.wait(_POLL_S):  # in short waits, so that handlers run
        pass
    typer.echo("Ending the engines ...", err=True)
