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
        subject = _subject(settings, opened, store, tenant, end_user)
        whose = f"end user {end_user!r}" if end_user else f"tenant {subject.tenant}"
        confirm(f"Erase what is kept of {whose}, for ever?", yes=yes)
        if subject.tenant is not None and end_user is None:
            store.erase(subject.tenant)
            time.sleep(wait)
        _erase(settings, opened, subject)


def _subject(
    settings: Settings,
    database: "Database",
    store: "KeyStore",
    tenant: str | None,
    end_user: str | None,
) -> "Subject":
    """Return whose data are meant. Raises NotFoundError, and SettingsError for a team's key."""
    from outrider.gateway.audit.erasing import Subject

    tenant_id, key_ids = (None, frozenset()) if tenant is None else _tenant(store, tenant)
    people = _people(settings, database, tenant_id, end_user)
    shared = [tenant_id] if tenant_id is not None and end_user is None else []
    owners = [f"{team_id}\0{person_id}" for team_id, person_id in people] + shared
    salts = map(store.hasher.cache_salt, owners) if settings.isolate_tenants else [""] * len(shared)
    return Subject(
        tenant=tenant_id,
        key_ids=key_ids,
        person_ids=frozenset(person_id for _, person_id in people),
        cache_salts=frozenset(salts),
        end_user=end_user,
    )


def _tenant(store: "KeyStore", tenant: str) -> tuple[str, frozenset[str]]:
    """Return a tenant's id and its keys. Raises NotFoundError, and SettingsError."""
    from outrider.gateway.contract.errors.tree import NotFoundError

    try:
        tenant_id = store.find_team(tenant).team_id
    except NotFoundError:
        found = store.find(tenant)
        if found.team_id is not None:
            raise SettingsError(
                f"the key {found.key_id} is in the team {found.team_id}, which is the tenant: "
                f"--tenant {found.team_id}"
            ) from None
        return found.key_id, frozenset({found.key_id})
    return tenant_id, frozenset(key.key_id for key in store.load().keys if key.team_id == tenant_id)


def _people(
    settings: Settings, database: "Database", tenant_id: str | None, end_user: str | None
) -> list[tuple[str, str]]:
    """Return team and id of the people who signed in and are meant, as the ledger has them."""
    from sqlalchemy import select

    from outrider.gateway.storage.tables import ledger
    from outrider.gateway.tenancy.keys.keys import SIGNED_IN_PREFIX
    from outrider.gateway.tenancy.sign_in.sign_in import signed_in_id

    team_id, key_id = ledger.c.team_id, ledger.c.key_id
    query = select(team_id, key_id).distinct().where(key_id.startswith(SIGNED_IN_PREFIX))
    if tenant_id is not None:
        query = query.where(team_id == tenant_id)
    found = []
    if end_user is not None:
        name, _, subject = end_user.partition(":")
        if (issuer := settings.sign_in.issuers.get(name)) is None:
            return []
        person_id = signed_in_id(issuer.url, subject)
        found = [(tenant_id or "", person_id)]
        query = query.where(key_id == person_id)
    with database.read() as connection:
        return found + [(row[0] or "", row[1]) for row in connection.execute(query)]


def _erase(settings: Settings, database: "Database", subject: "Subject") -> None:
    from outrider.gateway.audit.chain import Change
    from outrider.gateway.audit.log import AuditLog
    from outrider.gateway.audit.verifying import ERASE, TARGETS
    from outrider.gateway.wiring.erasing import STORES

    counts: dict[str, int] = {}
    for name, erase in STORES.items():
        counts[name] = erase(settings, database, subject)
        typer.echo(f"{name}: {counts[name]:,}")
    target = f"tenant/{subject.tenant or 'all'}" + ("/end-user" if subject.end_user else "")
    after = {TARGETS: subject.targets, "counts": counts}
    AuditLog(database).append(Change(action=ERASE, target=target, after=after))
    database.vacuum()
