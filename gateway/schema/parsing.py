"""Parse a request's JSON body into its validated model."""

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from gateway.errors.validation import bad_request

Parsed = TypeVar("Parsed", bound=BaseModel)


def parse(model: type[Parsed], body: bytes) -> Parsed:
    """JSON to a validated request. Raises BadRequestError that names the field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise bad_request(error, body) from None
