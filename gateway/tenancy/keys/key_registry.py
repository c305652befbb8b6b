"""All keys in memory, so that no request waits for a database."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from outrider.gateway.storage.refresh import PeriodicRefresh
from outrider.gateway.tenancy.keys.amounts import NO_LIMITS
from outrider.gateway.tenancy.keys.key_store import KeyStore
from outrider.gateway.tenancy.keys.keys import KeyHasher, Principal
from outrider.gateway.tenancy.keys.records import KeyRecord, KeyTable, TeamRecord

logger = logging.getLogger(__name__)

_NEVER_READ: Final = -1
_SLOW_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """One key, ready to be compared. Times are seconds since 1970 (UTC)."""

    principal: Principal
    key_hash: bytes = field(repr=False)
    old_hash: bytes | None = field(default=None, repr=False)
    """Accepted until `old_hash_until`."""
    old_hash_until: float = 0.0
    expires_at: float | None = None
    is_revoked: bool = False


class KeyRegistry:
    """The last known state of the keys, read again every `refresh_s`.

    While the database is unavailable the last known state is used. For one event loop.
    """

    def __init__(
        self,
        store: KeyStore,
        hasher: KeyHasher,
        *,
        refresh_s: float,
        isolate_tenants: bool = True,
        on_failure: Callable[[], None] = lambda: None,
        slow_s: float = _SLOW_S,
    ) -> None:
        """`on_failure` is called after each read that failed, and every `slow_s` that one takes."""
        self._store = store
        self._hasher = hasher
        self._isolate_tenants = isolate_tenants
        self._entries: dict[str, KeyEntry] = {}
        self._table: KeyTable | None = None
        """As it was read last, without its keys."""
        self._on_refresh: list[Callable[[], None]] = []
        self._refresh = PeriodicRefresh(
            self._read_changes,
            name="keys",
            meanwhile="the last known ones are used",
            every_s=refresh_s,
            slow_s=slow_s,
            on_failure=on_failure,
        )

    @property
    def has_keys(self) -> bool:
        """Return whether this process has ever seen a key. Once true it stays true.

        A gateway whose last key is revoked must not accept requests without one.
        """
        return self._table is not None and self._table.has_any

    def __len__(self) -> int:
        """Return the number of keys, revoked ones included."""
        return len(self._entries)

    def find(self, key_id: str) -> KeyEntry | None:
        """Return the key with this public id."""
        return self._entries.get(key_id)

    def member(self, tenant: str) -> Principal | None:
        """Return a principal of a tenant: of a team, or the key that is its own; None for none."""
        entry = self._entries.get(tenant)
        if entry is not None and entry.principal.tenant == tenant:
            return entry.principal
        principals = (entry.principal for entry in self._entries.values())
        return next((each for each in principals if each.tenant == tenant), None)

    def limited(self) -> list[Principal]:
        """Return the principals of valid keys that have limits, or whose team has."""
        principals = (each.principal for each in self._entries.values() if not each.is_revoked)
        return [principal for principal in principals if principal.is_limited]

    @property
    def version(self) -> int:
        """Return a number that changes with the keys and teams."""
        return _NEVER_READ if self._table is None else self._table.version

    def team(self, words: str) -> TeamRecord | None:
        """Return the team of this id, else of this name."""
        teams = {} if self._table is None else self._table.teams
        named = (team for team in teams.values() if team.name == words)
        return teams.get(words) or next(named, None)

    def cache_salt(self, tenant: str, end_user: str = "") -> str:
        """Return the salt of a tenant's prefix cache, or of one person's in it."""
        owner = f"{tenant}\0{end_user}" if end_user else tenant
        return self._hasher.cache_salt(owner) if self._isolate_tenants else ""

    def subscribe(self, on_refresh: Callable[[], None]) -> None:
        """Have `on_refresh` called after each read of the keys, also after one that failed."""
        self._on_refresh.append(on_refresh)

    async def start(self) -> None:
        """Read all keys, and begin to look for changes. Raises DatabaseError."""
        await self.refresh()
        self._refresh.start()

    async def close(self) -> None:
        """Stop looking for changes."""
        await self._refresh.close()

    async def refresh(self) -> None:
        """Read the changes so far. Raises DatabaseError; then the last known state stays."""
        await self._refresh.run()

    async def _read_changes(self) -> None:
        try:
            version = await asyncio.to_thread(self._store.version)
            if version != self.version:
                table, self._entries = await asyncio.to_thread(self._read)
                self._table = replace(table, keys=())
        finally:
            for on_refresh in self._on_refresh:
                on_refresh()

    def _read(self) -> tuple[KeyTable, dict[str, KeyEntry]]:
        """Return all keys, ready for use. Slow where many have changed: for a worker thread."""
        table = self._store.load(self._table)
        unusable = [key.key_id for key in table.keys if key.hashed_with != self._hasher.name]
        if unusable:
            logger.warning(
                "keys were made under another keys.secret and cannot be used count=%d first=%s",
                len(unusable),
                unusable[0],
            )
        entries = {} if table.changed is None else dict(self._entries)
        for key_id in table.changed or ():
            entries.pop(key_id, None)
        for key in table.keys:
            if key.team_id is None or key.team_id in table.teams:
                entries[key.key_id] = self._entry(key, table)
            else:  # without its team's limits it would have none
                logger.error("key has a team that cannot be read id=%s", key.key_id)
        return table, entries

    def _entry(self, key: KeyRecord, table: KeyTable) -> KeyEntry:
        team = None if key.team_id is None else table.teams[key.team_id]
        tenant = key.key_id if key.team_id is None else key.team_id
        principal = Principal(
            key_id=key.key_id,
            name=key.name,
            tenant=tenant,
            team_id=key.team_id,
            team_name=None if team is None else team.name,
            scopes=key.scopes,
            limits=key.limits,
            team_limits=NO_LIMITS if team is None else team.limits,
            cache_salt=self.cache_salt(tenant),
            weight=key.weight if team is None else team.weight,
            labels=key.labels,
        )
        return KeyEntry(
            principal=principal,
            key_hash=key.key_hash,
            old_hash=key.old_hash,
            old_hash_until=key.old_hash_until or 0.0,
            expires_at=key.expires_at,
            is_revoked=key.revoked_at is not None,
        )
