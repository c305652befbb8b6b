"""Reads requests with fields that this gateway does not know: they are left out and named."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.errors.validation import bad_request
from outrider.gateway.contract.schema.common import GenerationFields, OutriderOptions
from outrider.gateway.contract.schema.parsing import parse, validate

HINTS: Final = frozenset({"verbosity"})
"""Fields that the local models have no use for. An answer without them is a valid answer."""
_OUR_OBJECT: Final = "outrider"
_OTHER_SIGNS: Final = re.compile(r"[^a-z]")
_MAX_SHOWN_CHARS: Final = 80

Parsed = TypeVar("Parsed", bound=BaseModel)
Request = TypeVar("Request", bound=GenerationFields)


def read_known(
    model: type[Request], document: Mapping[str, Any] | None, body: bytes, ignores_unknown: bool
) -> tuple[Request, tuple[str, ...]]:
    """Return the validated request, and the names of the fields that were ignored.

    `document`: the body as JSON, where it was read already. Hints are ignored always, and so is
    what does nothing without another field; unknown fields with `ignores_unknown`. Fields that are
    known and not supported are refused. Raises BadRequestError that names the field.
    """
    try:
        request = parse(model, body) if document is None else validate(model, document, body)
        return request, request.idle_fields
    except BadRequestError:
        # The slow path of a body that is refused as it is.
        given = _decoded(body) if document is None else document
        hints, kept = _without_hints(model, given, body)
        if not hints and not ignores_unknown:
            raise
    request, unknown = read_tolerant(model, kept) if ignores_unknown else (parse(model, kept), ())
    return request, (*hints, *unknown, *request.idle_fields)


def read_tolerant(model: type[Parsed], body: bytes) -> tuple[Parsed, tuple[str, ...]]:
    """Return the request without its unknown fields, at whatever depth, and their paths.

    Raises BadRequestError for all that is wrong but unknown fields, and for those that may be
    meant for `outrider`: without them the request would mean another thing.
    """
    try:
        unknown = tuple(_unknown_in(model.model_validate_json(body, extra="allow"), ""))
        for path in unknown:
            _refuse_option(path)
        return model.model_validate_json(body, extra="ignore"), unknown
    except ValidationError as error:
        raise bad_request(error, body) from None


def _unknown_in(value: object, path: str) -> Iterator[str]:
    """Yield the paths of the fields that no model knows."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown_in(item, f"{path}{index}.")
    if not isinstance(value, BaseModel):
        return
    yield from (
        path + name for name, given in (value.model_extra or {}).items() if given is not None
    )
    for name, field in type(value).model_fields.items():
        if name in value.model_fields_set:
            yield from _unknown_in(getattr(value, name), f"{path}{field.alias or name}.")


def _refuse_option(path: str) -> None:
    """Raise BadRequestError for a field in `outrider`, or with the name of one of its options."""
    top, _, _ = path.partition(".")
    name = path.rpartition(".")[2]
    if top != _OUR_OBJECT and _OUR_OBJECT not in name.lower() and _plain(name) not in _OPTIONS:
        return
    param = path[:_MAX_SHOWN_CHARS]
    if top == _OUR_OBJECT and top != path:
        reason = "this field is unknown or not supported"
    else:
        reason = f'an option of this gateway belongs into the object "{_OUR_OBJECT}"'
    raise BadRequestError(f"{param}: {reason}.", param=param)


def _plain(name: str) -> str:
    return _OTHER_SIGNS.sub("", name.lower())


_OPTIONS: Final = frozenset(map(_plain, OutriderOptions.model_fields))


def _without_hints(
    model: type[BaseModel], document: Mapping[str, Any], body: bytes
) -> tuple[tuple[str, ...], bytes]:
    """Return the known hints that are set, and the body without them."""
    known = HINTS & model.model_fields.keys()
    hints = tuple(name for name in document if name in known and document[name] is not None)
    if not hints:
        return (), body
    kept = {name: value for name, value in document.items() if name not in hints}
    try:
        return hints, msgspec.json.encode(kept)
    except (OverflowError, RecursionError):
        return (), body


def _decoded(body: bytes) -> Mapping[str, Any]:
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
