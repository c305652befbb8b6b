"""The endpoints of /admin that manage keys and teams."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.contract.errors.tree import BadRequestError, NotFoundError, StorageError
from outrider.gateway.contract.errors.validation import bad_request
from outrider.gateway.tenancy.keys.admin_schema import (
    MAX_PAGE,
    KeyCreate,
    KeyRotate,
    KeyUpdate,
    TeamCreate,
    TeamUpdate,
    key_report,
    name_set,
    team_report,
)
from outrider.gateway.tenancy.keys.key_store import KeyStore, ShownKey
from outrider.gateway.tenancy.keys.keys import KEY_ID, Principal
from outrider.gateway.tenancy.keys.merging import merged_changes
from outrider.gateway.tenancy.keys.parts import KeyParts
from outrider.gateway.tenancy.keys.records import KeyRecord, TeamRecord
from outrider.gateway.workers.siblings import Siblings

logger = logging.getLogger(__name__)

Parsed = TypeVar("Parsed", bound=BaseModel)
Answer = TypeVar("Answer")

_PAGE: Final = 100


class AdminApi:
    """Handlers of authenticated requests. Each refuses principals without the admin scope.

    They raise GatewayErrors: AuthenticationError, PermissionDeniedError, NotFoundError (also where
    there is no database), ConflictError, BadRequestError, StorageError.
    """

    def __init__(
        self,
        parts: KeyParts,
        read_body: Callable[[Request], Awaitable[bytes]],
        wall_clock: Callable[[], float] = time.time,
        siblings: Siblings | None = None,
    ) -> None:
        """Store the arguments. `read_body` reads a JSON body, within the limits of all bodies.

        `siblings`: this gateway's other processes, which read changed keys at once, too.
        """
        self._parts = parts
        self._read_body = read_body
        self._wall_clock = wall_clock
        self._siblings = siblings

    async def list_keys(self, request: Request, principal: Principal) -> Response:
        """Return a page of the keys."""
        store = self._store(principal)
        after = request.query_params.get("after")
        limit = _limit(request.query_params.get("limit"))
        keys, has_more = await asyncio.to_thread(store.page, after=after, limit=limit)
        data = [key_report(key, self._wall_clock()) for key in keys]
        return _json({"object": "list", "data": data, "has_more": has_more})

    async def create_key(self, request: Request, principal: Principal) -> Response:
        """Make a key, and show it once."""
        store = self._store(principal)
        wanted = await self._parsed(KeyCreate, request)

        def create() -> ShownKey:
            return store.create(wanted.order(_team_id(store, wanted.team)))

        shown = await self._change(create)
        logger.info("key created id=%s by=%s", shown.record.key_id, principal.key_id)
        return self._shown(shown)

    async def get_key(self, request: Request, principal: Principal) -> Response:
        """Return one key."""
        store = self._store(principal)
        return self._key(await asyncio.to_thread(store.get, _key_id(request)))

    async def update_key(self, request: Request, principal: Principal) -> Response:
        """Change the permissions of a key."""
        store = self._store(principal)
        key_id = _key_id(request)
        wanted = await self._parsed(KeyUpdate, request)
        given = wanted.model_fields_set

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
        logger.info("key changed id=%s by=%s", key_id, principal.key_id)
        return self._key(record)

    async def revoke_key(self, request: Request, principal: Principal) -> Response:
        """Take a key back; its row stays, for the ledger."""
        store = self._store(principal)
        key_id = _key_id(request)
        record = await self._change(lambda: store.revoke(key_id))
        logger.info("key revoked id=%s by=%s", key_id, principal.key_id)
        return self._key(record)

    async def rotate_key(self, request: Request, principal: Principal) -> Response:
        """Give a key a new secret, and show it once."""
        store = self._store(principal)
        key_id = _key_id(request)
        wanted = await self._parsed(KeyRotate, request)
        shown = await self._change(lambda: store.rotate(key_id, grace_s=wanted.grace_s))
        logger.info("key rotated id=%s by=%s", key_id, principal.key_id)
        return self._shown(shown)

    async def list_teams(self, request: Request, principal: Principal) -> Response:
        """Return all teams."""
        store = self._store(principal)
        teams = await asyncio.to_thread(store.teams)
        return _json({"object": "list", "data": [team_report(team) for team in teams]})

    async def create_team(self, request: Request, principal: Principal) -> Response:
        """Make a team."""
        store = self._store(principal)
        wanted = await self._parsed(TeamCreate, request)
        record = await self._change(lambda: store.create_team(wanted.order()))
        logger.info("team created id=%s by=%s", record.team_id, principal.key_id)
        return _json(team_report(record))

    async def get_team(self, request: Request, principal: Principal) -> Response:
        """Return one team, by its id or name."""
        store = self._store(principal)
        words = request.path_params["team"]
        return _json(team_report(await asyncio.to_thread(store.find_team, words)))

    async def update_team(self, request: Request, principal: Principal) -> Response:
        """Change the permissions of a team."""
        store = self._store(principal)
        words = request.path_params["team"]
        wanted = await self._parsed(TeamUpdate, request)
        changes = _plain_changes(wanted, wanted.model_fields_set)
        merge = partial(merged_changes, wanted=wanted)
        record: TeamRecord = await self._change(
            lambda: store.update_team(words, changes, merge=merge)
        )
        logger.info("team changed id=%s by=%s", record.team_id, principal.key_id)
        return _json(team_report(record))

    def _store(self, principal: Principal) -> KeyStore:
        """Return the key store, for an administrator."""
        self._parts.authenticator.require_admin(principal)
        if self._parts.store is None:
            raise NotFoundError(
                "This gateway has no keys because it has no database. Set database_url.",
                code="no_database",
            )
        return self._parts.store

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

    async def _parsed(self, model: type[Parsed], request: Request) -> Parsed:
        body = await self._read_body(request)
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise bad_request(error, body) from None

    def _key(self, record: KeyRecord) -> Response:
        return _json(key_report(record, self._wall_clock()))

    def _shown(self, shown: ShownKey) -> Response:
        return _json(key_report(shown.record, self._wall_clock()) | {"key": shown.text})


def _json(content: dict[str, Any]) -> Response:
    """Return a response that no cache may keep: it may hold a key."""
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(content), headers=headers, media_type="application/json")


def _limit(text: str | None) -> int:
    """Return the number of entries on a page."""
    if text is None:
        return _PAGE
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= MAX_PAGE:
        raise BadRequestError(f"limit must be a whole number from 1 to {MAX_PAGE}.", param="limit")
    return int(text)


def _key_id(request: Request) -> str:
    key_id: str = request.path_params["key_id"]
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
    return changes
