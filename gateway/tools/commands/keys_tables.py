"""Tables that `outrider keys` prints."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.gateway.tenancy.keys.admin_schema import limits_report
from outrider.gateway.tenancy.keys.key_store import ShownKey
from outrider.gateway.tenancy.keys.records import KeyRecord, TeamRecord
from outrider.gateway.tenancy.keys.timestamps import date_text

_NESTED = ("models", "end_user")
_STYLES = {"active": "green", "expired": "yellow", "revoked": "red"}


def print_shown(console: Console, shown: ShownKey, done: str) -> None:
    """Print a new secret, which is not shown again."""
    record = shown.record
    console.print(Text(f"{done} key {visible(record.name)}, id {record.key_id}:"))
    console.print()
    console.print(Text(f"  {shown.text}", style="bold"), soft_wrap=True)
    console.print()
    console.print("It is not shown again. Send it as the header authorization: Bearer KEY.")


def print_keys(
    console: Console, keys: Sequence[KeyRecord], teams: Mapping[str, TeamRecord], now_s: float
) -> None:
    """A row a key."""
    if not keys:
        console.print("There are no keys yet. Create one: outrider keys create --name NAME")
        return
    table = _table("id", "name", "team", "status", "may", "limits", "expires", "labels")
    for key in keys:
        team = teams.get(key.team_id or "")
        status = key.status(now_s)
        table.add_row(
            Text(key.key_id),
            Text(visible(key.name)),
            Text("-" if team is None else visible(team.name)),
            Text(status, style=_STYLES[status]),
            Text(_may(key)),
            Text(_limits(limits_report(key.limits))),
            Text(date_text(key.expires_at)),
            Text(_pairs(key.labels)),
        )
    console.print(table)


def print_teams(console: Console, teams: Sequence[TeamRecord]) -> None:
    """A row a team."""
    if not teams:
        console.print("There are no teams. Create one: outrider keys team create --name NAME")
        return
    table = _table("id", "name", "limits", "weight", "labels")
    for team in teams:
        table.add_row(
            Text(team.team_id),
            Text(visible(team.name)),
            Text(_limits(limits_report(team.limits))),
            Text(f"{team.weight:g}"),
            Text(_pairs(team.labels)),
        )
    console.print(table)


def visible(text: str) -> str:
    """The text with whatever a terminal would obey written out."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _may(key: KeyRecord) -> str:
    scopes = key.scopes
    parts = ["admin"] if scopes.is_admin else []
    parts += ["metrics"] if scopes.reads_metrics else []
    parts += [f"reveals {scopes.reveals}"] if scopes.reveals else []
    parts += [f"prefers {scopes.prefer}"] if scopes.prefer else []
    for what, names in (("models", scopes.models), ("tiers", scopes.tiers)):
        if names is not None:
            parts.append(f"{what} {visible(', '.join(sorted(names))) or 'none'}")
    return "; ".join(parts) or "all"


def _limits(limits: Mapping[str, Any]) -> str:
    plain = {name.replace("_per_", "/"): n for name, n in limits.items() if name not in _NESTED}
    parts = [f"{name} {number:,}" for name, number in plain.items()]
    for model, own in limits.get("models", {}).items():
        parts.append(f"{visible(model)}: {_limits(own)}")
    if limits.get("end_user"):
        parts.append(f"each end user: {_limits(limits['end_user'])}")
    return "\n".join(parts) or "-"


def _pairs(labels: Mapping[str, str]) -> str:
    pairs: Iterable[str] = (f"{visible(k)}={visible(v)}" for k, v in sorted(labels.items()))
    return "\n".join(pairs) or "-"
