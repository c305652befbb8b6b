"""Bodies of other APIs' requests, read as our own are."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from pydantic import BaseModel

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.parsing import (
    parse,
    refuse_doubled_names,
    validate,
    yield_if_long,
)
from outrider.gateway.contract.schema.unknown_fields import read_tolerant

Request = TypeVar("Request", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBody(Generic[Request]):
    """A request, and the JSON that it was read from. `ignored`: the paths of unknown fields."""

    request: Request
    document: dict[str, Any]
    ignored: tuple[str, ...] = ()


async def read_body(
    model: type[Request], body: bytes, *, ignores_unknown: bool = False
) -> ReadBody[Request]:
    """Parse a body into a validated request whose values can all be written as JSON again.

    `ignores_unknown`: unknown fields are left out. Raises BadRequestError that names the field;
    also for NaN, numbers out of range, too deep nesting and repeated names.
    """
    try:
        document = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        parse(model, body)  # says it in better words, of all but NaN and the like
        raise BadRequestError(
            f"The body is not valid JSON: {error}.", code="invalid_json"
        ) from None
    await yield_if_long(body)
    ignored: tuple[str, ...] = ()
    try:
        request = validate(model, document, body)
    except BadRequestError:
        if not ignores_unknown:
            raise
        await yield_if_long(body)
        request, ignored = read_tolerant(model, body)
    await yield_if_long(body)
    refuse_doubled_names(body)
    await yield_if_long(body)
    return ReadBody(request=request, document=document, ignored=ignored)
