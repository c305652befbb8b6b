"""What /v1/files and /v1/batches take and give, in the shapes of OpenAI's API."""

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from outrider.gateway.contract.schema.common import WHOLE, RequestModel
from outrider.gateway.contract.schema.structs import CompleteModel, says
from outrider.gateway.http.apis.responses.answers import ResponseUsage

Purpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
BatchEndpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
]
MIN_TTL_S: Final = 3600
MAX_TTL_S: Final = 2_592_000
_Label = Annotated[str, Field(max_length=512)]


class FileObject(CompleteModel, kw_only=True):
    """A file. `bytes` is its size."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class _Page(CompleteModel, kw_only=True):
    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(_Page, kw_only=True):
    """A page of files."""

    data: list[FileObject]


class DeletedFile(CompleteModel, kw_only=True):
    """The file that is there no more."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class OutputExpiry(RequestModel):
    """When the files of results expire."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S), WHOLE]


class BatchCreation(RequestModel):
    """A batch to begin."""

    model_config = ConfigDict(extra="ignore")

    input_file_id: Annotated[str, Field(min_length=1, max_length=64)]
    endpoint: BatchEndpoint
    completion_window: Literal["24h"]
    metadata: (
        Annotated[dict[Annotated[str, Field(max_length=64)], _Label], Field(max_length=16)] | None
    ) = None
    output_expires_after: OutputExpiry | None = None


class BatchFault(CompleteModel, kw_only=True):
    """What is wrong with a batch; `line` counts from 1 in its file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchFaults(CompleteModel, kw_only=True):
    """The first faults."""

    object: Literal["list"] = "list"
    data: list[BatchFault]


class RequestCounts(CompleteModel, kw_only=True):
    """Requests of a batch; `completed` were answered, `failed` were not."""

    total: int
    completed: int
    failed: int


class BatchObject(CompleteModel, kw_only=True):
    """A batch and how far it is. Times are whole seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchFaults | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: ResponseUsage
    metadata: Annotated[dict[str, Any] | None, says("As it was given.")]


class BatchList(_Page, kw_only=True):
    """A page of batches, the latest first."""

    data: list[BatchObject]


BATCH_MODELS: Final = (FileObject, FileList, DeletedFile, BatchCreation, BatchObject, BatchList)
