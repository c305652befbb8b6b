"""Keys and teams in the database."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pydantic import SecretStr
from sqlalchemy import Connection, RowMapping, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from outrider.gateway.audit.chain import Change, Details, differences, record
from outrider.gateway.audit.erasing import ERASED
from outrider.gateway.contract.errors.tree import ConflictError, NotFoundError
from outrider.gateway.storage import tables
from outrider.gateway.storage.change_counter import ChangeCounter
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.secrets import drawn_secret
from outrider.gateway.tenancy.keys.key_rows import (
    audited,
    fields_of,
    key_of,
    readable,
    row_of_key,
    row_of_team,
    team_of,
)
from outrider.gateway.tenancy.keys.keys import KEY_PREFIX, KeyHasher, id_in, mint_key, random_id
from outrider.gateway.tenancy.keys.records import (
    KeyOrder,
    KeyRecord,
    KeyTable,
    TeamOrder,
    TeamRecord,
)

_SECRET: Final = "keys.secret"
_TEAM_PREFIX: Final = "team-"
_MAX_TRIES: Final = 8
_MAX_CHANGES: Final = 1000

Merge = Callable[[KeyOrder | TeamOrder], Mapping[str, Any]]
"""Returns the changes, given the present state of a key or a team."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownKey:
    """A key that was just made, and its text, which cannot be shown again."""

    record: KeyRecord
    text: str = field(repr=False)


def load_secret(
    database: Database, configured: SecretStr | None, randomness: random.Random
) -> bytes:
    """Return the secret that keys are hashed with: the configured one, or the database's own.

    The database's secret is drawn by the first process that needs it. Raises DatabaseError.
    """
    if configured is not None:
        return configured.get_secret_value().encode()
    return drawn_secret(database, _SECRET, randomness)


