"""All keys in memory, so that no request waits for a database."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gateway.storage.database import DatabaseError
from gateway.tenants.amounts import NO_LIMITS
from gateway.tenants.key_store import KeyStore
from gateway.tenants.keys import KeyHasher
from gateway.tenants.principal import Principal
from gateway.tenants.records import KeyRecord, KeyTable

logger = logging.getLogger(__name__)

_NEVER_READ: Final = -1
_SLOW_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BookEntry:
    """One key, ready to be compared and to be answered with.

    Times are seconds since 1970 (UTC); `old_hash` is taken until `old_hash_until`.
    """

    principal: Principal
    key_hash: bytes = field(repr=False)
    old_hash: bytes | None = field(default=None, repr=False)
    old_hash_until: float = 0.0
    expires_at: float | None = None
    is_revoked: bool = False


class KeyBook:
    """The last known state of the keys, looked at again every `refresh_s`.

    While the database is away the last state is served. For one event loop.
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
        """`on_failure` is called for each look at the keys that failed, or that takes `slow_s`."""
        self._store = store
        self._hasher = hasher
        self._refresh_s = refresh_s
        self._isolate_tenants = isolate_tenants
        self._on_failure = on_failure
        self._slow_s = slow_s
        self._version = _NEVER_READ
        self._entries: dict[str, BookEntry] = {}
        self._has_keys = False
        self._is_away = False
        self._on_look: list[Callable[[], None]] = []
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def has_keys(self) -> bool:
        """Whether there has ever been a key, as far as this process knows. Never false again.

        A gateway whose last key is revoked must not open its doors to everybody.
        """
        return self._has_keys

    def __len__(self) -> int:
        """How many keys there are, revoked ones too."""
        return len(self._entries)

    def find(self, key_id: str) -> BookEntry | None:
        """The key with this public id."""
        return self._entries.get(key_id)

    def subscribe(self, on_look: Callable[[], None]) -> None:
        """Have this called after each look at the keys, also after one that failed."""
        self._on_look.append(on_look)

    async def start(self) -> None:
        """Read all keys, and go on looking. Raises DatabaseError where they cannot be read."""
        await self.refresh()
        self._task = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            async with self._one_at_a_time:  # a thread that reads would outlive its task
                self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def refresh(self) -> None:
        """Know of all changes until now. Raises DatabaseError; the last state stays then."""
        try:
            async with self._one_at_a_time:
                version = await asyncio.to_thread(self._store.version)
                if version != self._version:
                    table, self._entries = await asyncio.to_thread(self._read)
                    self._has_keys = self._has_keys or table.has_any
                    self._version = table.version
        finally:
            for on_look in self._on_look:
                on_look()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s)
            try:
                await self._look()
            except DatabaseError as error:
                if not self._is_away:
                    logger.warning(
                        "keys cannot be read, the last known ones are used error=%s", error.detail
                    )
                self._is_away = True
                self._on_failure()
            except Exception as error:  # noqa: BLE001 - the next look may be luckier
                logger.error("keys were not read error=%s message=%s", type(error).__name__, error)
                self._on_failure()
            else:
                if self._is_away:
                    logger.info("keys can be read again")
                self._is_away = False

    async def _look(self) -> None:
        """Look at the keys, and complain for as long as the database says nothing at all."""
        look = asyncio.create_task(self.refresh())
        try:
            while not (await asyncio.wait({look}, timeout=self._slow_s))[0]:
                if not self._is_away:
                    logger.warning(
                        "keys cannot be read, the last known ones are used; the database does not "
                        "answer waited_s=%g",
                        self._slow_s,
                    )
                self._is_away = True
                self._on_failure()
        finally:
            look.cancel()
        await look

    def _read(self) -> tuple[KeyTable, dict[str, BookEntry]]:
        """All keys, ready for use. Slow where there are many: for a worker thread."""
        table = self._store.load()
        strangers = [key.key_id for key in table.keys if key.hashed_with != self._hasher.name]
        if strangers:
            logger.warning(
                "keys were made under another keys.secret and cannot be used count=%d first=%s",
                len(strangers),
                strangers[0],
            )
        entries = {}
        for key in table.keys:
            if key.team_id is None or key.team_id in table.teams:
                entries[key.key_id] = self._entry(key, table)
            else:  # without its team's limits it would have none
                logger.error("key has a team that cannot be read id=%s", key.key_id)
        return table, entries

    def _entry(self, key: KeyRecord, table: KeyTable) -> BookEntry:
        team = None if key.team_id is None else table.teams[key.team_id]
        tenant = key.key_id if key.team_id is None else key.team_id
        principal = Principal(
            key_id=key.key_id,
            name=key.name,
            tenant=tenant,
            team_id=key.team_id,
            scopes=key.scopes,
            limits=key.limits,
            team_limits=NO_LIMITS if team is None else team.limits,
            cache_salt=self._hasher.cache_salt(tenant) if self._isolate_tenants else "",
            weight=key.weight if team is None else team.weight,
            labels=key.labels,
        )
        return BookEntry(
            principal=principal,
            key_hash=key.key_hash,
            old_hash=key.old_hash,
            old_hash_until=key.old_hash_until or 0.0,
            expires_at=key.expires_at,
            is_revoked=key.revoked_at is not None,
        )
