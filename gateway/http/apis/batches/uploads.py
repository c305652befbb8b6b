"""Uploads of files, which go to the disk as they come."""

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Final

from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    BodyTooLargeError,
    RateLimitError,
    StorageError,
)
from outrider.gateway.contract.schema.form_stream import FormStream
from outrider.gateway.contract.schema.structs import json_response
from outrider.gateway.http.apis.batches.endpoints import one_of, whole_number
from outrider.gateway.http.apis.batches.objects import MAX_TTL_S, MIN_TTL_S
from outrider.gateway.http.apis.batches.records import FileRecord
from outrider.gateway.http.apis.batches.store import BatchStore
from outrider.gateway.tenancy.keys.keys import Principal

_MAX_UPLOADS: Final = 4
_FULL_RETRY_S: Final = 60.0
_MAX_FIELD_BYTES: Final = 1024
_WRITTEN_AT_ONCE: Final = 2**20
_MAX_NAME_CHARS: Final = 255
_ANCHOR: Final = "expires_after[anchor]"
_SECONDS: Final = "expires_after[seconds]"
_FIELDS: Final = frozenset({"purpose", _ANCHOR, _SECONDS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploads:
    """Keeps what clients upload."""

    store: BatchStore
    _under_way: Counter[str] = field(default_factory=Counter)
    """By tenant."""

    async def upload(self, request: Request, principal: Principal) -> Response:
        """Keep a file. Raises GatewayError."""
        store, most = self.store, self.store.settings.max_file_bytes
        declared = int(request.headers.get("content-length", "0")[:20])
        if declared > most:
            raise BodyTooLargeError(limit_bytes=most)
        await asyncio.to_thread(store.check_room, principal.tenant, declared)
        content_type = request.headers.get("content-type", "")
        form = FormStream(content_type, _pieces(request, most))
        try:
            with self._counted(principal.tenant), store.writing() as file:
                record = await _read_form(form, file, principal, store)
                await asyncio.to_thread(store.add_file, record, file)
        except OSError as error:
            text = "The gateway cannot write files now. Try again later."
            raise StorageError(text, retry_after_s=_FULL_RETRY_S) from error
        return json_response(record.told())

    @contextlib.contextmanager
    def _counted(self, tenant: str) -> Iterator[None]:
        """Count an upload, whose bytes no bound counts before its end. Raises RateLimitError."""
        if self._under_way[tenant] >= _MAX_UPLOADS:
            raise RateLimitError(
                f"{_MAX_UPLOADS} files of yours are being uploaded: wait for one of them.",
                retry_after_s=1.0,
                code="too_many_uploads",
            )
        self._under_way[tenant] += 1
        try:
            yield
        finally:
            self._under_way[tenant] -= 1
            if not self._under_way[tenant]:
                del self._under_way[tenant]


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


async def _read_form(
    form: FormStream, file: BinaryIO, principal: Principal, store: BatchStore
) -> FileRecord:
    """Write a form's file, and return what the form says of it. Raises GatewayError."""
    fields: dict[str, str] = {}
    name, num_bytes = None, 0
    async for part in form.parts():
        if part.name == "file" and name is None:
            name = part.filename or "file"
            num_bytes = await _write(form, file)
        elif part.name in _FIELDS and part.name not in fields:
            fields[part.name] = await _text(form, part.name)
        else:
            text = f"{part.name}: a form has file, purpose and expires_after, each once."
            raise BadRequestError(text, param=part.name)
    if name is None:
        raise BadRequestError("file is missing.", param="file")
    one_of(_ANCHOR, fields.get(_ANCHOR, "created_at"), "created_at")
    ttl_s = store.settings.ttl_s
    if (seconds := fields.get(_SECONDS)) is not None:
        ttl_s = min(ttl_s, whole_number(_SECONDS, seconds, MIN_TTL_S, MAX_TTL_S))
    now_s = store.wall_clock()
    return FileRecord(
        id=f"file-{secrets.token_hex(16)}",
        tenant=principal.tenant,
        key_id=principal.key_id,
        purpose=one_of("purpose", fields.get("purpose"), "batch"),
        filename="".join(c if c.isprintable() else "_" for c in name[:_MAX_NAME_CHARS]),
        num_bytes=num_bytes,
        created_at=now_s,
        expires_at=now_s + ttl_s,
    )


async def _write(form: FormStream, file: BinaryIO) -> int:
    """Write a part's content; return its size."""
    num_bytes, waiting = 0, bytearray()
    async for piece in form.content():
        num_bytes += len(piece)
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
