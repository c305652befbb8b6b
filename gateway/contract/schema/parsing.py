"""From the bytes of a JSON body to its validated model: bounds, names that stand twice, validation.

A parser holds the interpreter while it works, and takes the longer the more values there are. So a
body is bounded before anything parses it, in one pass in which only bytes are counted, by functions
that take about a millisecond for a megabyte.

Readers of JSON that take one value of a doubled name do not mention the other. A request could be
private, small or harmless for one reader only: its author, a proxy, a log, a server.
"""

import asyncio
import threading
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from outrider.gateway.contract.errors.tree import BadRequestError, BodyTooComplexError
from outrider.gateway.contract.errors.validation import bad_request

_decode_object: Final = msgspec.json.Decoder(dict[str, Any]).decode
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_COUNTED: Final = {
    "max_json_strings": "texts and names",
    "max_json_objects": "objects and lists",
    "max_json_fields": "fields of objects",
    "max_json_values": "values",
    "max_json_nesting": "objects and lists in one another",
}
_LONG_BYTES: Final = 32_768
"""From here on one pass over a body of many small values may take some milliseconds."""
_STEPS: Final = {**dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", -1)}


class RequestJson:
    """A request's JSON, as bytes and as a document. Each is made from the other at most once."""

    __slots__ = ("_document", "_raw")

    def __init__(self, raw: bytes | None = None, document: dict[str, Any] | None = None) -> None:
        """Hold one of the two, or both."""
        self._raw = raw
        self._document = document

    @property
    def raw(self) -> bytes:
        """Return the bytes. Raises OverflowError, RecursionError or ValueError."""
        if self._raw is None:
            self._raw = msgspec.json.encode(self._document)
        return self._raw

    @property
    def document(self) -> dict[str, Any]:
        """Return the parsed object. Raises ValueError or RecursionError where it is none."""
        if self._document is None:
            self._document = _decode_object(self.raw)
        return self._document


async def yield_if_long(body: bytes) -> None:
    """Let other requests run before the next pass over a long body."""
    if len(body) >= _LONG_BYTES:
        await asyncio.sleep(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonBounds:
    """Bounds of one request body. See LimitSettings."""

    max_values: int = 200_000
    max_strings: int = 100_000
    max_fields: int = 25_000
    max_objects: int = 10_000
    max_nesting: int = 200


def check_json_bounds(body: bytes, bounds: JsonBounds) -> None:
    """Raise BodyTooComplexError for a body that passes a bound; it need not be valid JSON."""
    if may_exceed(body, bounds):
        check_exactly(body, bounds)


def check_exactly(body: bytes, bounds: JsonBounds) -> None:
    """Raise BodyTooComplexError; the slow part, for a body that `may_exceed` a bound."""
    # What is left of an escape cannot end a string.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check("max_json_strings", plain.count(b'"') // 2, bounds.max_strings)
    outside = b"".join(plain.split(b'"')[::2])
    num_objects = outside.count(b"{") + outside.count(b"[")
    _check("max_json_objects", num_objects, bounds.max_objects)
    _check("max_json_fields", outside.count(b":"), bounds.max_fields)
    _check("max_json_values", num_objects + outside.count(b","), bounds.max_values)
    if num_objects > bounds.max_nesting:
        _check("max_json_nesting", _depth(outside), bounds.max_nesting)


def may_exceed(body: bytes, bounds: JsonBounds) -> bool:
    """Return whether a bound may be passed; signs in texts count as well, so it is cheap."""
    num_objects = body.count(b"{") + body.count(b"[")
    return (
        num_objects > min(bounds.max_objects, bounds.max_nesting)
        or body.count(b'"') // 2 > bounds.max_strings
        or body.count(b":") > bounds.max_fields
        or num_objects + body.count(b",") > bounds.max_values
    )


def _depth(outside: bytes) -> int:
    """Return the nesting depth of objects and lists; `outside` is a body without its strings."""
    brackets = outside.translate(None, delete=_NOT_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def _check(setting: str, count: int, limit: int) -> None:
    if count > limit:
        raise BodyTooComplexError(_COUNTED[setting], setting, count=count, limit=limit)


_OPTIONS: Final = "outrider"
_OBJECT: Final = ord("{")
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
        reader = _readers.of_thread
        for name, value in reader.members(body, "").items():
            _refuse_within(reader, value, name, _MAX_DEPTH if name == _OPTIONS else 0)
    except (ValueError, RecursionError) as error:
        # Some readers take NaN and numbers beyond all bounds, which are no JSON.
        raise BadRequestError(
            f"The body is not valid JSON: {error}.", code="invalid_json"
        ) from None


def naming(body: bytes, model: str) -> bytes:
    """Return the body with this `model`; as it is where it is no object. Doubled names are refused.

    For paths that name the model. Raises BadRequestError.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return body  # to be refused by its reader
    refuse_doubled_names(body)
    return msgspec.json.encode(fields | {"model": model})


def _refuse_within(reader: "_MemberReader", value: msgspec.Raw, path: str, depth: int) -> None:
    """Look at an object, and at objects in it `depth` levels down. No option is a list of them."""
    if memoryview(value)[0] != _OBJECT:
        return
    for name, inner in reader.members(value, f"{path}.").items():
        if depth:
            _refuse_within(reader, inner, f"{path}.{name}", depth - 1)


class _Name:
    """A member's name. A type of its own, so that the decoder hands each one over."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class _MemberReader:
    """Reads the members of one object at a time."""

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


class _Readers(threading.local):
    """One reader for each thread."""

    def __init__(self) -> None:
        self.of_thread = _MemberReader()


_readers: Final = _Readers()


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
