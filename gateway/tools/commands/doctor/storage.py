"""Checks of `outrider doctor` on what a gateway keeps: database, disk, keys."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from outrider.gateway.settings.paths import cache_folder
from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.gateway.tools.commands.doctor.findings import Finding

_GIB: Final = 2**30
_ENOUGH_BYTES: Final = _GIB


def _database(settings: Settings) -> Finding:
    """Open the database, as the gateway would; its tables are made if they are missing."""
    from outrider.gateway.storage.open import open_database

    try:
        database = open_database(settings)
    except SettingsError as error:
        what, _, advice = str(error).partition(". ")
        return Finding(name="database", status="failed", detail=what, advice=advice)
    if database is None:
        detail = 'none (database_url = "none"): no keys, no ledger'
        return Finding(name="database", status="ok", detail=detail)
    try:
        return Finding(name="database", status="ok", detail=f"{database.name} can be used")
    finally:
        database.close()


def _disk(settings: Settings) -> Finding:
    """Look for room where the database and the models are kept."""
    from outrider.gateway.storage.open import open_database

    places = {"the cache": cache_folder(os.environ)}
    database = open_database(settings)
    if database is not None:
        places["the database"] = database.path and database.path.parent
        database.close()
    free = {name: _free_bytes(place) for name, place in places.items() if place is not None}
    detail = ", ".join(f"{bytes_ / _GIB:.1f} GiB free for {name}" for name, bytes_ in free.items())
    if not free or min(free.values()) >= _ENOUGH_BYTES:
        return Finding(name="disk", status="ok", detail=detail or "nothing is kept on this machine")
    return Finding(
        name="disk",
        status="warning",
        detail=detail,
        advice="Make room: a full disk stops the ledger, and models cannot be fetched.",
    )


def _free_bytes(place: Path) -> int:
    """Return the free bytes of the file system that a folder is on, or will be."""
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _keys(settings: Settings) -> Finding:
    """Say whether clients need a key, and whether one exists."""
    from outrider.gateway.settings.loopback import is_loopback
    from outrider.gateway.storage.open import open_database
    from outrider.gateway.tenancy.keys.key_parts import key_store

    mode, host = settings.keys.mode, settings.server.host
    if mode == "off":
        is_open = not is_loopback(host)
        return Finding(
            name="keys",
            status="warning" if is_open else "ok",
            detail="keys.mode is off: every client has full access",
            advice=f"Others reach {host}: set keys.mode to required." if is_open else "",
        )
    database = open_database(settings)
    if database is None:
        detail = "no database, so no keys: only this machine may call the API"
        return Finding(name="keys", status="ok", detail=detail)
    try:
        has_any = key_store(settings, database).load().has_any
    finally:
        database.close()
    if has_any:
        return Finding(name="keys", status="ok", detail="there are keys, and clients need one")
    if mode == "required":
        return Finding(
            name="keys",
            status="warning",
            detail="keys are required and there is none: no client can call the API",
            advice="Create one: outrider keys create --name NAME",
        )
    detail = "none yet: only this machine may call the API, and needs no key"
    return Finding(name="keys", status="ok", detail=detail)


STORAGE_CHECKS: Final[Mapping[str, Callable[[Settings], Finding]]] = {
    "database": _database,
    "disk": _disk,
    "keys": _keys,
}
