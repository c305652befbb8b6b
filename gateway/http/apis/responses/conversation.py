"""Conversations that go on: the items of a stored one, and what is stored of the next response."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from pydantic import TypeAdapter, ValidationError

from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    BodyTooComplexError,
    StorageError,
)
from outrider.gateway.contract.schema.parsing import JsonBounds, check_json_bounds, yield_if_long
from outrider.gateway.http.apis.api import Caller
from outrider.gateway.http.apis.events import one_line
from outrider.gateway.http.apis.responses.request import Item, ReferenceItem, ResponsesFields
from outrider.gateway.http.apis.responses.store import (
    ResponseStore,
    StoredResponse,
    response_key,
)
from outrider.gateway.tenancy.keys.keys import Principal

logger = logging.getLogger(__name__)

_PARAM: Final = "previous_response_id"
_MAX_QUOTED_CHARS: Final = 64
_MAX_REFERENCED: Final = 256
"""Stored responses whose items one request may name."""
_NOT_READ: Final = frozenset({"annotations", "logprobs"})
"""Fields of an answer's text that no request reads."""
_items: Final[TypeAdapter[list[Item]]] = TypeAdapter(list[Item])
_encode: Final = msgspec.json.Encoder().encode


class _Answer(msgspec.Struct):
    """The part of a stored response that is said again."""

    output: list[dict[str, Any]]


