"""`outrider keys create | list | update | rotate | revoke | team`: keys, scopes and limits."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.tools.commands.command import ConfigFile
from outrider.gateway.tools.commands.database_cli import (
    AsJson,
    DatabaseUrl,
    Yes,
    checked,
    confirm,
    echo_json,
    opened_database,
)
from outrider.gateway.tools.commands.keys_flags import (
    NO_VALUE,
    given,
    labels_of,
    model_limits_of,
    patches,
)

if TYPE_CHECKING:
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
RequestsPerMinute = Annotated[int | None, typer.Option(min=0, help="Requests in any 60 seconds.")]
TokensPerMinute = Annotated[
    int | None, typer.Option(min=0, help="Tokens of prompts and answers in any 60 seconds.")
]
RequestsPerDay = Annotated[int | None, typer.Option(min=0, help="Requests in a UTC day.")]
TokensPerDay = Annotated[int | None, typer.Option(min=0, help="Tokens in a UTC day.")]
ConcurrentRequests = Annotated[int | None, typer.Option(min=0, help="Requests at the same time.")]
UsdPerDay = Annotated[float | None, typer.Option(min=0, help="Charges in a UTC day.")]
UsdPerMonth = Annotated[float | None, typer.Option(min=0, help="Charges in a UTC month.")]
ModelLimits = Annotated[
    list[str] | None,
    typer.Option(
        "--model-limit",
        metavar="TIER:LIMIT=N",
        help="A further limit of one tier, such as large:tokens_per_minute=10000; repeatable.",
    ),
]
LabelFlags = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="NAME=TEXT", help="A label, for your own use; repeatable."),
]
WeightOption = Annotated[float, typer.Option(help="Its share of a full queue; other keys have 1.")]
LimitChanges = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="LIMIT=N|none",
        help="A limit to set or delete, such as tokens_per_minute=10000; repeatable.",
    ),
]
ModelLimitChanges = Annotated[
    list[str] | None,
    typer.Option(
        "--model-limit",
        metavar="TIER:LIMIT=N|none",
        help="A limit of one tier to set or delete; repeatable.",
    ),
]
LabelChanges = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="NAME=TEXT|none", help="A label to set or delete; repeatable."),
]
NewName = Annotated[str | None, typer.Option("--name", help="Its new name.")]
NewWeight = Annotated[
    float | None, typer.Option("--weight", help="Its share of a full queue; other keys have 1.")
]
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
def create(  # noqa: PLR0913 - a flag each
    name: NewNameOption,
    team: Annotated[str | None, typer.Option(help="Its team: name or id.")] = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    requests_per_day: RequestsPerDay = None,
    tokens_per_day: TokensPerDay = None,
    concurrent_requests: ConcurrentRequests = None,
    usd_per_day: UsdPerDay = None,
    usd_per_month: UsdPerMonth = None,
    model_limits: ModelLimits = None,
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="A model name that it may request; repeatable. Default: all."),
    ] = None,
    tiers: Annotated[
        list[str] | None,
        typer.Option(
            "--tier", help="A tier that may answer its requests; repeatable. Default: all."
        ),
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="It may use /admin.")] = False,
    metrics: Annotated[
        bool,
        typer.Option(
            "--metrics", help="It may read /metrics, and nothing else without --model or --tier."
        ),
    ] = False,
    reveals: Annotated[
        str | None,
        typer.Option(
            metavar="nothing|tiers|costs",
            help="What its answers tell. Default: tiers, or nothing with --model.",
        ),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="30d|DATE", help="When it expires: 12h, 30d, 2027-01-01.")
    ] = None,
    labels: LabelFlags = None,
    weight: WeightOption = 1.0,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a key; the help is `_CREATE_HELP`."""
    with _store(database_url, config) as store:
        from outrider.gateway.tenancy.keys.admin_schema import KeyCreate
        from outrider.gateway.tenancy.keys.timestamps import expiry_s

        limits = {
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "requests_per_day": requests_per_day,
            "tokens_per_day": tokens_per_day,
            "concurrent_requests": concurrent_requests,
            "usd_per_day": usd_per_day,
            "usd_per_month": usd_per_month,
            "models": model_limits_of(model_limits or []),
        }
        every: list[str] | None = [] if metrics and not (models or tiers or admin) else None
        wanted = {
            "name": name,
            "team": team,
            "models": models or every,
            "tiers": tiers or every,
            "admin": admin,
            "metrics": metrics,
            "reveals": reveals,
            "limits": limits,
            "weight": weight,
            "labels": labels_of(labels or []),
            "expires_at": expires and int(expiry_s(expires, "--expires", time.time())),
        }
        order = checked(KeyCreate, wanted)
        team_id = None if team is None else store.find_team(team).team_id
        is_first = not store.load().has_any
        shown = store.create(order.order(team_id))
        if is_first and not as_json:
            typer.secho(
                "This is the first key: from now on every request to this gateway needs a key.",
                err=True,
            )
        _show(shown, "Made", as_json)


