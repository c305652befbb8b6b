"""/v1/files and /v1/batches: what is asked of them. All but uploads blocks: use a thread."""

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from outrider.gateway.contract.errors.tree import BadRequestError, NotFoundError
from outrider.gateway.contract.schema.parsing import parse
from outrider.gateway.contract.schema.structs import json_response
from outrider.gateway.http.apis.batches.objects import (
    BatchCreation,
    BatchList,
    DeletedFile,
    FileList,
)
from outrider.gateway.http.apis.batches.records import BatchRecord
from outrider.gateway.http.apis.batches.store import BatchStore
from outrider.gateway.tenancy.keys.keys import Principal

MAX_FILES: Final = 10_000
"""Files of a page, and where the request names no number."""
MAX_BATCHES: Final = 100
DEFAULT_BATCHES: Final = 20
WINDOW_S: Final = 86_400.0
_MAX_DIGITS: Final = 9
_Word = TypeVar("_Word", bound=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEndpoints:
    """Answers requests about files and batches. All of them raise GatewayError."""

    store: BatchStore

    def list_files(self, request: Request, principal: Principal) -> Response:
        """Return a page of files, the latest first."""
        query = request.query_params
        purpose = query.get("purpose")
        if purpose is not None:
            one_of("purpose", purpose, "batch", "batch_output")
        order = one_of("order", query.get("order", "desc"), "asc", "desc")
        limit = _limit(query, MAX_FILES, MAX_FILES)
        found, has_more = self.store.files(
            principal.tenant, purpose, limit, query.get("after"), is_rising=order == "asc"
        )
        return _page(FileList, [record.told() for record in found], has_more=has_more)

    def file(self, request: Request, principal: Principal) -> Response:
        """Describe a file."""
        return json_response(self.store.file(principal.tenant, _id_in(request)).told())

    def content(self, request: Request, principal: Principal) -> Response:
        """Return what a file holds."""
        record = self.store.file(principal.tenant, _id_in(request))
        path = self.store.path(record.id)
        try:
            state = os.stat(path)
        except FileNotFoundError:
            text = f"The content of {record.id} is not there any more."
            raise NotFoundError(text, param="id") from None
        return FileResponse(path, media_type="application/octet-stream", stat_result=state)

    def delete(self, request: Request, principal: Principal) -> Response:
        """Delete a file."""
        file_id = _id_in(request)
        self.store.delete_file(principal.tenant, file_id)
        return json_response(DeletedFile(id=file_id))

    def create(self, body: bytes, principal: Principal) -> Response:
        """Begin a batch."""
        asked = parse(BatchCreation, body)
        now_s, expiry = self.store.wall_clock(), asked.output_expires_after
        usual_s = self.store.settings.ttl_s
        metadata = asked.metadata
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(16)}",
            tenant=principal.tenant,
            key_id=principal.key_id,
            endpoint=asked.endpoint,
            status="validating",
            input_file_id=asked.input_file_id,
            created_at=now_s,
            expires_at=now_s + WINDOW_S,
            output_ttl_s=usual_s if expiry is None else min(float(expiry.seconds), usual_s),
            fields=None if metadata is None else msgspec.json.encode(metadata).decode(),
        )
        self.store.add_batch(record)
        return json_response(record.told())

    def list_batches(self, request: Request, principal: Principal) -> Response:
        """Return a page of batches, the latest first."""
        query = request.query_params
        limit = _limit(query, DEFAULT_BATCHES, MAX_BATCHES)
        found, has_more = self.store.batches(principal.tenant, limit, query.get("after"))
        return _page(BatchList, [record.told() for record in found], has_more=has_more)

    def batch(self, request: Request, principal: Principal) -> Response:
        """Return a batch, and how far it is."""
        return json_response(self.store.batch(principal.tenant, _id_in(request)).told())

    def cancel(self, request: Request, principal: Principal) -> Response:
        """Have a batch end."""
        return json_response(self.store.cancel(principal.tenant, _id_in(request)).told())


def one_of(name: str, text: str | None, *allowed: _Word) -> _Word:
    """Return the allowed word that a field has. Raises BadRequestError."""
    for word in allowed:
        if text == word:
            return word
    known = " or ".join(map(repr, allowed))
    raise BadRequestError(f"{name}: must be {known}.", param=name)


def whole_number(name: str, text: str, least: int, most: int) -> int:
    """Return a number that a text names. Raises BadRequestError."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not is_number or not least <= int(text) <= most:
        told = f"{name}: must be a whole number from {least:,} to {most:,}."
        raise BadRequestError(told, param=name)
    return int(text)


def _page(kind: Callable[..., object], data: Sequence[Any], *, has_more: bool) -> Response:
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(kind(data=data, first_id=first, last_id=last, has_more=has_more))


def _limit(query: QueryParams, default: int, most: int) -> int:
    return whole_number("limit", query.get("limit", str(default)), 1, most)


def _id_in(request: Request) -> str:
    found: str = request.path_params["id"]
    return found
