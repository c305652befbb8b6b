"""The flags that choose rows of the ledger."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.tenancy.ledger.timestamps import FORMS, parse_time

if TYPE_CHECKING:
    from outrider.gateway.settings.tree import Settings
    from outrider.gateway.storage.database import Database
    from outrider.gateway.tenancy.ledger.queries import UsageFilter

Bounds = tuple[float | None, float | None]
"""Since and until, seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFlags:
    """Which rows are counted."""

    since: Annotated[str | None, typer.Option(help=f"Start: {FORMS}.")] = None
    until: Annotated[str | None, typer.Option(help="End, in the same forms.")] = None
    key: Annotated[str | None, typer.Option(help="Only this key: its name or id.")] = None
    team: Annotated[str | None, typer.Option(help="Only this team: its name or id.")] = None
    tier: Annotated[str | None, typer.Option(help="Only this tier.")] = None
    model: Annotated[str | None, typer.Option(help="Only requests for this model.")] = None
    end_user: Annotated[
        str | None, typer.Option(help="Only this end user: its id, as requests name it.")
    ] = None

    def bounds(self, now_s: float) -> Bounds:
        """Return the times. Raises SettingsError for what is none."""
        return _moment("since", self.since, now_s), _moment("until", self.until, now_s)

    def filter(self, settings: "Settings", database: "Database", bounds: Bounds) -> "UsageFilter":
        """Return the choice of rows between these times."""
        # Databases take half a second to import, which other commands need not wait for.
        from outrider.gateway.tenancy.keys.key_parts import key_hasher
        from outrider.gateway.tenancy.ledger.end_users import end_user_form
        from outrider.gateway.tenancy.ledger.queries import UsageFilter

        form = end_user_form(settings.ledger, lambda: key_hasher(settings, database))
        return UsageFilter(
            since_s=bounds[0],
            until_s=bounds[1],
            key_ids=_ids(database, "key", self.key),
            team_ids=_ids(database, "team", self.team),
            tier=self.tier,
            model=self.model,
            end_user=None if self.end_user is None else form(self.end_user),
        )


def _ids(database: "Database", by: Literal["key", "team"], word: str | None) -> list[str] | None:
    from outrider.gateway.tenancy.ledger.queries import ids_of

    if word is None:
        return None
    if by == "key" and word.startswith("or-"):
        word = word[3:11]  # the id in a key, so that a prefix will do
    with database.read() as connection:
        return ids_of(connection, by, word)


def _moment(name: str, text: str | None, now_s: float) -> float | None:
    try:
        return None if text is None else parse_time(text, now_s)
    except ValueError as error:
        raise SettingsError(f"--{name}: {error}") from None
