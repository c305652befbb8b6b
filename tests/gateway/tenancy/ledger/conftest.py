"""One database of each kind for all of these tests, emptied before each."""

from collections.abc import Iterator

import pytest

from outrider.gateway.storage.tables import metadata
from tests.gateway.tenancy.ledger.ledgers import FrailDatabase, opened


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def migrated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FrailDatabase]:
    """A database with its tables: making them takes longer than most tests."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('ledger') / 'test.db'}"
    else:
        url = request.getfixturevalue("postgres_server").new_database()
    with opened(url) as database:
        yield database


@pytest.fixture
def database(migrated: FrailDatabase) -> FrailDatabase:
    """The same, empty and at hand."""
    migrated.is_away = False
    with migrated.write() as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(table.delete())
    return migrated
