"""Which settings cannot be had with several gateway processes."""

import os
from collections.abc import Iterator

from outrider.gateway.settings.sections import EngineSettings, ModelSettings, ServerSettings
from outrider.gateway.settings.tiers import Complaint


def worker_complaints(
    server: ServerSettings, models: ModelSettings, engine: EngineSettings, database_url: str | None
) -> Iterator[Complaint]:
    """Yield settings that contradict `server.workers`."""
    if server.workers == 1:
        return
    path, several = ("server", "workers"), f"{server.workers} worker processes"
    if os.name != "posix":
        yield Complaint(path, server.workers, f"{several} need Linux or macOS; leave it at 1")
    if models.is_any and not engine.process and not engine.replicas:
        yield Complaint(
            path,
            server.workers,
            f"{several} share one engine, which must have a process of its own: leave out "
            "engine.process = false",
        )
    if database_url is not None and database_url.strip().lower() == "none":
        yield Complaint(
            path,
            server.workers,
            f"{several} share keys, experiments and the ledger through a database: leave out "
            "database_url = none (an SQLite file is enough)",
        )
