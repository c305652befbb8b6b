"""SQLite files that have the gateway's tables: to make them takes longer than most tests.

Migrations are tested in tests/gateway/storage.
"""

import tempfile
from functools import cache
from pathlib import Path

from outrider.gateway.storage.database import Database


def with_tables(path: Path) -> str:
    """Return the URL of a database at `path`; makes one without rows where there is none."""
    if not path.exists():
        path.touch(0o600)
        path.write_bytes(_empty())
    return f"sqlite:///{path}"


@cache
def _empty() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty.db"
        database = Database(f"sqlite:///{path}")
        database.migrate()
        database.close()
        return path.read_bytes()
