"""`outrider keys create | list | update | rotate | revoke | team`: keys, scopes and limits."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.gateway.settings.tree import SettingsError, load_settings
from outrider.gateway.tools.commands.database_cli import (
    DatabaseFlags,
    ShownDatabaseFlags,
    Yes,
    checked,
    confirm,
    echo_json,
)
from outrider.gateway.tools.commands.flags import takes_flags
from outrider.gateway.tools.commands.keys_flags import NO_VALUE, ChangeFlags, NewFlags, ScopeFlags

if TYPE_CHECKING:
    from outrider.gateway.tenancy.keys.admin_schema import (
        KeyLimits,
        KeyReport,
        LimitsPatch,
        TeamReport,
    )
    from outrider.gateway.tenancy.keys.key_store import KeyStore, ShownKey

app = typer.Typer(
    name="keys",
    help="API keys and teams: create, list, change and revoke them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
)
team_app = typer.Typer(
    name="team",
    help="Teams: limits that several keys share.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(team_app)

NewNameOption = Annotated[str, typer.Option(help="Its name.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="Its id, prefix or name.")]


_CREATE_HELP = """
Make a key. It is shown once; only a hash of it is kept.

[bold]Examples[/bold]

  outrider keys create --name ci

  outrider keys create --name app --tokens-per-minute 100000 --usd-per-day 5 --expires 90d

  outrider keys create --name batch --team research --tier small --weight 0.5

  outrider keys create --name night --model auto --model-limit large:requests_per_day=100

  outrider keys create --name ops --admin --json

  outrider keys create --name prometheus --metrics

