"""Files and batches as the database has them. Times are seconds since 1970."""

from typing import Any, Final

import msgspec

from outrider.gateway.http.apis.batches.objects import (
    BatchFault,
    BatchFaults,
    BatchObject,
    BatchStatus,
    FileObject,
    Purpose,
    RequestCounts,
)
from outrider.gateway.http.apis.responses.answers import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseUsage,
)

OPEN: Final[tuple[BatchStatus, ...]] = ("validating", "in_progress", "finalizing", "cancelling")
"""The states of batches that are not over."""
_AS_IT_IS: Final = ("id", "endpoint", "input_file_id", "status", "output_file_id", "error_file_id")
_MOMENTS: Final = (
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at"),
    *("failed_at", "expired_at", "cancelling_at", "cancelled_at"),
)


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table `files`."""

    id: str
    tenant: str
    key_id: str
    purpose: Purpose
    filename: str
    num_bytes: int
    created_at: float
    expires_at: float

    def told(self) -> FileObject:
        """Return it as clients see it."""
        return FileObject(
            id=self.id,
            bytes=self.num_bytes,
            created_at=int(self.created_at),
            expires_at=int(self.expires_at),
            filename=self.filename,
            purpose=self.purpose,
        )


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table `batches`."""

    id: str
    tenant: str
    key_id: str
    endpoint: str
    status: BatchStatus
    input_file_id: str
    created_at: float
    expires_at: float
    output_ttl_s: float
    model: str = ""
    output_file_id: str | None = None
    error_file_id: str | None = None
    fields: str | None = None
    errors: str | None = None
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    completed_at: float | None = None
    failed_at: float | None = None
    expired_at: float | None = None
    cancelling_at: float | None = None
    cancelled_at: float | None = None
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0
    owner: str | None = None
    owned_until: float = 0.0

    def told(self) -> BatchObject:
        """Return it as clients see it."""
        faults = None
        if self.errors is not None:
            faults = BatchFaults(data=msgspec.json.decode(self.errors, type=list[BatchFault]))
        same: dict[str, Any] = {name: getattr(self, name) for name in _AS_IT_IS}
        same |= {name: _whole(getattr(self, name)) for name in _MOMENTS}
        return BatchObject(
            errors=faults,
            model=self.model or None,
            request_counts=RequestCounts(
                total=self.num_total, completed=self.num_completed, failed=self.num_failed
            ),
            usage=ResponseUsage(
                input_tokens=self.num_prompt_tokens,
                input_tokens_details=InputTokensDetails(
                    cached_tokens=self.num_cached_tokens, cache_write_tokens=0
                ),
                output_tokens=self.num_completion_tokens,
                output_tokens_details=OutputTokensDetails(
                    reasoning_tokens=self.num_reasoning_tokens
                ),
                total_tokens=self.num_prompt_tokens + self.num_completion_tokens,
            ),
            metadata=None if self.fields is None else msgspec.json.decode(self.fields),
            **same,
        )


def _whole(moment_s: float | None) -> int | None:
    return None if moment_s is None else int(moment_s)
