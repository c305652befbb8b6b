"""Secrets in a database, shared by all gateways that use it."""

import random
from typing import Final

from sqlalchemy import select

from outrider.gateway.storage import tables
from outrider.gateway.storage.database import Database, insert_new

_SECRET_BYTES: Final = 32


def drawn_secret(database: Database, name: str, randomness: random.Random) -> bytes:
    """Return the secret of this name, 32 bytes, drawn at the first call. Raises DatabaseError.

    `randomness` must be the operating system's.
    """
    drawn = randomness.randbytes(_SECRET_BYTES).hex()
    secrets = tables.secrets
    wanted = select(secrets.c.value).where(secrets.c.name == name)
    with database.read() as connection:
        kept = connection.execute(wanted).scalar()
    if kept is None:
        with database.write() as connection:
            insert_new(connection, secrets, [{"name": name, "value": drawn}])
            kept = connection.execute(wanted).scalar_one()
    return bytes.fromhex(kept)
