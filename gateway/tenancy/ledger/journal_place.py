"""The journal's place: beside the database, so that both are moved and backed up together."""

import hashlib
from pathlib import Path
from typing import Final

from outrider.gateway.settings.tree import Settings
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.urls import state_folder

_SUFFIX: Final = ".ledger-journal"
_HASH_LENGTH: Final = 12


def journal_folder(settings: Settings, database: Database) -> Path:
    """Return the configured folder, or one beside the database or in the state folder.

    Each database has its own: rows never reach another one than they were written for.
    """
    if settings.ledger.journal is not None:
        return settings.ledger.journal.expanduser().absolute()
    if database.path is not None:
        return database.path.with_name(database.path.name + _SUFFIX)
    name = hashlib.sha256(database.name.encode()).hexdigest()[:_HASH_LENGTH]
    return state_folder() / f"{name}{_SUFFIX}"
