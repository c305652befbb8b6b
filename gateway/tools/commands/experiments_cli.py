"""`outrider experiment`: create, run, edit and report on experiments.

It works on the database, beside running gateways, which look at it again every second.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.gateway.settings.extras import need_extra
from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.tools.commands.database_cli import (
    DatabaseFlags,
    ShownDatabaseFlags,
    Yes,
    checked,
    confirm,
    echo_json,
)
from outrider.gateway.tools.commands.experiment_size import SIZE_HELP, size
from outrider.gateway.tools.commands.flags import takes_flags
from outrider.gateway.tools.commands.user_errors import EXIT_FAILED

if TYPE_CHECKING:
    from outrider.gateway.experiments.records import ExperimentRecord
    from outrider.gateway.experiments.reporting import Reporter
    from outrider.gateway.experiments.store import ExperimentStore

app = typer.Typer(
    name="experiment",
    help="A/B experiments: create, run and evaluate them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
)

app.command("size", help=SIZE_HELP)(size)

ExperimentArgument = Annotated[str, typer.Argument(metavar="NAME", help="The experiment's name.")]
Arms = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        metavar='"NAME SETTING=VALUE ..."',
        help="An arm and the fields of the outrider object that it sets, or weight=N; repeatable.",
    ),
]
FieldValues = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Any field by its path, such as metric=ttft or guardrails.error_share=0.02.",
    ),
]
VersionOption = Annotated[int | None, typer.Option(min=1, help="Version; default: the newest.")]
SpecFile = Annotated[
    Path | None, typer.Option("--file", help="All fields as JSON, as /admin/experiments has them.")
]

_CREATE_HELP = """
Make an experiment. It runs when it is started, also in gateways that run already.

[bold]Examples[/bold]

  outrider experiment create drafts --arm "control max_draft_nodes=8" --arm "deep max_draft_nodes=32" --start

  outrider experiment create router --arm control --arm "bold threshold=0.4" --unit conversation --share 0.1

  outrider experiment create holds --arm control --arm "short hold_back_ms=80" --set metric=ttft --set slo.ttft_ms=300

  outrider experiment create cheap --arm "control weight=9" --arm "small tier=small weight=1" --set guardrails.error_share=0.02

