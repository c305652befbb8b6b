"""The endpoints of /admin that manage keys and teams."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from starlette.requests import Request

from outrider.gateway.contract.errors.tree import BadRequestError, NotFoundError, StorageError
from outrider.gateway.tenancy.keys.admin_handlers import (
    AdminCall,
    AdminHandlers,
    AdminQuery,
    admin,
)
from outrider.gateway.tenancy.keys.admin_schema import (
    MAX_PAGE,
    KeyCreate,
    KeyLimits,
    KeyList,
    KeyReport,
    KeyRotate,
    KeyUpdate,
    LimitsPatch,
    NewKeyReport,
    TeamCreate,
    TeamList,
    TeamReport,
    TeamUpdate,
    key_report,
    name_set,
    new_key_report,
    team_report,
    unknown_tiers,
)
from outrider.gateway.tenancy.keys.key_parts import KeyParts
from outrider.gateway.tenancy.keys.key_store import KeyStore, ShownKey
from outrider.gateway.tenancy.keys.keys import KEY_ID
from outrider.gateway.tenancy.keys.merging import merged_changes
from outrider.gateway.tenancy.keys.records import KeyRecord
from outrider.gateway.workers.siblings import Siblings
from outrider.verifier.params import TIERS

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_PAGE: Final = 100
_AFTER: Final = AdminQuery(name="after", description="Only keys whose ids come after this one.")
_NAME: Final = AdminQuery(
    name="name", description="Only keys with this in their name, or with this id or prefix."
)
_LIMIT: Final = AdminQuery(
    name="limit", description="How many at most.", most=MAX_PAGE, default=_PAGE
)


class AdminApi(AdminHandlers):
    """Handlers of keys and teams; NotFoundError where there is no database."""

    def __init__(
        self,
        parts: KeyParts,
        read_body: Callable[[Request], Awaitable[bytes]],
        wall_clock: Callable[[], float] = time.time,
        siblings: Siblings | None = None,
        upstream_tiers: Collection[str] = (),
    ) -> None:
        """`siblings`: this gateway's other processes, which read changed keys at once, too."""
        super().__init__(parts.authenticator, read_body)
        self._parts = parts
        self._wall_clock = wall_clock
        self._siblings = siblings
        self._tiers = (*TIERS, *upstream_tiers)

    @admin("GET", "/admin/keys", "A page of the keys.", queries=(_AFTER, _NAME, _LIMIT))
    async def list_keys(self, call: AdminCall) -> KeyList:
        """Return a page of the keys."""
        after, limit = call.text(_AFTER), call.number(_LIMIT) or _PAGE
        keys, has_more = await asyncio.to_thread(
            self._store.page, after=after, limit=limit, words=call.text(_NAME)
        )
        return KeyList(data=[self._report(key) for key in keys], has_more=has_more)

    @admin("POST", "/admin/keys", "The key, shown once.")
    async def create_key(self, call: AdminCall, wanted: KeyCreate) -> NewKeyReport:
        """Make a key, and show it once."""
        store = self._store
        self._check_tiers(wanted.limits)

        def create() -> ShownKey:
            return store.create(wanted.order(_team_id(store, wanted.team)))

        shown = await self._change(create)
        logger.info("key created id=%s by=%s", shown.record.key_id, call.by)
        return new_key_report(shown.record, shown.text, self._wall_clock())

    @admin("GET", "/admin/keys/{key_id}", "The key.")
    async def get_key(self, call: AdminCall) -> KeyReport:
        """Return one key."""
        return self._report(await asyncio.to_thread(self._store.get, _key_id(call)))

    @admin("PATCH", "/admin/keys/{key_id}", "The key as it is now.")
    async def update_key(self, call: AdminCall, wanted: KeyUpdate) -> KeyReport:
        """Change the permissions of a key."""
        self._check_tiers(wanted.limits)
        store, key_id, given = self._store, _key_id(call), wanted.model_fields_set

        def update() -> KeyRecord:
            changes: dict[str, Any] = _plain_changes(wanted, given)
            if "expires_at" in given:
                changes["expires_at"] = wanted.expires_at
            if "team" in given:
                changes["team_id"] = _team_id(store, wanted.team)
            return store.update(
                key_id,
                changes,
                scopes=_changed_scopes(wanted, given),
                merge=partial(merged_changes, wanted=wanted),
            )

        record = await self._change(update)
        logger.info("key changed id=%s by=%s", key_id, call.by)
        return self._report(record)

    @admin("DELETE", "/admin/keys/{key_id}", "The key, revoked.")
    async def revoke_key(self, call: AdminCall) -> KeyReport:
        """Take a key back; its row stays, for the ledger."""
        store, key_id = self._store, _key_id(call)
        record = await self._change(lambda: store.revoke(key_id))
        logger.info("key revoked id=%s by=%s", key_id, call.by)
        return self._report(record)

    @admin(
        "POST",
        "/admin/keys/{key_id}/rotate",
        "The key with its new secret, shown once.",
        conflicts=True,
    )
    async def rotate_key(self, call: AdminCall, wanted: KeyRotate) -> NewKeyReport:
        """Give a key a new secret, and show it once."""
        store, key_id = self._store, _key_id(call)
        shown = await self._change(lambda: store.rotate(key_id, grace_s=wanted.grace_s))
        logger.info("key rotated id=%s by=%s", key_id, call.by)
        return new_key_report(shown.record, shown.text, self._wall_clock())

    @admin("GET", "/admin/teams", "All teams.")
    async def list_teams(self, _: AdminCall) -> TeamList:
        """Return all teams."""
        teams = await asyncio.to_thread(self._store.teams)
        return TeamList(data=[team_report(team) for team in teams])

    @admin("POST", "/admin/teams", "The team.", conflicts=True)
    async def create_team(self, call: AdminCall, wanted: TeamCreate) -> TeamReport:
        """Make a team."""
        store = self._store
        self._check_tiers(wanted.limits)
        record = await self._change(lambda: store.create_team(wanted.order()))
        logger.info("team created id=%s by=%s", record.team_id, call.by)
        return team_report(record)

    @admin("GET", "/admin/teams/{team}", "The team.")
    async def get_team(self, call: AdminCall) -> TeamReport:
        """Return one team, by its id or name."""
        return team_report(await asyncio.to_thread(self._store.find_team, call.name("team")))

    @admin("PATCH", "/admin/teams/{team}", "The team as it is now.", conflicts=True)
    async def update_team(self, call: AdminCall, wanted: TeamUpdate) -> TeamReport:
        """Change the permissions of a team."""
        self._check_tiers(wanted.limits)
        store, words = self._store, call.name("team")
        changes = _plain_changes(wanted, wanted.model_fields_set)
        merge = partial(merged_changes, wanted=wanted)
        record = await self._change(lambda: store.update_team(words, changes, merge=merge))
        logger.info("team changed id=%s by=%s", record.team_id, call.by)
        return team_report(record)

    @property
    def _store(self) -> KeyStore:
        if self._parts.store is None:
            raise NotFoundError(
                "This gateway has no keys because it has no database. Set database_url.",
                code="no_database",
            )
        return self._parts.store

    def _check_tiers(self, limits: KeyLimits | LimitsPatch | None) -> None:
        """Raise BadRequestError for a limit of a tier that does not exist: it would limit none."""
        for tier in unknown_tiers(limits, self._tiers):
            raise BadRequestError(
                f"limits.models: unknown tier {tier!r}; available: {', '.join(self._tiers)}.",
                param="limits.models",
            )

    async def _change(self, change: Callable[[], Answer]) -> Answer:
        """Change keys and refresh the registry at once, so that the answer shows the new state."""
        answer = await asyncio.to_thread(change)
        await self.look_again()
        if self._siblings is not None:
            await self._siblings.others("read_keys")
        return answer

    async def look_again(self, _: object = None) -> None:
        """Read the keys again now, if the database lets us."""
        if self._parts.registry is not None:
            try:
                await self._parts.registry.refresh()
            except StorageError:  # it is changed; the registry looks again by itself
                logger.warning("keys were changed and could not be read again")

    def _report(self, record: KeyRecord) -> KeyReport:
        return key_report(record, self._wall_clock())


def _key_id(call: AdminCall) -> str:
    key_id = call.name("key_id")
    if not KEY_ID.fullmatch(key_id):
        raise NotFoundError("No key has this id.", code="not_found")
    return key_id


def _team_id(store: KeyStore, words: str | None) -> str | None:
    return None if words is None else store.find_team(words).team_id


def _plain_changes(wanted: KeyUpdate | TeamUpdate, given: set[str]) -> dict[str, Any]:
    """Return the changes that keys and teams share, except limits and labels."""
    return {name: getattr(wanted, name) for name in ("name", "weight") if name in given}


def _changed_scopes(wanted: KeyUpdate, given: set[str]) -> Mapping[str, Any]:
    """Return the fields of Scopes to change."""
    changes: dict[str, Any] = {}
    if "models" in given:
        changes["models"] = name_set(wanted.models)
    if "tiers" in given:
        changes["tiers"] = name_set(wanted.tiers)
    if "admin" in given:
        changes["is_admin"] = wanted.admin
    if "metrics" in given:
        changes["reads_metrics"] = wanted.metrics
    if "reveals" in given:
        changes["reveals"] = wanted.reveals
    if "prefer" in given:
        changes["prefer"] = wanted.prefer
    return changes
