"""`outrider erase`: remove what is kept of a tenant or an end user, everywhere."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.gateway.tools.commands.database_cli import DatabaseFlags, Yes, confirm
from outrider.gateway.tools.commands.flags import takes_flags
from outrider.gateway.tools.commands.user_errors import user_errors

if TYPE_CHECKING:
    from outrider.gateway.audit.erasing import Subject
    from outrider.gateway.storage.database import Database
    from outrider.gateway.tenancy.keys.key_store import KeyStore

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

ERASE_HELP = """
Remove what is kept of a tenant or of an end user, or take its identity away.

[bold]Examples[/bold]

  outrider erase --tenant research  [dim]# a team, or a key without one: its name or id[/dim]

  outrider erase --end-user alice --tenant research

A tenant's keys are revoked first. Ledger rows keep their amounts. What running gateways have in
memory goes when they end, or when its time is over. The audit log keeps that it was done.
"""


@app.command("erase", help=ERASE_HELP)
@takes_flags
def erase(
    *,
    tenant: Annotated[
        str | None, typer.Option(help="A team, or a key without one: its name or id.")
    ] = None,
    end_user: Annotated[
        str | None, typer.Option(help="As requests name them in `user`; of --tenant, or of all.")
    ] = None,
    wait: Annotated[
        float, typer.Option(help="Seconds for gateways to end the keys' requests and book them.")
    ] = 3.0,
    yes: Yes = False,
    database: DatabaseFlags,
) -> None:
    """Erase; the help is `ERASE_HELP`."""
    with user_errors(usage=(SettingsError,)):
        if not tenant and not end_user:
            raise SettingsError("name whose data are to go: --tenant or --end-user")
    with (
        database.opened(kept="database of keys") as (settings, opened),
        user_errors(failed=(OSError,)),
    ):
        from outrider.gateway.tenancy.keys.key_parts import key_store

        store = key_store(settings, opened)
        subject = _subject(settings, store, tenant, end_user)
        whose = f"end user {end_user!r}" if end_user else f"tenant {subject.tenant}"
        confirm(f"Erase what is kept of {whose}, for ever?", yes=yes)
        if subject.tenant is not None and end_user is None:
            store.erase(subject.tenant)
            time.sleep(wait)
        _erase(settings, opened, subject)


def _subject(
    settings: Settings, store: "KeyStore", tenant: str | None, end_user: str | None
) -> "Subject":
    """Return whose data are meant. Raises NotFoundError, and SettingsError for a team's key."""
    from outrider.gateway.audit.erasing import Subject
    from outrider.gateway.contract.errors.tree import NotFoundError

    if tenant is None:
        return Subject(end_user=end_user)
    try:
        tenant_id = store.find_team(tenant).team_id
        key_ids = frozenset(key.key_id for key in store.load().keys if key.team_id == tenant_id)
    except NotFoundError:
        found = store.find(tenant)
        if found.team_id is not None:
            raise SettingsError(
                f"the key {found.key_id} is in the team {found.team_id}, which is the tenant: "
                f"--tenant {found.team_id}"
            ) from None
        tenant_id, key_ids = found.key_id, frozenset({found.key_id})
    salt = store.hasher.cache_salt(tenant_id) if settings.isolate_tenants else ""
    return Subject(
        tenant=tenant_id, key_ids=key_ids, cache_salts=frozenset({salt}), end_user=end_user
    )


def _erase(settings: Settings, database: "Database", subject: "Subject") -> None:
    from outrider.gateway.audit.chain import Change
    from outrider.gateway.audit.log import AuditLog
    from outrider.gateway.audit.verifying import ERASE, TARGETS
    from outrider.gateway.wiring.erasing import erasable_stores

    counts: dict[str, int] = {}
    for place in erasable_stores(settings, database):
        if subject.end_user is None or place.has_end_users:
            counts[place.name] = place.erase(subject)
            typer.echo(f"{place.name}: {counts[place.name]:,}")
    target = f"tenant/{subject.tenant or 'all'}" + ("/end-user" if subject.end_user else "")
    after = {TARGETS: subject.targets, "counts": counts}
    AuditLog(database).append(Change(action=ERASE, target=target, after=after))
    database.vacuum()
