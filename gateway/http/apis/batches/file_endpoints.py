"""/v1/files: files are uploaded, listed, read and deleted."""

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    BodyTooLargeError,
    NotFoundError,
    RateLimitError,
)
from outrider.gateway.contract.schema.form_stream import FormStream
from outrider.gateway.contract.schema.structs import json_response
from outrider.gateway.http.apis.batches.objects import (
    MAX_TTL_S,
    MIN_TTL_S,
    DeletedFile,
    FileList,
    Purpose,
)
from outrider.gateway.http.apis.batches.records import FileRecord
from outrider.gateway.http.apis.batches.store import BatchStore, Order
from outrider.gateway.tenancy.keys.keys import Principal

BATCHES_OFF: Final = "This gateway takes no files and batches (batches.enabled is false)."
MAX_FILES: Final = 10_000
"""Files of a page, and where the request names no number."""
_MAX_UPLOADS: Final = 4
_MAX_FIELD_BYTES: Final = 1024
_MAX_FORM_BYTES: Final = 65_536
"""What a form may have around its file."""
_WRITTEN_AT_ONCE: Final = 2**20
_MAX_NAME_CHARS: Final = 255
_ANCHOR: Final = "expires_after[anchor]"
_SECONDS: Final = "expires_after[seconds]"
_FIELDS: Final = frozenset({"purpose", _ANCHOR, _SECONDS})
_MAX_DIGITS: Final = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEndpoints:
    """Answers requests about files. `store`: None where there are none."""

    store: BatchStore | None
    _uploads: Counter[str] = field(default_factory=Counter)
    """Those under way, by tenant."""

    async def upload(self, request: Request, principal: Principal) -> Response:
        """Keep a file, which goes to the disk as it comes. Raises GatewayError."""
        store = required(self.store)
        most = store.settings.max_file_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > most + _MAX_FORM_BYTES:
            raise BodyTooLargeError(limit_bytes=most)
        await asyncio.to_thread(store.check_room, principal.tenant, int(declared[:20] or 0))
        form = FormStream(
            request.headers.get("content-type", ""), _pieces(request, most + _MAX_FORM_BYTES)
        )
        with self._counted(principal.tenant):
            opening = store.writing()
            part, file = await asyncio.to_thread(opening.__enter__)
            try:
                record = await _read_upload(form, file, principal, store)
                await asyncio.to_thread(file.flush)
                await asyncio.to_thread(store.add_file, record, part)
            finally:
                await asyncio.to_thread(opening.__exit__, None, None, None)
        return json_response(record.told())

    @contextlib.contextmanager
    def _counted(self, tenant: str) -> Iterator[None]:
        """Count an upload, whose bytes no bound counts before its end. Raises RateLimitError."""
        if self._uploads[tenant] >= _MAX_UPLOADS:
            raise RateLimitError(
                f"{_MAX_UPLOADS} files of yours are being uploaded: wait for one of them.",
                retry_after_s=1.0,
                code="too_many_uploads",
            )
        self._uploads[tenant] += 1
        try:
            yield
        finally:
            self._uploads[tenant] -= 1
            if not self._uploads[tenant]:
                del self._uploads[tenant]

    async def list(self, request: Request, principal: Principal) -> Response:
        """Return a page of files, the latest first. Raises GatewayError."""
        query = request.query_params
        found, has_more = await asyncio.to_thread(
            required(self.store).files,
            principal.tenant,
            purpose=_purpose(query.get("purpose"), "batch", "batch_output", None),
            limit=read_limit(query.get("limit"), MAX_FILES, MAX_FILES),
            order=_order(query.get("order", "desc")),
            after=query.get("after"),
        )
        data = [record.told() for record in found]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return json_response(FileList(data=data, first_id=first, last_id=last, has_more=has_more))

    async def retrieve(self, request: Request, principal: Principal) -> Response:
        """Describe a file. Raises NotFoundError."""
        return json_response((await self._found(request, principal)).told())

    async def content(self, request: Request, principal: Principal) -> Response:
        """Return what a file holds. Raises NotFoundError."""
        record = await self._found(request, principal)
        path: Path = required(self.store).folder.path(record.id)
        if not await asyncio.to_thread(path.is_file):
            raise NotFoundError(f"The content of {record.id} is not there any more.", param="id")
        return FileResponse(path, media_type="application/octet-stream")

    async def delete(self, request: Request, principal: Principal) -> Response:
        """Delete a file. Raises NotFoundError, or ConflictError while a batch needs it."""
        file_id: str = request.path_params["file_id"]
        await asyncio.to_thread(required(self.store).delete_file, principal.tenant, file_id)
        return json_response(DeletedFile(id=file_id))

    async def _found(self, request: Request, principal: Principal) -> FileRecord:
        file_id: str = request.path_params["file_id"]
        return await asyncio.to_thread(required(self.store).file, principal.tenant, file_id)


