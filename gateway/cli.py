"""The command line. A command's module is imported when the command is called, not before."""

import importlib
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class _Entry(NamedTuple):
    """A command: the module whose `app` it is, and its line in `outrider --help`."""

    module: str
    summary: str


COMMANDS: Final[Mapping[str, _Entry]] = {
    "serve": _Entry(
        "outrider.gateway.tools.commands.serve_command",
        "Start the gateway and keep it up.",
    ),
    "engine": _Entry(
        "outrider.gateway.tools.commands.engine_command",
        "Run an engine that gateways on this and other machines share.",
    ),
    "fleet": _Entry(
        "outrider.gateway.tools.commands.fleet.fleet_command",
        "Engines on one or many machines, started, watched and scaled by Ray Serve.",
    ),
    "chat": _Entry(
        "outrider.gateway.tools.commands.chat_command",
        "Ask one question, or chat if none is given. Tokens that the small model drafted are "
        "green.",
    ),
    "verify": _Entry(
        "outrider.gateway.tools.commands.verify.verify_command",
        "Check an answer against its receipt, by one pass of a model; exit status 1 if they "
        "differ.",
    ),
    "doctor": _Entry(
        "outrider.gateway.tools.commands.doctor.doctor_command",
        "Check whether Outrider can run here; exit status 1 if something stands in its way.",
    ),
    "models": _Entry(
        "outrider.gateway.tools.commands.models.models_command",
        "Fetch public models and list them; load a gateway's models on demand.",
    ),
    "cache": _Entry(
        "outrider.gateway.tools.commands.cache_command",
        "Keep prompts by name; look into the folder of keys and values (engine.kv_folder).",
    ),
    "config": _Entry(
        "outrider.gateway.tools.commands.config_command",
        "Show and write settings.",
    ),
    "keys": _Entry(
        "outrider.gateway.tools.commands.keys_cli",
        "API keys and teams: create, list, change and revoke them.",
    ),
    "usage": _Entry(
        "outrider.gateway.tools.commands.usage_cli",
        "Show usage, its cost and the clients' charges.",
    ),
    "audit": _Entry(
        "outrider.gateway.tools.commands.audit_cli",
        "Administrative changes: list, export and verify their log.",
    ),
    "alerts": _Entry(
        "outrider.gateway.tools.commands.alerts_cli",
        "Alerts about budgets and failures: try the webhook.",
    ),
    "retention": _Entry(
        "outrider.gateway.tools.commands.retention_command",
        "List what is kept of tenants and their texts, where, and for how long.",
    ),
    "erase": _Entry(
        "outrider.gateway.tools.commands.erase_command",
        "Remove what is kept of a tenant or of an end user, or take its identity away.",
    ),
    "experiment": _Entry(
        "outrider.gateway.tools.commands.experiments_cli",
        "A/B experiments: create, run and evaluate them.",
    ),
    "bench": _Entry(
        "outrider.gateway.tools.measuring.bench.options",
        "Measure an OpenAI-compatible server: latencies, throughput, and the rate that it carries.",
    ),
    "plan": _Entry(
        "outrider.gateway.tools.measuring.plan.plan_command",
        "Plan capacity: users, latency and cost, simulated from step times that are measured on "
        "this machine, or from a GPU's data sheet.",
    ),
    "router": _Entry(
        "outrider.gateway.tools.learning.routers.commands",
        "Train and evaluate the router, which picks the model for a request.",
    ),
    "draft": _Entry(
        "outrider.gateway.tools.learning.drafters.commands",
        "Train a drafter for a large model, tune how it drafts, compare several.",
    ),
}


class _LazyCommand(TyperCommand):
    """Stands in a list of commands for one whose module is imported when it is called."""

    def __init__(self, name: str, entry: _Entry) -> None:
        super().__init__(name, help=entry.summary)
        self._module = entry.module

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Return the context of the command itself, so that it is what runs."""
        app = importlib.import_module(self._module).app
        return typer.main.get_command(app).make_context(*args, **options)


class _Commands(TyperGroup):
    """All of `COMMANDS`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: _LazyCommand(name, entry) for name, entry in COMMANDS.items()}


app = typer.Typer(
    name="outrider",
    cls=_Commands,
    help="A latency-first gateway for language models.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(is_wanted: bool) -> None:
    """Print the versions of what answers requests, as an issue should name them."""
    if not is_wanted:
        return
    import platform
    from contextlib import suppress
    from importlib.metadata import PackageNotFoundError, version

    found = [f"Python {platform.python_version()}"]
    for name in ("torch", "transformers"):  # of extras
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    typer.echo(f"outrider {version('outrider')} ({', '.join(found)})")
    raise typer.Exit


@app.callback()
def outrider(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Take the options that belong to no command."""


def main() -> None:
    """Entry point of the `outrider` command."""
    app()


if __name__ == "__main__":
    main()