@app.command("list")
def list_keys(
    database_url: DatabaseUrl = None, config: ConfigFile = None, as_json: AsJson = False
) -> None:
    """List all keys, without their secrets."""
    with _store(database_url, config) as store:
        from outrider.gateway.tenancy.keys.admin_schema import key_report
        from outrider.gateway.tools.commands.keys_tables import print_keys
        from outrider.gateway.tools.commands.terminal import make_console

        table = store.load()
        now_s = time.time()
        keys = sorted(table.keys, key=lambda key: (key.created_at, key.key_id))
        if as_json:
            echo_json([key_report(key, now_s) for key in keys])
        else:
            print_keys(make_console(), keys, table.teams, now_s)


@app.command()
def rotate(
    key: Key,
    grace: Annotated[
        str,
        typer.Option(metavar="1h", help="How long the old secret stays valid beside the new one."),
    ] = "0s",
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Give a key a new secret; its id, limits and usage stay. The secret is shown once."""
    with _store(database_url, config) as store:
        from outrider.gateway.tenancy.keys.admin_schema import MAX_GRACE_S
        from outrider.gateway.tenancy.keys.timestamps import duration_s

        grace_s = duration_s(grace, "--grace")
        if grace_s > MAX_GRACE_S:
            raise SettingsError(f"--grace {grace}: at most 366d")
        _show(store.rotate(store.find(key).key_id, grace_s=grace_s), "Rotated", as_json)


@app.command()
def revoke(
    key: Key,
    yes: Yes = False,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Take a key back for ever. Running gateways know it within a second."""
    with _store(database_url, config) as store:
        from outrider.gateway.tenancy.keys.admin_schema import key_report
        from outrider.gateway.tools.commands.keys_tables import visible

        found = store.find(key)
        confirm(f"Revoke {visible(found.name)}, id {found.key_id}, for ever?", yes=yes)
        record = store.revoke(found.key_id)
        if as_json:
            echo_json(key_report(record, time.time()))
        else:
            typer.echo(f"Revoked key {visible(record.name)}, id {record.key_id}.")


@app.command()
def update(  # noqa: PLR0913 - a flag each
    key: Key,
    name: NewName = None,
    limits: LimitChanges = None,
    model_limits: ModelLimitChanges = None,
    labels: LabelChanges = None,
    weight: NewWeight = None,
    expires: Annotated[
        str | None, typer.Option(metavar="30d|DATE|none", help="When it expires; none: never.")
    ] = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Change a key: what is not named stays as it is. Running gateways know it within a second."""
    with _store(database_url, config) as store:
        from outrider.gateway.tenancy.keys.admin_schema import KeyUpdate, key_report
        from outrider.gateway.tenancy.keys.merging import merged_changes
        from outrider.gateway.tenancy.keys.timestamps import expiry_s

        plain: dict[str, Any] = given(name=name, weight=weight)
        if expires is not None:
            is_never = expires == NO_VALUE
            ends = None if is_never else int(expiry_s(expires, "--expires", time.time()))
            plain["expires_at"] = ends
        patch = checked(KeyUpdate, plain | patches(limits, model_limits, labels))
        record = store.update(
            store.find(key).key_id, plain, merge=lambda before: merged_changes(before, patch)
        )
        report = key_report(record, time.time())
        echo_json(report) if as_json else _tell_change("key", report)


@team_app.command("update")
def update_team(  # noqa: PLR0913 - a flag each
    team: Annotated[str, typer.Argument(metavar="TEAM", help="Its id or name.")],
    name: NewName = None,
    limits: LimitChanges = None,
    model_limits: ModelLimitChanges = None,
    labels: LabelChanges = None,
    weight: NewWeight = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Change a team: what is not named stays as it is."""
    with _store(database_url, config) as store:
        from outrider.gateway.tenancy.keys.admin_schema import TeamUpdate, team_report
        from outrider.gateway.tenancy.keys.merging import merged_changes

        plain = given(name=name, weight=weight)
        patch = checked(TeamUpdate, plain | patches(limits, model_limits, labels))
        record = store.update_team(team, plain, merge=lambda before: merged_changes(before, patch))
        report = team_report(record)
        echo_json(report) if as_json else _tell_change("team", report)


@team_app.command("create")
def create_team(  # noqa: PLR0913 - a flag each
    name: NewNameOption,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    requests_per_day: RequestsPerDay = None,
    tokens_per_day: TokensPerDay = None,
    concurrent_requests: ConcurrentRequests = None,
    usd_per_day: UsdPerDay = None,
    usd_per_month: UsdPerMonth = None,
    model_limits: ModelLimits = None,
    labels: LabelFlags = None,
    weight: WeightOption = 1.0,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a team: limits for all its keys together, one share of a full queue, one cache."""
    with _store(database_url, config) as store:
        from outrider.gateway.tenancy.keys.admin_schema import TeamCreate, team_report
        from outrider.gateway.tools.commands.keys_tables import visible

        limits = {
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "requests_per_day": requests_per_day,
            "tokens_per_day": tokens_per_day,
            "concurrent_requests": concurrent_requests,
            "usd_per_day": usd_per_day,
            "usd_per_month": usd_per_month,
            "models": model_limits_of(model_limits or []),
        }
        wanted = {
            "name": name,
            "limits": limits,
            "weight": weight,
            "labels": labels_of(labels or []),
        }
        record = store.create_team(checked(TeamCreate, wanted).order())
        if as_json:
            echo_json(team_report(record))
        else:
            typer.echo(f"Made team {visible(record.name)}, id {record.team_id}.")


@team_app.command("list")
def list_teams(
    database_url: DatabaseUrl = None, config: ConfigFile = None, as_json: AsJson = False
) -> None:
    """List all teams."""
    with _store(database_url, config) as store:
        from outrider.gateway.tenancy.keys.admin_schema import team_report
        from outrider.gateway.tools.commands.keys_tables import print_teams
        from outrider.gateway.tools.commands.terminal import make_console

        teams = store.teams()
        if as_json:
            echo_json([team_report(team) for team in teams])
        else:
            print_teams(make_console(), teams)


@contextmanager
def _store(database_url: str | None, config: Path | None) -> "Iterator[KeyStore]":
    """The keys; what goes wrong becomes a message and an exit status."""
    with opened_database(database_url, config, kept="keys") as (settings, database):
        from outrider.gateway.tenancy.keys.parts import key_store

        yield key_store(settings, database)


def _tell_change(what: str, report: dict[str, Any]) -> None:
    from outrider.gateway.tools.commands.keys_tables import visible

    limits = json.dumps(report["limits"])
    typer.echo(f"Changed {what} {visible(report['name'])}, id {report['id']}; limits: {limits}")


def _show(shown: "ShownKey", done: str, as_json: bool) -> None:
    """A key and its secret, once."""
    from outrider.gateway.tenancy.keys.admin_schema import key_report
    from outrider.gateway.tools.commands.keys_tables import print_shown
    from outrider.gateway.tools.commands.terminal import make_console

    if as_json:
        echo_json(key_report(shown.record, time.time()) | {"key": shown.text})
    else:
        print_shown(make_console(), shown, done)
