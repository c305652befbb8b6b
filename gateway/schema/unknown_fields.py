"""Reads requests with fields that the local models do not know."""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel

from gateway.errors.tree import BadRequestError
from gateway.schema.parsing import parse, validate

HINTS: Final = frozenset({"reasoning_effort", "verbosity"})
"""Fields that the local models have no use for. An answer without them is a valid answer."""

Parsed = TypeVar("Parsed", bound=BaseModel)


def read_known(
    model: type[Parsed], document: Mapping[str, Any] | None, body: bytes, ignores_unknown: bool
) -> tuple[Parsed, tuple[str, ...]]:
    """Return the validated request, and the names of the fields that were ignored.

    `document`: the body as JSON, where it was read already. Hints are ignored always, unknown
    fields with `ignores_unknown`; fields that are known and not supported are refused. Raises
    BadRequestError that names the field.
    """
    try:
        if document is None:
            return parse(model, body), ()
        return validate(model, document, body), ()
    except BadRequestError:
        # The slow path of a body that is refused as it is.
        if document is None:
            document = _decoded(body)
        ignored = tuple(
            name
            for name, value in document.items()
            if value is not None
            and (name in HINTS if name in model.model_fields else ignores_unknown)
        )
        if not ignored:
            raise
    kept = {name: value for name, value in document.items() if name not in ignored}
    try:
        return parse(model, msgspec.json.encode(kept)), ignored
    except (OverflowError, RecursionError):
        return parse(model, body), ()


def _decoded(body: bytes) -> Mapping[str, Any]:
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
