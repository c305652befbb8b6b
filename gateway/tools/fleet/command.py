"""`outrider fleet`: engines on a Ray cluster, as a fleet.toml says."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gateway.ray_fleet.patience import be_patient
from gateway.ray_fleet.plan import EXAMPLE, FleetPlan, read_plan
from gateway.settings.tree import SettingsError
from gateway.tools.console.command import reports_user_errors

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

APPLICATION: Final = "outrider"
_POLL_S: Final = 1.0

_EXAMPLES = """
Engines on many machines, started, watched and scaled by Ray Serve.

[bold]Examples[/bold]

  outrider engine keygen fleet.key  [dim]# once[/dim]

  outrider fleet up fleet.toml  [dim]# on this machine alone, until Ctrl-C[/dim]

  outrider fleet up fleet.toml --address auto  [dim]# on this machine's Ray cluster[/dim]

  outrider fleet example > fleet.toml

  outrider serve --engines http://127.0.0.1:7800/ --engine-key fleet.key --large Qwen/Qwen3-8B \
  [dim]# a gateway to them; any number of gateways may run[/dim]
"""

Address = Annotated[
    str | None,
    typer.Option(help="Of a Ray cluster, or auto for this machine's; unset: one of its own."),
]


@app.callback(help=_EXAMPLES)
def fleet() -> None:
    """Command group; the help is `_EXAMPLES`."""


@app.command()
@reports_user_errors
def up(
    file: Annotated[Path, typer.Argument(help="fleet.toml; see outrider fleet example.")],
    address: Address = None,
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

    from gateway.ray_fleet.deployments import build_application

    serve.run(build_application(plan), name=APPLICATION, route_prefix="/")
    _show_status()
    typer.echo(f"Gateways find the engines with\n  {_gateway_command(plan)}")
    if address is None:
        typer.echo("The cluster is this command's own; Ctrl-C ends it.")
        _wait_for_interrupt()
        serve.shutdown()
        ray.shutdown()


@app.command()
@reports_user_errors
def down(address: Address = "auto") -> None:
    """Let running answers end, then end the engines."""
    ray = _require_ray()
    _connect(ray, address or "auto", None)
    from ray import serve

    serve.delete(APPLICATION)
    typer.echo("The engines have ended.")


@app.command()
@reports_user_errors
def status(address: Address = "auto") -> None:
    """Show how many replicas run, and what state they are in."""
    _connect(_require_ray(), address or "auto", None)
    _show_status()


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
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "WARNING"}
    if address is None:
        be_patient()
        options["include_dashboard"] = False
    try:
        ray.init(address=address, **options)
    except ConnectionError as error:
        raise SettingsError(
            f"there is no Ray cluster at --address {address}: {error}. Start one with ray start "
            "--head, or leave --address out for one on this machine."
        ) from None
    if plan is not None:
        from ray import serve

        serve.start(http_options={"host": plan.http_host, "port": plan.http_port})


def _show_status() -> None:
    from rich.console import Console

    Console().print(_table())


def _table() -> "Table":
    from ray import serve
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title_justify="left")
    for name in ("engines", "state", "replicas", ""):
        table.add_column(name)
    application = serve.status().applications.get(APPLICATION)
    for name, deployment in (application.deployments if application else {}).items():
        if name == "directory":
            continue
        counts = ", ".join(
            f"{count} {state.lower()}" for state, count in deployment.replica_states.items()
        )
        table.add_row(name, str(deployment.status.value).lower(), counts, deployment.message)
    return table


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


def _wait_for_interrupt() -> None:
    try:
        while True:
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        typer.echo("Ending the engines ...", err=True)
