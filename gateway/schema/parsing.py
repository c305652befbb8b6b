"""Parses a request's JSON body into its validated model, and refuses names that it has twice.

Readers of JSON that take one value of a doubled name do not mention the other. A request could be
private, small or harmless for one reader only: its author, a proxy, a log, a server.
"""

import threading
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from gateway.errors.tree import BadRequestError
from gateway.errors.validation import bad_request

_OPTIONS: Final = "outrider"
_OBJECT: Final = b"{"
_MAX_SHOWN_CHARS: Final = 80
_MAX_DEPTH: Final = 2
"""Levels of objects below `outrider`; its schema refuses deeper ones."""


def refuse_doubled_names(body: bytes) -> None:
    """Raise BadRequestError for a doubled name in a request or in an object directly below it.

    In its `outrider` object all objects are looked at. Names are compared as a reader decodes them,
    so an escape hides nothing. Values are skipped over without being built. What is no JSON object
    is refused as well: call it behind the reader that says so in better words.
    """
    try:
        for name, value in _reader.members(body, "").items():
            _refuse_within(value, name, _MAX_DEPTH if name == _OPTIONS else 0)
    except (ValueError, RecursionError) as error:
        # Some readers take NaN and numbers beyond all bounds, which are no JSON.
        raise BadRequestError(
            f"The body is not valid JSON: {error}.", code="invalid_json"
        ) from None


def _refuse_within(value: msgspec.Raw, path: str, depth: int) -> None:
    """Look at an object, and at objects in it `depth` levels down. No option is a list of them."""
    if bytes(memoryview(value)[:1]) != _OBJECT:
        return
    for name, inner in _reader.members(value, f"{path}.").items():
        if depth:
            _refuse_within(inner, f"{path}.{name}", depth - 1)


class _Name:
    """A member's name. A type of its own, so that the decoder hands each one over."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class _MemberReader(threading.local):
    """Reads the members of one object at a time; one reader a thread."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._prefix = ""
        self._decode = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=self._name).decode

    def members(self, raw: bytes | msgspec.Raw, prefix: str) -> dict[str, msgspec.Raw]:
        """Return names and undecoded values. `prefix` is put in front of names in errors.

        Raises BadRequestError for a doubled name, ValueError or RecursionError for what is no
        object.
        """
        self._seen, self._prefix = set(), prefix
        return {member.text: value for member, value in self._decode(raw).items()}

    def _name(self, _: type[Any], name: str) -> _Name:
        if name in self._seen:
            param = (self._prefix + name)[:_MAX_SHOWN_CHARS]
            raise BadRequestError(
                f"{param}: this name is given twice in one object; give it once.", param=param
            )
        self._seen.add(name)
        return _Name(name)


_reader: Final = _MemberReader()


Parsed = TypeVar("Parsed", bound=BaseModel)


def validate(model: type[Parsed], document: object, body: bytes) -> Parsed:
    """Validate a body that is parsed already. Raises BadRequestError that names the field.

    `document` is `body`, read by msgspec. Where it does not conform, the body is read again:
    pydantic words its complaints, and judges some values, by the text that they are written as.
    """
    try:
        return model.model_validate(document)
    except ValidationError:
        return parse(model, body)


def parse(model: type[Parsed], body: bytes) -> Parsed:
    """JSON to a validated request. Raises BadRequestError that names the field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise bad_request(error, body) from None
