"""Bodies of other APIs' requests, read as strictly as our own."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from pydantic import BaseModel

from gateway.edge.bodies import end_turn
from gateway.errors.tree import BadRequestError
from gateway.schema.parsing import parse, refuse_doubled_names, validate

Request = TypeVar("Request", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBody(Generic[Request]):
    """A request, and the JSON that it was read from."""

    request: Request
    document: dict[str, Any]


async def read_body(model: type[Request], body: bytes) -> ReadBody[Request]:
    """JSON to a validated request, all of whose values can be written as JSON again.

    Raises BadRequestError that names the field; also for NaN, for numbers beyond all bounds, for
    what is nested too deeply and for names that are there twice.
    """
    try:
        document = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        parse(model, body)  # says it in better words, of all but NaN and the like
        raise BadRequestError(
            f"The body is not valid JSON: {error}.", code="invalid_json"
        ) from None
    await end_turn(body)
    request = validate(model, document, body)
    await end_turn(body)
    refuse_doubled_names(body)
    await end_turn(body)
    return ReadBody(request=request, document=document)
