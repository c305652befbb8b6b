"""Settings of the ledger: whether one is kept, how often it is written."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from outrider.gateway.settings.sections import Section


class LedgerSettings(Section):
    """Record of each attempt at an answer, without prompts and answers."""

    enabled: bool = True
    """Keep a ledger, if there is a database."""
    flush_ms: Annotated[float, Field(gt=0, le=60_000)] = 100.0
    """Interval of writes to the journal: the most that a killed process loses."""
    batch_ms: Annotated[float, Field(gt=0, le=600_000)] = 1000.0
    """Interval of moves from the journal to the database."""
    journal: Path | None = None
    """Folder of the journal; unset: beside the database, or in the state folder."""
    end_users: Literal["plain", "hashed"] = "plain"
    """Keep the ids of end users as requests name them, or only a keyed hash of them."""
    retention_days: Annotated[int, Field(ge=1)] | None = None
    """Rows older than this are deleted; unset: never."""
