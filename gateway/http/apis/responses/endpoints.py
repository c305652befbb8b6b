"""GET and DELETE of stored responses, and the list of their input items."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.contract.errors.tree import BadRequestError, NotFoundError
from outrider.gateway.contract.schema.structs import json_response
from outrider.gateway.http.apis.responses.answers import DeletedResponse, InputItemList
from outrider.gateway.http.apis.responses.conversation import Conversations
from outrider.gateway.http.apis.responses.store import STORED_NOTHING, StoredResponse
from outrider.gateway.tenancy.keys.keys import Principal

MAX_ITEMS: Final = 100
DEFAULT_ITEMS: Final = 20
ORDERS: Final = ("asc", "desc")
_MAX_QUOTED_CHARS: Final = 64
_MAX_DIGITS: Final = 3
_read_items: Final = msgspec.json.Decoder(list[dict[str, Any]]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEndpoints:
    """Answers requests about stored responses. conversations: None where nothing is stored.

    An id of another tenant, of another key, or with another end user than the query's, is answered
    as an unknown one.
    """

    conversations: Conversations | None

    async def retrieve(self, request: Request, principal: Principal) -> Response:
        """Return a response as its request's client got it. Raises GatewayError."""
        if request.query_params.get("stream", "false") != "false":
            raise BadRequestError(
                "stream: a stored response is not streamed again; leave stream out.", param="stream"
            )
        stored = await self._found(request, principal)
        return Response(stored.response, media_type="application/json")

    async def delete(self, request: Request, principal: Principal) -> Response:
        """Forget a response. Raises GatewayError."""
        await self._found(request, principal)
        response_id = _id_of(request)
        if self.conversations is not None:
            await self.conversations.delete(principal, response_id)
        return json_response(DeletedResponse(id=response_id, object="response", deleted=True))

    async def input_items(self, request: Request, principal: Principal) -> Response:
        """Return a page of the items that the model read, the latest first. Raises GatewayError."""
        query = request.query_params
        limit, order = _limit(query.get("limit")), query.get("order", "desc")
        if order not in ORDERS:
            raise BadRequestError("order must be asc or desc.", param="order")
        stored = await self._found(request, principal)
        tail = _id_of(request).removeprefix("resp_")
        items = _read_items(stored.input_items)
        places = range(len(items))[:: 1 if order == "asc" else -1]
        ids = [items[place].get("id") or f"in_{tail}_{place}" for place in places]
        start = _start(ids, query.get("after"))
        page = list(zip(ids, places, strict=True))[start : start + limit]
        return json_response(
            InputItemList(
                object="list",
                data=[_told(items[place], item_id) for item_id, place in page],
                first_id=page[0][0] if page else None,
                last_id=page[-1][0] if page else None,
                has_more=start + limit < len(ids),
            )
        )

    async def _found(self, request: Request, principal: Principal) -> StoredResponse:
        """Return the response that the path names. Raises NotFoundError and StorageError."""
        response_id = _id_of(request)
        shown = f"Response with id {response_id[:_MAX_QUOTED_CHARS]!r} not found."
        if self.conversations is None:
            raise NotFoundError(f"{shown} {STORED_NOTHING}")
        stored = await self.conversations.find(principal, response_id)
        query = request.query_params
        end_user = query.get("safety_identifier", query.get("user"))
        if stored is None or end_user not in (None, stored.end_user):
            raise NotFoundError(shown)
        return stored


def _id_of(request: Request) -> str:
    found: str = request.path_params["response_id"]
    return found


def _limit(text: str | None) -> int:
    """Return the number of items in a page. Raises BadRequestError."""
    if text is None:
        return DEFAULT_ITEMS
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not is_number or not 1 <= int(text) <= MAX_ITEMS:
        raise BadRequestError(f"limit must be a whole number from 1 to {MAX_ITEMS}.", param="limit")
    return int(text)


def _start(ids: list[str], after: str | None) -> int:
    """Return the place behind an item. Raises BadRequestError for an unknown one."""
    if after is None:
        return 0
    if after not in ids:
        raise BadRequestError(
            f"after: the response has no item {after[:_MAX_QUOTED_CHARS]!r}.", param="after"
        )
    return ids.index(after) + 1


def _told(item: Mapping[str, Any], item_id: str) -> dict[str, Any]:
    """Return an item as OpenAI lists it: with an id, a type, a status and parts."""
    told = {"type": "message", "status": "completed", **item, "id": item_id}
    content = told.get("content")
    if told["type"] != "message":
        return told
    if isinstance(content, str):
        kind = "output_text" if told["role"] == "assistant" else "input_text"
        content = [{"type": kind, "text": content}]
    told["content"] = [
        {**part, "annotations": []} if part["type"] == "output_text" else part
        for part in content or ()
    ]
    return told