def required(store: BatchStore | None) -> BatchStore:
    """Return the store. Raises NotFoundError where there is none."""
    if store is None:
        raise NotFoundError(BATCHES_OFF)
    return store


def read_limit(text: str | None, default: int, most: int) -> int:
    """Return the number of objects in a page. Raises BadRequestError."""
    if text is None:
        return default
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not is_number or not 1 <= int(text) <= most:
        raise BadRequestError(f"limit must be a whole number from 1 to {most:,}.", param="limit")
    return int(text)


def _order(text: str) -> Order:
    if text == "asc":
        return "asc"
    if text == "desc":
        return "desc"
    raise BadRequestError("order must be asc or desc.", param="order")


async def _pieces(request: Request, most: int) -> AsyncIterator[bytes]:
    """Yield the body. Raises BodyTooLargeError, and BadRequestError where it ends early."""
    num_bytes = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise BadRequestError("The body ended early.")
        piece: bytes = message.get("body", b"")
        num_bytes += len(piece)
        if num_bytes > most:
            raise BodyTooLargeError(limit_bytes=most)
        yield piece
        if not message.get("more_body", False):
            return


async def _read_upload(
    form: FormStream, file: BinaryIO, principal: Principal, store: BatchStore
) -> FileRecord:
    """Write a form's file, and return what the form says of it. Raises GatewayError."""
    fields: dict[str, str] = {}
    name, num_bytes = None, 0
    async for part in form.parts():
        if part.name == "file" and name is None:
            name = part.filename or "file"
            num_bytes = await _write(form, file, store.settings.max_file_bytes)
        elif part.name in _FIELDS and part.name not in fields:
            fields[part.name] = await _text(form, part.name)
        else:
            raise BadRequestError(
                f"{part.name}: a form has file, purpose and expires_after, each once.",
                param=part.name,
            )
    if name is None:
        raise BadRequestError("file is missing.", param="file")
    now_s = store.wall_clock()
    return FileRecord(
        id=f"file-{secrets.token_hex(16)}",
        tenant=principal.tenant,
        key_id=principal.key_id,
        purpose=_purpose(fields.get("purpose"), "batch") or "batch",
        filename="".join(c if c.isprintable() else "_" for c in name[:_MAX_NAME_CHARS]),
        num_bytes=num_bytes,
        created_at=now_s,
        expires_at=now_s + _ttl_s(fields, store.settings.ttl_s),
    )


async def _write(form: FormStream, file: BinaryIO, most: int) -> int:
    """Write a part's content; return its size. Raises BodyTooLargeError."""
    num_bytes, waiting = 0, bytearray()
    async for piece in form.content():
        num_bytes += len(piece)
        if num_bytes > most:
            raise BodyTooLargeError(limit_bytes=most)
        waiting += piece
        if len(waiting) >= _WRITTEN_AT_ONCE:
            await asyncio.to_thread(file.write, bytes(waiting))
            waiting.clear()
    await asyncio.to_thread(file.write, bytes(waiting))
    return num_bytes


async def _text(form: FormStream, name: str) -> str:
    found = bytearray()
    async for piece in form.content():
        found += piece
        if len(found) > _MAX_FIELD_BYTES:
            raise BadRequestError(f"{name} is too long.", param=name)
    return found.decode("utf-8", "replace").strip()


def _purpose(text: str | None, *allowed: Purpose | None) -> Purpose | None:
    for purpose in allowed:
        if text == purpose:
            return purpose
    known = ", ".join(repr(each) for each in allowed if each)
    raise BadRequestError(f"purpose: must be one of {known}.", param="purpose")


def _ttl_s(fields: dict[str, str], usual_s: float) -> float:
    """Return how long the file is kept: as asked for, but not longer than files are."""
    if fields.get(_ANCHOR, "created_at") != "created_at":
        raise BadRequestError("expires_after.anchor: must be 'created_at'.", param="expires_after")
    text = fields.get(_SECONDS)
    if text is None:
        return usual_s
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not is_number or not MIN_TTL_S <= int(text) <= MAX_TTL_S:
        raise BadRequestError(
            f"expires_after.seconds: must be from {MIN_TTL_S:,} to {MAX_TTL_S:,}.",
            param="expires_after",
        )
    return min(float(text), usual_s)