A request that sets such a setting itself takes no part and keeps its own value.
"""  # noqa: E501 - what is typed stands on one line


@app.command(help=_CREATE_HELP)
@takes_flags
def create(  # noqa: PLR0913 - a flag each
    name: ExperimentArgument,
    arms: Arms = None,
    unit: Annotated[
        str | None,
        typer.Option(help="Unit that stays in its arm: user, key, conversation or request."),
    ] = None,
    layer: Annotated[
        str | None, typer.Option(help="Experiments of one layer share no units.")
    ] = None,
    share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the units that take part.")
    ] = 1.0,
    fields: FieldValues = None,
    file: SpecFile = None,
    start: Annotated[bool, typer.Option("--start", help="Start it immediately.")] = False,
    *,
    database: ShownDatabaseFlags,
) -> None:
    """Make an experiment; the help is `_CREATE_HELP`."""
    with _store(database) as store:
        from outrider.gateway.experiments.admin_schema import ExperimentCreate

        wanted = _document(file)
        for field, value in (("unit", unit), ("layer", layer)):
            if value is not None:
                wanted[field] = value
        _put_arms(wanted, arms or [])
        _put_fields(wanted, fields or [])
        order = checked(ExperimentCreate, {"share": share} | wanted | {"name": name})
        record = store.create(name, order.spec(), share=order.share)
        if start:
            record = _started_or_gone(store, name)
        _say(record, "Made", database.as_json)


@app.command("list")
@takes_flags
def list_experiments(database: ShownDatabaseFlags) -> None:
    """List all experiments."""
    with _store(database) as store:
        from outrider.gateway.experiments.admin_schema import experiment_report
        from outrider.gateway.experiments.experiment_tables import print_experiments
        from outrider.gateway.tools.commands.terminal import make_console

        records = list(store.load().experiments.values())
        if database.as_json:
            echo_json([experiment_report(record) for record in records])
        else:
            print_experiments(make_console(), records)


@app.command()
@takes_flags
def show(name: ExperimentArgument, database: ShownDatabaseFlags) -> None:
    """Show one experiment: its arms, its versions, and what was done to it."""
    with _store(database) as store:
        from outrider.gateway.experiments.admin_schema import experiment_detail
        from outrider.gateway.experiments.experiment_tables import print_experiment
        from outrider.gateway.tools.commands.terminal import make_console

        record, versions, events = store.get(name), store.versions(name), store.events(name)
        if database.as_json:
            echo_json(experiment_detail(record, versions, events))
        else:
            print_experiment(make_console(), record, events)


@app.command()
@takes_flags
def start(name: ExperimentArgument, database: ShownDatabaseFlags) -> None:
    """Let it run. Running gateways know it within seconds."""
    with _store(database) as store:
        _say(store.start(name), "Started", database.as_json)


@app.command()
@takes_flags
def stop(name: ExperimentArgument, database: ShownDatabaseFlags) -> None:
    """Let it run no more. Its data stay."""
    with _store(database) as store:
        _say(store.stop(name), "Stopped", database.as_json)


@app.command()
@takes_flags
def ramp(
    name: ExperimentArgument,
    share: Annotated[float, typer.Argument(min=0.0, max=1.0, help="Such as 0.25.")],
    *,
    database: ShownDatabaseFlags,
) -> None:
    """Change the share of the units that take part; when it grows, no unit leaves."""
    with _store(database) as store:
        _say(store.ramp(name, share), "Ramped", database.as_json)


@app.command()
@takes_flags
def edit(
    name: ExperimentArgument,
    arms: Arms = None,
    remove_arms: Annotated[
        list[str] | None, typer.Option("--remove-arm", help="Remove this arm; repeatable.")
    ] = None,
    fields: FieldValues = None,
    *,
    database: ShownDatabaseFlags,
) -> None:
    """Save a new version of an experiment; its data are kept apart from earlier versions."""
    with _store(database) as store:
        from outrider.gateway.experiments.rows import spec_document
        from outrider.gateway.settings.experiments import ExperimentSpec

        wanted = spec_document(store.get(name).spec)
        for arm in remove_arms or []:
            if wanted["arms"].pop(arm, None) is None:
                raise SettingsError(f"--remove-arm {arm}: {name} has no such arm")
        _put_arms(wanted, arms or [], replaceable=set(wanted["arms"]))
        _put_fields(wanted, fields or [])
        _say(store.edit(name, checked(ExperimentSpec, wanted)), "Edited", database.as_json)


@app.command()
@takes_flags
def delete(
    name: ExperimentArgument,
    yes: Yes = False,
    *,
    flags: DatabaseFlags,
) -> None:
    """Forget an experiment that does not run, with all its data."""
    confirm(f"Delete {name} with all its data? It cannot be undone.", yes=yes)
    with flags.opened(kept="database of experiments") as (_, database):
        from outrider.gateway.experiments.measure_store import MeasureStore
        from outrider.gateway.experiments.store import ExperimentStore

        ExperimentStore(database).delete(name)
        MeasureStore(database).delete(name)
        typer.echo(f"Deleted {name}.")


@app.command()
@takes_flags
def report(
    name: ExperimentArgument,
    version: VersionOption = None,
    png: Annotated[
        Path | None, typer.Option(help="Also draw it into this file (needs matplotlib).")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write it as a page.")] = None,
    *,
    database: ShownDatabaseFlags,
) -> None:
    """Say what may be concluded now. Look as often as you like: it stays valid."""
    with _reporter(database) as reporter:
        from outrider.gateway.experiments.statistics.report_text import print_report
        from outrider.gateway.tools.commands.terminal import make_console

        analysis = reporter.report(name, version)
        if png is not None or html is not None:
            from outrider.gateway.tools.commands.experiment_page import write_files

            write_files(analysis, png, html)
        if database.as_json:
            echo_json(analysis.document())
        else:
            print_report(analysis, make_console())


@app.command()
@takes_flags
def check(
    name: ExperimentArgument,
    version: VersionOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random splits.")] = 0,
    *,
    database: ShownDatabaseFlags,
) -> None:
    """Check the statistics on the experiment's own data, split at random where nothing differs.

    Exit status 1 where they are not to be trusted.
    """
    with _reporter(database) as reporter:
        import numpy as np

        from outrider.gateway.experiments.statistics.report_text import print_check
        from outrider.gateway.tools.commands.terminal import make_console

        result = reporter.check(name, version, np.random.default_rng(seed))
        if database.as_json:
            echo_json(result.document())
        else:
            print_check(result, make_console())
        if not result.is_sound:
            raise typer.Exit(EXIT_FAILED)


@contextmanager
def _store(flags: DatabaseFlags) -> "Iterator[ExperimentStore]":
    with flags.opened(kept="database of experiments") as (_, database):
        from outrider.gateway.experiments.store import ExperimentStore

        yield ExperimentStore(database)


@contextmanager
def _reporter(flags: DatabaseFlags) -> "Iterator[Reporter]":
    with flags.opened(kept="database of experiments") as (_, database):
        need_extra("experiments", "Evaluating an experiment")
        from outrider.gateway.experiments.measure_store import MeasureStore
        from outrider.gateway.experiments.reporting import Reporter
        from outrider.gateway.experiments.store import ExperimentStore

        yield Reporter(ExperimentStore(database), MeasureStore(database))


def _started_or_gone(store: "ExperimentStore", name: str) -> "ExperimentRecord":
    """Start a new experiment; where that is not possible, nothing is left of it."""
    try:
        return store.start(name)
    except Exception:
        store.delete(name)
        raise


def _document(file: Path | None) -> dict[str, Any]:
    """The fields in a JSON file. Raises SettingsError."""
    if file is None:
        return {}
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--file {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"--file {file} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise SettingsError(f"--file {file}: must be a JSON object with the experiment's fields")
    return document


def _put_arms(
    wanted: dict[str, Any], texts: list[str], *, replaceable: set[str] | None = None
) -> None:
    """`NAME SETTING=VALUE ...` into the arms, in place of the one of `replaceable` so called.

    Raises SettingsError for another form, and for two arms of one name.
    """
    old = set(replaceable or ())
    for text in texts:
        name, *settings = text.split() or [""]
        arms = wanted.setdefault("arms", {})
        if not name or "=" in name:
            raise SettingsError(
                f'--arm {text}: write it as --arm "NAME SETTING=VALUE", such as '
                '--arm "deep max_draft_nodes=32"'
            )
        if name in arms and name not in old:
            raise SettingsError(f"--arm {name}: two arms have this name")
        arm: dict[str, Any] = {"set": {}}
        for setting in settings:
            path, value = _pair("--arm", setting)
            _put(arm if path == ["weight"] else arm["set"], path, value, f"--arm {text}")
        arms[name] = arm
        old.discard(name)


def _put_fields(wanted: dict[str, Any], texts: list[str]) -> None:
    """`FIELD=VALUE` into the experiment's fields. Raises SettingsError for another form."""
    for text in texts:
        path, value = _pair("--set", text)
        _put(wanted, path, value, f"--set {text}")


def _pair(flag: str, text: str) -> tuple[list[str], Any]:
    """`a.b=1` as (["a", "b"], 1). What is no JSON is text; commas make a list of texts."""
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        raise SettingsError(f"{flag} {text}: write it as NAME=VALUE")
    try:
        return path.split("."), json.loads(value)
    except ValueError:
        is_list = "," in value or path in {"sources", "set.sources"} or path.endswith(".sources")
        return path.split("."), value.split(",") if is_list else value


def _put(target: dict[str, Any], path: list[str], value: Any, where: str) -> None:
    for part in path[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise SettingsError(f"{where}: {part} has no fields")
    target[path[-1]] = value


def _say(record: "ExperimentRecord", done: str, as_json: bool) -> None:
    from outrider.gateway.experiments.admin_schema import experiment_report

    if as_json:
        echo_json(experiment_report(record))
        return
    takes = f", {record.share:.4g} of the units take part" if record.is_running else ""
    typer.echo(f"{done} {record.name}, version {record.version}: {record.state}{takes}.")
