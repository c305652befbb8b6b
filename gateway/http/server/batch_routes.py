"""The paths of files and batches, and their descriptions."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI, Request
from starlette.responses import Response

from outrider.gateway.contract.errors.tree import PermissionDeniedError
from outrider.gateway.contract.schema.openapi import (
    failures,
    json_content,
    operation,
    success,
)
from outrider.gateway.http.apis.api import Caller
from outrider.gateway.http.apis.batches.batch_endpoints import (
    DEFAULT_BATCHES,
    MAX_BATCHES,
    BatchEndpoints,
)
from outrider.gateway.http.apis.batches.file_endpoints import MAX_FILES, FileEndpoints
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
from outrider.gateway.http.server.auth_dispatcher import principal_of
from outrider.gateway.http.server.endpoints import MAX_SMALL_BODY_BYTES, RequestIntake
from outrider.gateway.tenancy.keys.keys import SIGNED_IN_PREFIX, Principal

_FILES: Final = "/v1/files"
_BATCHES: Final = "/v1/batches"
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

    files: FileEndpoints
    batches: BatchEndpoints

    def add_to(self, app: FastAPI, intake: RequestIntake) -> None:
        """Add the paths; where there are no batches they say so and are not described."""

        async def upload(request: Request) -> Response:
            _key_of(request)
            return await intake.counted_unread(request, self.files.upload)

        async def create(request: Request) -> Response:
            _key_of(request)

            async def work(body: bytes, caller: Caller) -> Response:
                return await self.batches.create(body, caller.principal)

            return await intake.counted(request, work, limit_bytes=MAX_SMALL_BODY_BYTES)

        file, batch = f"{_FILES}/{{file_id}}", f"{_BATCHES}/{{batch_id}}"
        files, batches = self.files, self.batches
        for method, path, handler, described in (
            ("POST", _FILES, upload, _upload_operation()),
            ("GET", _FILES, _asked_by(files.list), _files_operation()),
            ("GET", file, _asked_by(files.retrieve), _one(FileObject, "getFile", "file_id")),
            ("DELETE", file, _asked_by(files.delete), _one(DeletedFile, "deleteFile", "file_id")),
            ("GET", f"{file}/content", _asked_by(files.content), _content_operation()),
            ("POST", _BATCHES, create, _create_operation()),
            ("GET", _BATCHES, _asked_by(batches.list), _batches_operation()),
            ("GET", batch, _asked_by(batches.retrieve), _one(BatchObject, "getBatch", "batch_id")),
            (
                *("POST", f"{batch}/cancel", _asked_by(batches.cancel)),
                _one(BatchObject, "cancelBatch", "batch_id"),
            ),
        ):
            app.add_api_route(
                path,
                handler,
                methods=[method],
                openapi_extra=described,
                include_in_schema=files.store is not None,
            )


def _asked_by(
    handler: Callable[[Request, Principal], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(request, _key_of(request))

    return endpoint


def _key_of(request: Request) -> Principal:
    """Return the key that asks. Raises PermissionDeniedError for an identity provider's token.

    A batch outlasts a token, and files are a whole team's.
    """
    principal = principal_of(request)
    if principal.key_id.startswith(SIGNED_IN_PREFIX):
        raise PermissionDeniedError(
            "Files and batches need a key: they outlast a token. Ask the operator for one.",
            code="key_required",
        )
    return principal


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
    described = operation(FileList, "A page of files.", 400, 503, operation_id="listFiles")
    purpose = {"type": "string", "enum": ["batch", "batch_output"]}
    order = {"type": "string", "enum": ["asc", "desc"], "default": "desc"}
    more = (_query("purpose", purpose), _query("order", order))
    return {**described, "parameters": [*_paging(MAX_FILES, MAX_FILES), *more]}


def _batches_operation() -> dict[str, Any]:
    described = operation(BatchList, "A page of batches.", 400, 503, operation_id="listBatches")
    return {**described, "parameters": _paging(DEFAULT_BATCHES, MAX_BATCHES)}


def _content_operation() -> dict[str, Any]:
    described = _one(FileObject, "getFileContent", "file_id")
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    described["responses"]["200"] |= {"description": "Its bytes.", "content": content}
    return described


def _one(answer: type, operation_id: str, parameter: str) -> dict[str, Any]:
    described = operation(answer, "As it is now.", 404, 409, 503, operation_id=operation_id)
    where = {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
    return {**described, "parameters": [where]}


def _paging(default: int, most: int) -> list[dict[str, Any]]:
    count = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return [_query("limit", count), _query("after", {"type": "string"})]


def _query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}