class KeyStore:
    """Makes, finds and changes keys and teams. Blocks: in an event loop, use a thread.

    Every method raises DatabaseError where the database is unavailable. `randomness` must be the
    operating system's; `wall_clock` is seconds since 1970 (UTC).
    """

    def __init__(
        self,
        database: Database,
        hasher: KeyHasher,
        *,
        randomness: random.Random,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._changes = ChangeCounter(database, tables.key_version)
        self.hasher = hasher
        self._random = randomness
        self._wall_clock = wall_clock

    def version(self) -> int:
        """Return a number that changes with every change of a key or a team."""
        return self._changes.read()

    def load(self, since: KeyTable | None = None) -> KeyTable:
        """Return all keys and teams; rows that cannot be read are left out, and logged.

        `since`: of the keys only those that have changed, or whose team has, if that can be told.
        """
        keys, teams, head = tables.keys, tables.teams, tables.audit_head
        with self._database.read() as connection:
            # First: rows that are newer are only read once more.
            version = self._changes.value(connection)
            sequence = connection.execute(select(head.c.sequence)).scalar() or 0
            num_keys = connection.execute(select(func.count()).select_from(keys)).scalar_one()
            changed = None if since is None else _changed(connection, since, version, num_keys)
            of_teams, of_keys = select(teams), select(keys)
            if changed is not None:
                of_teams = of_teams.where(teams.c.id.in_(changed))
                of_keys = of_keys.where(keys.c.id.in_(changed) | keys.c.team_id.in_(changed))
            team_rows = connection.execute(of_teams).mappings().all()
            key_rows = connection.execute(of_keys).mappings().all()
        kept = {} if since is None or changed is None else since.teams
        others = {team_id: team for team_id, team in kept.items() if team_id not in (changed or ())}
        return KeyTable(
            version=version,
            sequence=sequence,
            changed=None if changed is None else changed | {row["id"] for row in key_rows},
            num_keys=num_keys,
            has_any=num_keys > 0 or (since is not None and since.has_any),
            teams=others | {team.team_id: team for team in readable(team_rows, team_of)},
            keys=tuple(readable(key_rows, key_of)),
        )

    def create(self, order: KeyOrder) -> ShownKey:
        """Make a key. Raises NotFoundError for a team that does not exist."""
        for _ in range(_MAX_TRIES):
            key = mint_key(self._random)
            made = KeyRecord(
                **fields_of(order, KeyOrder),
                key_id=key.key_id,
                key_hash=self.hasher.digest(key.text),
                hashed_with=self.hasher.name,
                created_at=self._wall_clock(),
            )
            try:
                with self._changes.changing() as connection:
                    _check_team(connection, order.team_id)
                    connection.execute(insert(tables.keys).values(_new_row(made)))
                    after = audited(row_of_key(made))
                    self._record(connection, "key.create", f"key/{made.key_id}", None, after)
            except IntegrityError:
                continue  # the same 8 characters twice
            return ShownKey(record=made, text=key.text)
        raise ConflictError("No free id was found for the key. Try again.")

    def page(
        self, *, after: str | None, limit: int, words: str | None = None
    ) -> tuple[list[KeyRecord], bool]:
        """Return keys in the order of their ids, after an id, and whether there are more.

        `words`: only keys with this in their name, in capitals or not, or with this id or prefix.
        """
        query = select(tables.keys).order_by(tables.keys.c.id).limit(limit + 1)
        if words is not None:
            is_named = tables.keys.c.name.icontains(words, autoescape=True)
            query = query.where(is_named | (tables.keys.c.id == words.removeprefix(KEY_PREFIX)))
        if after is not None:
            query = query.where(tables.keys.c.id > after)
        with self._database.read() as connection:
            rows = connection.execute(query).mappings().all()
        return list(readable(rows[:limit], key_of)), len(rows) > limit

    def get(self, key_id: str) -> KeyRecord:
        """Return one key. Raises NotFoundError."""
        with self._database.read() as connection:
            return _get_key(connection, key_id)

    def find(self, words: str) -> KeyRecord:
        """Return the key with this id, prefix, or name; revoked ones by their id only.

        Raises NotFoundError, and ConflictError where several have the name.
        """
        key_id = id_in(words) or words.removeprefix(KEY_PREFIX)
        keys = tables.keys
        named = (keys.c.name == words) & keys.c.revoked_at.is_(None)
        with self._database.read() as connection:
            query = select(keys).where((keys.c.id == key_id) | named)
            found = [_known_key(row) for row in connection.execute(query).mappings()]
        by_id = [key for key in found if key.key_id == key_id]
        if by_id or len(found) == 1:
            return (by_id or found)[0]
        if not found:
            raise NotFoundError("No key has this id, prefix or name.", code="not_found")
        ids = ", ".join(sorted(key.key_id for key in found))
        raise ConflictError(f"Several keys have this name; use an id instead: {ids}.")

    def update(
        self,
        key_id: str,
        changes: Mapping[str, Any],
        *,
        scopes: Mapping[str, Any] | None = None,
        merge: Merge | None = None,
    ) -> KeyRecord:
        """Change fields of a KeyOrder, and fields of its scopes.

        `merge` returns further changes, in the same transaction. Raises NotFoundError, for its team
        too, and the errors of `merge`.
        """
        with self._changes.changing() as connection:
            before = _get_key(connection, key_id)
            changed = {"scopes": replace(before.scopes, **(scopes or {})), **changes}
            changed |= merge(before) if merge is not None else {}
            order = KeyOrder(**(fields_of(before, KeyOrder) | changed))
            _check_team(connection, order.team_id)
            row = row_of_key(order)
            connection.execute(update(tables.keys).where(tables.keys.c.id == key_id).values(row))
            differ = differences(audited(row_of_key(before)), audited(row))
            self._record(connection, "key.update", f"key/{key_id}", *differ)
            return _get_key(connection, key_id)

    def rotate(self, key_id: str, *, grace_s: float = 0.0) -> ShownKey:
        """Give a key another secret under the same id; the old one stays valid for `grace_s`.

        Secrets older than that one become invalid. Raises NotFoundError; ConflictError for a
        revoked key.
        """
        key = mint_key(self._random, key_id)
        with self._changes.changing() as connection:
            before = _get_key(connection, key_id)
            if before.revoked_at is not None:
                raise ConflictError("This key is revoked. Make a new one instead.")
            has_grace = grace_s > 0 and before.hashed_with == self.hasher.name
            row = {
                "hash": self.hasher.digest(key.text).hex(),
                "hashed_with": self.hasher.name,
                "old_hash": before.key_hash.hex() if has_grace else None,
                "old_hash_until": self._wall_clock() + grace_s if has_grace else None,
            }
            connection.execute(update(tables.keys).where(tables.keys.c.id == key_id).values(row))
            after = {"old_secret_until": row["old_hash_until"]}
            self._record(connection, "key.rotate", f"key/{key_id}", None, after)
            return ShownKey(record=_get_key(connection, key_id), text=key.text)

    def revoke(self, key_id: str) -> KeyRecord:
        """Take a key back for ever; its row stays, for the ledger. Raises NotFoundError."""
        with self._changes.changing() as connection:
            keys = tables.keys
            is_it = (keys.c.id == key_id) & keys.c.revoked_at.is_(None)
            now_s = self._wall_clock()
            if connection.execute(update(keys).where(is_it).values(revoked_at=now_s)).rowcount:
                changed = {"revoked_at": None}, {"revoked_at": now_s}
                self._record(connection, "key.revoke", f"key/{key_id}", *changed)
            return _get_key(connection, key_id)

    def erase(self, tenant: str) -> None:
        """Revoke a tenant's keys, and forget its names and labels; ids stay."""
        keys, teams, now_s = tables.keys, tables.teams, self._wall_clock()
        nothing = {"name": ERASED, "labels": "{}"}
        revoked = {"revoked_at": func.coalesce(keys.c.revoked_at, now_s), "old_hash": None}
        is_own = (keys.c.team_id == tenant) | (keys.c.id == tenant) & keys.c.team_id.is_(None)
        with self._changes.changing() as connection:
            connection.execute(update(keys).where(is_own).values(**nothing, **revoked))
            nameless = nothing | {"name": f"{ERASED} {tenant}"}  # no two teams have one name
            connection.execute(update(teams).where(teams.c.id == tenant).values(nameless))

    def teams(self) -> list[TeamRecord]:
        """Return all teams, by name."""
        with self._database.read() as connection:
            query = select(tables.teams).order_by(tables.teams.c.name)
            return list(readable(connection.execute(query).mappings().all(), team_of))

    def create_team(self, order: TeamOrder) -> TeamRecord:
        """Make a team. Raises ConflictError for a name that another has."""
        team_id = _TEAM_PREFIX + random_id(self._random)
        made = TeamRecord(
            **fields_of(order, TeamOrder), team_id=team_id, created_at=self._wall_clock()
        )
        row = {"id": team_id, "created_at": made.created_at, **row_of_team(made)}
        with _names_taken(order.name), self._changes.changing() as connection:
            connection.execute(insert(tables.teams).values(row))
            after = audited(row_of_team(made))
            self._record(connection, "team.create", f"team/{team_id}", None, after)
        return made

    def find_team(self, words: str) -> TeamRecord:
        """Return the team with this id or name. Raises NotFoundError."""
        with self._database.read() as connection:
            return _find_team(connection, words)

    def update_team(
        self, words: str, changes: Mapping[str, Any], *, merge: Merge | None = None
    ) -> TeamRecord:
        """Change fields of a TeamOrder; `merge` returns further changes.

        Raises NotFoundError; ConflictError for a taken name; and the errors of `merge`.
        """
        with _names_taken(changes.get("name", "")), self._changes.changing() as connection:
            before = _find_team(connection, words)
            changed = {**changes, **(merge(before) if merge is not None else {})}
            order = TeamOrder(**(fields_of(before, TeamOrder) | changed))
            is_it = tables.teams.c.id == before.team_id
            connection.execute(update(tables.teams).where(is_it).values(row_of_team(order)))
            differ = differences(audited(row_of_team(before)), audited(row_of_team(order)))
            self._record(connection, "team.update", f"team/{before.team_id}", *differ)
            return _find_team(connection, before.team_id)

    def _record(
        self,
        connection: Connection,
        action: str,
        target: str,
        before: Details | None,
        after: Details,
    ) -> None:
        change = Change(action=action, target=target, before=before, after=after)
        record(connection, change, self._wall_clock())


def _changed(
    connection: Connection, since: KeyTable, version: int, num_keys: int
) -> frozenset[str] | None:
    """Return the ids of the keys and teams that have changed, as the audit log tells.

    None for more than are looked up one by one, and where the log lacks a change or a removed key.
    """
    log, number = tables.audit_log, version - since.version
    is_ours = log.c.action.startswith("key.") | log.c.action.startswith("team.")
    query = select(log.c.action, log.c.target).where(log.c.sequence > since.sequence, is_ours)
    if not 0 <= number <= _MAX_CHANGES:
        return None
    rows = connection.execute(query.limit(number + 1)).all()
    num_made = sum(row.action == "key.create" for row in rows)
    is_whole = len(rows) == number and num_keys == since.num_keys + num_made
    return frozenset(row.target.partition("/")[2] for row in rows) if is_whole else None


def _get_key(connection: Connection, key_id: str) -> KeyRecord:
    query = select(tables.keys).where(tables.keys.c.id == key_id)
    row = connection.execute(query).mappings().first()
    if row is None:
        raise NotFoundError("No key has this id.", code="not_found")
    return _known_key(row)


def _known_key(row: RowMapping) -> KeyRecord:
    """Return the key in a row. Raises ConflictError for one of a version that is not known here."""
    try:
        return key_of(row)
    except (ValueError, TypeError):
        raise ConflictError(
            f"The key {row['id']} has values that this version of Outrider does not know. Change "
            "it with the newer version that wrote it."
        ) from None


def _find_team(connection: Connection, words: str) -> TeamRecord:
    teams = tables.teams
    query = select(teams).where((teams.c.id == words) | (teams.c.name == words))
    found = [team_of(row) for row in connection.execute(query).mappings()]
    if not found:
        raise NotFoundError("No team has this id or name.", param="team", code="not_found")
    # A team may have been given another's id as its name.
    return next((team for team in found if team.team_id == words), found[0])


def _check_team(connection: Connection, team_id: str | None) -> None:
    query = select(tables.teams.c.id).where(tables.teams.c.id == team_id)
    if team_id is not None and connection.execute(query).first() is None:
        raise NotFoundError("No team has this id.", param="team", code="not_found")


def _new_row(record: KeyRecord) -> dict[str, Any]:
    """Return a key's first row."""
    return row_of_key(record) | {
        "id": record.key_id,
        "hash": record.key_hash.hex(),
        "hashed_with": record.hashed_with,
        "created_at": record.created_at,
    }


@contextmanager
def _names_taken(name: str) -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise ConflictError(f"Another team has the name {name!r}.", param="name") from None
