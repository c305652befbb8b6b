"""The paths of files and batches, and their descriptions."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI, Request
from starlette.responses import Response

from outrider.gateway.contract.errors.tree import NotFoundError, PermissionDeniedError
from outrider.gateway.contract.schema.openapi import (
    failures,
    json_content,
    operation,
    query,
    success,
)
from outrider.gateway.http.apis.api import Caller
from outrider.gateway.http.apis.batches.endpoints import (
    DEFAULT_BATCHES,
    MAX_BATCHES,
    MAX_FILES,
    BatchEndpoints,
)
from outrider.gateway.http.apis.batches.objects import (
    MAX_TTL_S,
    MIN_TTL_S,
    BatchCreation,
    BatchList,
    BatchObject,
    DeletedFile,
    FileList,
    FileObject,
)
from outrider.gateway.http.apis.batches.runner import BatchRunner
from outrider.gateway.http.apis.batches.uploads import Uploads
from outrider.gateway.http.server.auth_dispatcher import principal_of
from outrider.gateway.http.server.endpoints import MAX_SMALL_BODY_BYTES, RequestIntake
from outrider.gateway.tenancy.keys.keys import SIGNED_IN_PREFIX, Principal

Endpoint = Callable[[Request], Awaitable[Response]]
_FILES: Final = "/v1/files"
_BATCHES: Final = "/v1/batches"
_OFF: Final = "This gateway takes no files and batches (batches.enabled is false)."
_NEEDS_KEY: Final = (
    "Files and batches need an API key: a batch is answered when a token has long expired."
)
_FORM: Final = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "Requests, one a line."},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_TTL_S, "maximum": MAX_TTL_S},
    },
    "required": ["file", "purpose"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRoutes:
    """The endpoints of files and batches."""

    runner: BatchRunner | None
    """None: there are no batches, and the paths say so."""

    def add_to(self, app: FastAPI, intake: RequestIntake) -> None:
        """Add the paths."""
        if (runner := self.runner) is None:
            for path in (_FILES, _BATCHES):
                app.add_api_route(
                    path + "{rest:path}",
                    _off,
                    methods=["GET", "POST", "DELETE"],
                    include_in_schema=False,
                )
            return
        asked, uploads = BatchEndpoints(store=runner.store), Uploads(store=runner.store)

        async def upload(request: Request) -> Response:
            _holder(request)
            return await intake.counted_unread(request, uploads.upload)

        async def create(request: Request) -> Response:
            async def work(body: bytes, caller: Caller) -> Response:
                created = await asyncio.to_thread(asked.create, body, caller.principal)
                runner.wake()
                return created

            _holder(request)
            return await intake.counted(request, work, limit_bytes=MAX_SMALL_BODY_BYTES)

        async def cancel(request: Request) -> Response:
            cancelled = await asyncio.to_thread(asked.cancel, request, _holder(request))
            runner.wake()
            return cancelled

        file, batch = f"{_FILES}/{{id}}", f"{_BATCHES}/{{id}}"
        for method, path, endpoint, described in (
            ("POST", _FILES, upload, _upload_operation()),
            ("GET", _FILES, _in_thread(asked.list_files), _files_operation()),
            ("GET", file, _in_thread(asked.file), _one(FileObject, "getFile")),
            ("DELETE", file, _in_thread(asked.delete), _one(DeletedFile, "deleteFile")),
            ("GET", f"{file}/content", _in_thread(asked.content), _content_operation()),
            ("POST", _BATCHES, create, _create_operation()),
            (
                "GET",
                _BATCHES,
                _in_thread(asked.list_batches),
                _page(BatchList, "listBatches", DEFAULT_BATCHES, MAX_BATCHES),
            ),
            ("GET", batch, _in_thread(asked.batch), _one(BatchObject, "getBatch")),
            ("POST", f"{batch}/cancel", cancel, _one(BatchObject, "cancelBatch")),
        ):
            app.add_api_route(path, endpoint, methods=[method], openapi_extra=described)


async def _off() -> Response:
    raise NotFoundError(_OFF)


def _holder(request: Request) -> Principal:
    """Return whose files and batches a request is about. Raises PermissionDeniedError."""
    principal = principal_of(request)
    if principal.key_id.startswith(SIGNED_IN_PREFIX):
        raise PermissionDeniedError(_NEEDS_KEY, code="key_needed")
    return principal


def _in_thread(handler: Callable[[Request, Principal], Response]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        return await asyncio.to_thread(handler, request, _holder(request))

    return endpoint


def _upload_operation() -> dict[str, Any]:
    return {
        "operationId": "uploadFile",
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}},
        "responses": failures(400, 413, 503) | {"200": success(FileObject, "The file.")},
    }


def _create_operation() -> dict[str, Any]:
    return {
        "operationId": "createBatch",
        "requestBody": {"required": True, "content": json_content(BatchCreation)},
        "responses": failures(400, 404, 413, 415, 503)
        | {"200": success(BatchObject, "It begins.")},
    }


def _files_operation() -> dict[str, Any]:
    purpose = {"type": "string", "enum": ["batch", "batch_output"]}
    order = {"type": "string", "enum": ["asc", "desc"], "default": "desc"}
    described = _page(FileList, "listFiles", MAX_FILES, MAX_FILES)
    described["parameters"] += [
        query("purpose", "Only such files.", purpose),
        query("order", "By time.", order),
    ]
    return described


def _content_operation() -> dict[str, Any]:
    described = _one(FileObject, "getFileContent")
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    described["responses"]["200"] |= {"description": "Its bytes.", "content": content}
    return described


def _one(answer: type, operation_id: str) -> dict[str, Any]:
    described = operation(answer, "As it is now.", 404, 409, 503, operation_id=operation_id)
    where = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    return {**described, "parameters": [where]}


def _page(answer: type, operation_id: str, default: int, most: int) -> dict[str, Any]:
    described = operation(answer, "A page of them.", 400, 503, operation_id=operation_id)
    count = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    after = query("after", "Begin behind the one with this id.", {"type": "string"})
    return {**described, "parameters": [query("limit", "At most.", count), after]}
