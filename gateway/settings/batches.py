"""Settings of files and batches (`[batches]`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from outrider.gateway.settings.sections import Count, Section
from outrider.gateway.settings.tiers import Complaint

_DAY_S: Final = 86_400.0


class BatchSettings(Section):
    """Files and batches of requests (/v1/files, /v1/batches), which use what others leave idle."""

    enabled: bool = False
    """Accept files and batches. Requests and answers then lie on disk until they expire."""
    folder: Path | None = None
    """Folder of the files, for this database alone; unset: beside the database, or in the state
    folder. Gateways of several machines need a shared one."""
    price: Annotated[float, Field(ge=0, le=1)] = 0.5
    """What clients pay for a batch's tokens, as a share of the usual price."""
    concurrent_requests: Annotated[int, Field(ge=1, le=1024)] = 4
    """Requests of batches that a process works on at once."""
    max_other_requests: Annotated[int, Field(ge=0)] = 0
    """A request of a batch begins only while the engine and the upstream tiers work on at most so
    many other requests. Above 0 it does not stand still beside them, either: its latency class is
    batch in the place of idle."""
    max_file_bytes: Count = 200 * 2**20
    """Size of an upload."""
    max_bytes_per_tenant: Count = 2 * 2**30
    """Size of a tenant's files, each with 4 KiB more than its content. Beyond it nothing is
    uploaded or begun; results are written."""
    ttl_s: Annotated[float, Field(ge=3600, le=365 * _DAY_S)] = 30 * _DAY_S
    """Time that files, and batches that are over, are kept."""


def batch_complaints(batches: BatchSettings, database_url: str | None) -> Iterator[Complaint]:
    """Yield settings of batches that contradict others."""
    if batches.enabled and (database_url or "").strip().lower() == "none":
        yield Complaint(
            ("batches", "enabled"),
            batches.enabled,
            "batches are kept in the database: set database_url",
        )
