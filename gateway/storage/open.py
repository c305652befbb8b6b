"""The database that the settings name, ready to be used."""

from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.gateway.storage.database import Database, DatabaseError
from outrider.gateway.storage.urls import NO_DATABASE, default_database_url


def open_database(settings: Settings, *, database_url: str | None = None) -> Database | None:
    """Return the database with all its tables; None where the settings name none.

    `database_url` goes before the settings'. Blocks. Raises SettingsError for one that cannot be
    used, and for one that cannot be reached now.
    """
    url = database_url or settings.database_url
    if url is not None and url.strip().lower() == NO_DATABASE:
        return None
    database = Database(default_database_url() if url is None else url)
    try:
        database.migrate()
    except DatabaseError as error:
        database.close()
        raise SettingsError(
            f'{error.detail}. See that it runs, or set database_url; "{NO_DATABASE}" does without.'
        ) from None
    except SettingsError:
        database.close()
        raise
    return database
