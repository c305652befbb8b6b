"""Settings of the ledger: whether there is one, how often it is written."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from gateway.settings.sections import Section


class LedgerSettings(Section):
    """The record of each attempt at an answer. It holds no text."""

    enabled: bool = True
    """Keep a ledger, if there is a database."""
    flush_ms: Annotated[float, Field(gt=0, le=60_000)] = 100.0
    """How often rows go to the journal: what a killed process can lose at most."""
    batch_ms: Annotated[float, Field(gt=0, le=600_000)] = 1000.0
    """How often rows go from the journal to the database."""
    journal: Path | None = None
    """Folder of the journal; unset: beside the database, or in the state folder."""
    retention_days: Annotated[int, Field(ge=1)] | None = None
    """Rows older than this are deleted; unset: never."""
