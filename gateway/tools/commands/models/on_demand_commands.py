"""`outrider models ls | load | unload`: models on demand of a running gateway."""

import asyncio
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from outrider.gateway.settings.tree import KEY_VARIABLE
from outrider.gateway.tools.commands.chat_command import DEFAULT_URL
from outrider.gateway.tools.commands.command_parts import reports_user_errors

_TIMEOUT_S: Final = 3600.0
"""A large model takes minutes to load, and longer to download."""
_GIB: Final = 2**30

Name = Annotated[str, typer.Argument(help="The model's name: its tier's in the settings.")]
Url = Annotated[str, typer.Option(envvar="OUTRIDER_URL", help="URL of the gateway.")]
Key = Annotated[
    str | None,
    typer.Option(envvar=KEY_VARIABLE, help="A key with the admin scope, or the admin token."),
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("ls")(ls)
    app.command()(load)
    app.command()(unload)


@reports_user_errors
def ls(*, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """List a running gateway's models on demand, with their states."""
    from rich.table import Table

    from outrider.gateway.tools.commands.terminal import make_console, print_whole

    models = _ask("GET", url, "", key)["data"]
    table = Table(box=None, pad_edge=False)
    for title in ("name", "state", "memory", "requests", "idle", "loads in"):
        table.add_column(title)
    for model in models:
        requests = model["num_in_flight"] + model["num_waiting"]
        table.add_row(
            model["name"],
            model["state"] + (f": {model['reason']}" if model["reason"] else ""),
            f"{model['memory_bytes'] / _GIB:.3g} GiB",
            str(requests),
            _seconds(model["idle_s"]),
            _seconds(model["load_s"]),
        )
    print_whole(make_console(), table)


@reports_user_errors
def load(name: Name, *, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Load a model of a running gateway before a request names it."""
    model = _ask("POST", url, f"/{quote(name, safe='')}/load", key)
    typer.echo(f"{name} is loaded; that took {_seconds(model['load_s'])}")


@reports_user_errors
def unload(name: Name, *, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Put a model out that no request needs."""
    _ask("POST", url, f"/{quote(name, safe='')}/unload", key)
    typer.echo(f"{name} is not loaded any more")


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:,.1f} s"


def _ask(method: str, url: str, path: str, key: str | None) -> dict[str, Any]:
    """Return what the gateway says. Raises ChatError."""
    from outrider.gateway.tools.commands.session import ask_gateway

    place = f"{url.rstrip('/').removesuffix('/v1')}/admin/models{path}"
    return asyncio.run(ask_gateway(method, place, key=key, timeout_s=_TIMEOUT_S))
