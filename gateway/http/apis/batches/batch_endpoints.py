"""/v1/batches: batches are made, listed, looked at and cancelled."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.contract.schema.parsing import parse
from outrider.gateway.contract.schema.structs import json_response
from outrider.gateway.http.apis.batches.file_endpoints import read_limit, required
from outrider.gateway.http.apis.batches.objects import BatchCreation, BatchList
from outrider.gateway.http.apis.batches.records import BatchRecord
from outrider.gateway.http.apis.batches.store import BatchStore
from outrider.gateway.tenancy.keys.keys import Principal

MAX_BATCHES: Final = 100
DEFAULT_BATCHES: Final = 20
WINDOW_S: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEndpoints:
    """Answers requests about batches. `store`: None where there are none.

    `wake`: called when there is work for this process's runner.
    """

    store: BatchStore | None
    wake: Callable[[], None]

    async def create(self, body: bytes, principal: Principal) -> Response:
        """Begin a batch. Raises GatewayError."""
        store = required(self.store)
        asked = parse(BatchCreation, body)
        now_s, expiry = store.wall_clock(), asked.output_expires_after
        usual_s = store.settings.ttl_s
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
            fields=None if asked.metadata is None else _json(asked.metadata),
        )
        await asyncio.to_thread(store.add_batch, record)
        self.wake()
        return json_response(record.told())

    async def list(self, request: Request, principal: Principal) -> Response:
        """Return a page of batches, the latest first. Raises GatewayError."""
        query = request.query_params
        found, has_more = await asyncio.to_thread(
            required(self.store).batches,
            principal.tenant,
            limit=read_limit(query.get("limit"), DEFAULT_BATCHES, MAX_BATCHES),
            after=query.get("after"),
        )
        data = [record.told() for record in found]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return json_response(BatchList(data=data, first_id=first, last_id=last, has_more=has_more))

    async def retrieve(self, request: Request, principal: Principal) -> Response:
        """Return a batch, and how far it is. Raises NotFoundError."""
        batch_id: str = request.path_params["batch_id"]
        found = await asyncio.to_thread(required(self.store).batch, principal.tenant, batch_id)
        return json_response(found.told())

    async def cancel(self, request: Request, principal: Principal) -> Response:
        """Have a batch end. Raises NotFoundError, or ConflictError where it ends anyway."""
        batch_id: str = request.path_params["batch_id"]
        found = await asyncio.to_thread(required(self.store).cancel, principal.tenant, batch_id)
        self.wake()
        return json_response(found.told())


def _json(document: object) -> str:
    return msgspec.json.encode(document).decode()