As soon as there is a key, every request needs one. Running gateways know it within a second.
"""


@app.command(help=_CREATE_HELP)
@takes_flags
def create(
    *,
    name: NewNameOption,
    team: Annotated[str | None, typer.Option(help="Its team: name or id.")] = None,
    new: NewFlags,
    scope: ScopeFlags,
    expires: Annotated[
        str | None, typer.Option(metavar="30d|DATE", help="When it expires: 12h, 30d, 2027-01-01.")
    ] = None,
    database: ShownDatabaseFlags,
) -> None:
    """Make a key; the help is `_CREATE_HELP`."""
    with _store(database) as store:
        from outrider.gateway.tenancy.keys.admin_schema import KeyCreate
        from outrider.gateway.tenancy.keys.timestamps import expiry_s

        wanted = {
            "name": name,
            "team": team,
            **scope.document(),
            **new.document(),
            "expires_at": expires and int(expiry_s(expires, "--expires", time.time())),
        }
        order = checked(KeyCreate, wanted)
        _warn_of_tiers(database, order.limits)
        team_id = None if team is None else store.find_team(team).team_id
        is_first = not store.load().has_any
        shown = store.create(order.order(team_id))
        if is_first and not database.as_json:
            typer.secho(
                "This is the first key: from now on every request to this gateway needs a key.",
                err=True,
            )
        _show(shown, "Made", database.as_json)


@app.command("list")
@takes_flags
def list_keys(database: ShownDatabaseFlags) -> None:
    """List all keys, without their secrets."""
    with _store(database) as store:
        from outrider.gateway.tenancy.keys.admin_schema import key_report
        from outrider.gateway.tools.commands.keys_tables import print_keys
        from outrider.gateway.tools.commands.terminal import make_console

        table = store.load()
        now_s = time.time()
        keys = sorted(table.keys, key=lambda key: (key.created_at, key.key_id))
        if database.as_json:
            echo_json([key_report(key, now_s) for key in keys])
        else:
            print_keys(make_console(), keys, table.teams, now_s)


@app.command()
@takes_flags
def rotate(
    key: Key,
    grace: Annotated[
        str,
        typer.Option(metavar="1h", help="How long the old secret stays valid beside the new one."),
    ] = "0s",
    *,
    database: ShownDatabaseFlags,
) -> None:
    """Give a key a new secret; its id, limits and usage stay. The secret is shown once."""
    with _store(database) as store:
        from outrider.gateway.tenancy.keys.admin_schema import MAX_GRACE_S
        from outrider.gateway.tenancy.keys.timestamps import duration_s

        grace_s = duration_s(grace, "--grace")
        if grace_s > MAX_GRACE_S:
            raise SettingsError(f"--grace {grace}: at most 366d")
        _show(store.rotate(store.find(key).key_id, grace_s=grace_s), "Rotated", database.as_json)


@app.command()
@takes_flags
def revoke(
    key: Key,
    yes: Yes = False,
    *,
    database: ShownDatabaseFlags,
) -> None:
    """Take a key back for ever. Running gateways know it within a second."""
    with _store(database) as store:
        from outrider.gateway.tenancy.keys.admin_schema import key_report
        from outrider.gateway.tools.commands.keys_tables import visible

        found = store.find(key)
        confirm(f"Revoke {visible(found.name)}, id {found.key_id}, for ever?", yes=yes)
        record = store.revoke(found.key_id)
        if database.as_json:
            echo_json(key_report(record, time.time()))
        else:
            typer.echo(f"Revoked key {visible(record.name)}, id {record.key_id}.")


@app.command()
@takes_flags
def update(
    key: Key,
    changes: ChangeFlags,
    expires: Annotated[
        str | None, typer.Option(metavar="30d|DATE|none", help="When it expires; none: never.")
    ] = None,
    *,
    database: ShownDatabaseFlags,
) -> None:
    """Change a key: what is not named stays as it is. Running gateways know it within a second."""
    with _store(database) as store:
        from outrider.gateway.tenancy.keys.admin_schema import KeyUpdate, key_report
        from outrider.gateway.tenancy.keys.merging import merged_changes
        from outrider.gateway.tenancy.keys.timestamps import expiry_s

        plain = changes.plain()
        if expires is not None:
            is_never = expires == NO_VALUE
            ends = None if is_never else int(expiry_s(expires, "--expires", time.time()))
            plain["expires_at"] = ends
        patch = checked(KeyUpdate, plain | changes.patches())
        _warn_of_tiers(database, patch.limits)
        record = store.update(
            store.find(key).key_id, plain, merge=lambda before: merged_changes(before, patch)
        )
        report = key_report(record, time.time())
        echo_json(report) if database.as_json else _print_change("key", report)


@team_app.command("update")
@takes_flags
def update_team(
    team: Annotated[str, typer.Argument(metavar="TEAM", help="Its id or name.")],
    changes: ChangeFlags,
    database: ShownDatabaseFlags,
) -> None:
    """Change a team: what is not named stays as it is."""
    with _store(database) as store:
        from outrider.gateway.tenancy.keys.admin_schema import TeamUpdate, team_report
        from outrider.gateway.tenancy.keys.merging import merged_changes

        plain = changes.plain()
        patch = checked(TeamUpdate, plain | changes.patches())
        _warn_of_tiers(database, patch.limits)
        record = store.update_team(team, plain, merge=lambda before: merged_changes(before, patch))
        report = team_report(record)
        echo_json(report) if database.as_json else _print_change("team", report)


@team_app.command("create")
@takes_flags
def create_team(
    name: NewNameOption,
    new: NewFlags,
    database: ShownDatabaseFlags,
) -> None:
    """Make a team: limits for all its keys together, one share of a full queue, one cache."""
    with _store(database) as store:
        from outrider.gateway.tenancy.keys.admin_schema import TeamCreate, team_report
        from outrider.gateway.tools.commands.keys_tables import visible

        wanted = {"name": name, **new.document()}
        order = checked(TeamCreate, wanted)
        _warn_of_tiers(database, order.limits)
        record = store.create_team(order.order())
        if database.as_json:
            echo_json(team_report(record))
        else:
            typer.echo(f"Made team {visible(record.name)}, id {record.team_id}.")


@team_app.command("list")
@takes_flags
def list_teams(database: ShownDatabaseFlags) -> None:
    """List all teams."""
    with _store(database) as store:
        from outrider.gateway.tenancy.keys.admin_schema import team_report
        from outrider.gateway.tools.commands.keys_tables import print_teams
        from outrider.gateway.tools.commands.terminal import make_console

        teams = store.teams()
        if database.as_json:
            echo_json([team_report(team) for team in teams])
        else:
            print_teams(make_console(), teams)


@contextmanager
def _store(flags: DatabaseFlags) -> "Iterator[KeyStore]":
    """The keys; what goes wrong becomes a message and an exit status."""
    with flags.opened(kept="database of keys") as (settings, database):
        from outrider.gateway.tenancy.keys.key_parts import key_store

        yield key_store(settings, database)


def _warn_of_tiers(flags: DatabaseFlags, limits: "KeyLimits | LimitsPatch | None") -> None:
    """Warn of limits for tiers that these settings lack: a gateway without them limits none."""
    from outrider.gateway.tenancy.keys.admin_schema import unknown_tiers
    from outrider.verifier.params import TIERS

    known = (*TIERS, *load_settings(config_file=flags.config).tiers)
    for tier in unknown_tiers(limits, known):
        typer.secho(
            f"--model-limit: the settings have no tier {tier!r}, so it may limit nothing; "
            f"available: {', '.join(known)}.",
            err=True,
        )


def _print_change(what: str, report: "KeyReport | TeamReport") -> None:
    from outrider.gateway.tools.commands.keys_tables import visible

    limits = json.dumps(report.limits)
    typer.echo(f"Changed {what} {visible(report.name)}, id {report.id}; limits: {limits}")


def _show(shown: "ShownKey", done: str, as_json: bool) -> None:
    """A key and its secret, once."""
    from outrider.gateway.tenancy.keys.admin_schema import new_key_report
    from outrider.gateway.tools.commands.keys_tables import print_shown
    from outrider.gateway.tools.commands.terminal import make_console

    if as_json:
        echo_json(new_key_report(shown.record, shown.text, time.time()))
    else:
        print_shown(make_console(), shown, done)