_read_answer: Final = msgspec.json.Decoder(_Answer).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """The items of a stored conversation, and their JSON without the brackets of the list."""

    items: Sequence[Item] = ()
    written: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Finds stored conversations, and begins to store the next response.

    max_body_bytes, bounds: of a whole conversation with the request, as of any request.
    """

    store: ResponseStore
    max_body_bytes: int
    bounds: JsonBounds

    async def earlier(self, request: ResponsesFields, body: bytes, caller: Caller) -> Earlier:
        """Return the conversation that a request goes on with.

        Raises BadRequestError where there is none for this caller, or where it is too long;
        StorageError, and what `caller.reserve` raises.
        """
        response_id = request.previous_response_id
        if response_id is None:
            return Earlier()
        stored = await self.find(caller.principal, response_id)
        if stored is None or stored.end_user != _end_user(request, caller):
            raise BadRequestError(
                f"Previous response with id {response_id[:_MAX_QUOTED_CHARS]!r} not found.",
                param=_PARAM,
                code="previous_response_not_found",
            )
        caller.reserve(stored.num_bytes + len(body))
        written = _joined(stored.input_items[1:-1], _encode(_said(stored.response))[1:-1])
        self._check(written, body)
        await yield_if_long(written)
        try:
            items = _items.validate_json(b"[" + written + b"]")
        except ValidationError:
            raise BadRequestError(
                f"{_PARAM}: this response has an item that no request can have. Send the "
                "conversation as `input`.",
                param=_PARAM,
            ) from None
        await yield_if_long(written)
        return Earlier(items=items, written=written)

    async def referenced(
        self, request: ResponsesFields, given: Sequence[Item], body: bytes, caller: Caller
    ) -> Earlier:
        """Return the items with those of stored responses in the place of their references.

        `written`: these, as JSON. Raises BadRequestError for one that this caller has not, and
        what `earlier` raises.
        """
        outputs: dict[str, list[dict[str, Any]]] = {}
        items, parts, num_bytes = list(given), [], len(body)
        room = self.max_body_bytes - len(body)
        for index, item in enumerate(given):
            if not isinstance(item, ReferenceItem):
                continue
            response_id = _response_of(item.id)
            if response_id not in outputs and len(outputs) < _MAX_REFERENCED:
                stored = await self.find(caller.principal, response_id)
                outputs[response_id] = []
                if stored is not None and stored.end_user == _end_user(request, caller):
                    num_bytes += stored.num_bytes
                    caller.reserve(num_bytes)
                    outputs[response_id] = _said(stored.response)
            found = next(
                (each for each in outputs.get(response_id, ()) if each.get("id") == item.id), None
            )
            if found is None:
                raise _no_item(index, item.id)
            parts.append(_encode(found))
            room -= len(parts[-1])
            if room < 0:
                break  # all of it is refused below
            (items[index],) = _items.validate_python([found])
        written = _joined(*parts)
        self._check(written, body)
        return Earlier(items=items, written=written)

    async def find(self, principal: Principal, response_id: str) -> StoredResponse | None:
        """Return the response that this key may see. Raises StorageError."""
        key = response_key(principal, response_id)
        return None if key is None else await self.store.get(key)

    async def delete(self, principal: Principal, response_id: str) -> bool:
        """Forget a response. Return whether it was there. Raises StorageError."""
        key = response_key(principal, response_id)
        return key is not None and await self.store.delete(key)

    def begin(
        self, request: ResponsesFields, items: Sequence[Item], earlier: Earlier, caller: Caller
    ) -> "StoredAnswer":
        """Prepare to store the response to a request with these items."""
        added = _encode(
            [
                item.model_dump(exclude_unset=True, by_alias=True)
                for item in items
                if not isinstance(item, dict)  # of another server: no model reads it
            ]
        )
        return StoredAnswer(
            self.store,
            caller.principal,
            end_user=_end_user(request, caller),
            input_items=b"[" + _joined(earlier.written, added[1:-1]) + b"]",
        )

    def _check(self, written: bytes, body: bytes) -> None:
        """Raise BadRequestError where the conversation could not have been sent as a whole."""
        num_bytes = len(written) + len(body)
        if num_bytes > self.max_body_bytes:
            raise _too_long(
                f"the stored conversation and this request hold {num_bytes} bytes together; at "
                f"most {self.max_body_bytes} are allowed (limits.max_body_bytes)."
            )
        try:
            check_json_bounds(written + body, self.bounds)
        except BodyTooComplexError as error:
            raise _too_long(f"with the stored conversation: {error}") from None


class StoredAnswer:
    """One response on its way into the store."""

    def __init__(
        self,
        store: ResponseStore,
        principal: Principal,
        *,
        end_user: str | None,
        input_items: bytes,
    ) -> None:
        self.is_wanted = True
        """False for a private request: nothing of it is stored."""
        self._store = store
        self._principal = principal
        self._end_user = end_user
        self._input_items = input_items
        self._response: dict[str, Any] | None = None

    def forbid(self) -> None:
        """Store nothing. Call it before the answer begins."""
        self.is_wanted = False

    def note(self, response: dict[str, Any]) -> None:
        """Note the whole response."""
        self._response = response

    async def store(self, sent: bytes) -> bytes:
        """Store the noted response before its last bytes are sent; return these bytes.

        They are `sent`, unless it could not be stored: then they say so.
        """
        response = self._response
        if response is None or not self.is_wanted:
            return sent
        written = one_line(response)
        key = response_key(self._principal, response["id"])
        entry = StoredResponse(
            owner=self._principal.tenant,
            end_user=self._end_user,
            input_items=self._input_items,
            response=written,
        )
        try:
            is_stored = key is not None and await self._store.put(key, entry)
        except StorageError:  # the answer is whole, and paid for
            is_stored = False
        if is_stored:
            return sent
        logger.warning("response was not stored bytes=%d", entry.num_bytes)
        return sent.replace(written, one_line({**response, "store": False}))


def _said(response: bytes) -> list[dict[str, Any]]:
    """Return the output of a stored response as items of a request."""
    output = _read_answer(response).output
    for item in output:
        if item["type"] == "message":
            item["content"] = [
                {name: value for name, value in part.items() if name not in _NOT_READ}
                for part in item["content"]
            ]
    return output


def _response_of(item_id: str) -> str:
    """Return the id of the response that an item is of: both have the same tail."""
    return f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"


def _no_item(index: int, item_id: str) -> BadRequestError:
    param = f"input.{index}"
    return BadRequestError(
        f"{param}: Item with id {item_id[:_MAX_QUOTED_CHARS]!r} not found. Send the item itself.",
        param=param,
    )


def _end_user(request: ResponsesFields, caller: Caller) -> str | None:
    """Return whose a response is: who signed in, else whom the request names."""
    return caller.principal.end_user or request.end_user


def _joined(*parts: bytes) -> bytes:
    """Join lists without their brackets."""
    return b",".join(filter(None, parts))


def _too_long(what: str) -> BadRequestError:
    return BadRequestError(
        f"{_PARAM}: {what} Begin a new conversation, such as with a summary of this one.",
        param=_PARAM,
        code="conversation_too_long",
    )
