"""Tool calls of servers' answers in OpenAI's form, in which the official clients need them.

In a stream the first part of a call has its index, its id, a type and a name; later parts have the
index and more of the arguments. Servers leave the index out, number every call 0, repeat the id and
the name with each part or renew the id, leave the id empty, or write the arguments as an object.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from outrider.gateway.upstream.dialects.base import to_event
from outrider.gateway.upstream.event_stream import event_data

_NULL: Final = msgspec.Raw(b"null")
_encode: Final = msgspec.json.Encoder().encode
_read_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_choices: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: Any = None


class _Part(msgspec.Struct):
    """A part of a call, or a whole one."""

    index: Any = None
    id: str | int | None = None
    type: str | msgspec.UnsetType | None = msgspec.UNSET
    function: _Function | None = None

    @property
    def name(self) -> str:
        """The function's name; empty for none."""
        return (self.function and self.function.name) or ""

    @property
    def arguments(self) -> str | None:
        """The function's arguments as text; None for none."""
        given = None if self.function is None else self.function.arguments
        return given if given is None or isinstance(given, str) else _encode(given).decode()

    @property
    def has_plain_arguments(self) -> bool:
        """Return whether the arguments need no other form."""
        return self.function is None or isinstance(self.function.arguments, str | None)


_read_part: Final = msgspec.json.Decoder(_Part).decode


@dataclass(slots=True)
class _Call:
    """A call so far, with its first part's own index and id."""

    first: _Part
    name: str = ""
    texts: list[str] = field(default_factory=list)

    def add(self, part: _Part) -> None:
        self.name = self.name or part.name
        self.texts.append(part.arguments or "")

    @property
    def is_whole(self) -> bool:
        """Return whether the arguments are an object that is complete."""
        text = "".join(self.texts)
        if not text.rstrip().endswith("}"):
            return False
        try:
            _read_fields(text)
        except (ValueError, RecursionError):
            return False
        return True


class ToolCallParts:
    """Puts the parts of a stream's calls in order. One for each stream."""

    def __init__(self) -> None:
        self._calls: dict[int, list[_Call]] = {}  # by choice

    def in_order(self, event: bytes, parts: Sequence[tuple[int, Sequence[msgspec.Raw]]]) -> bytes:
        """Return the event with its calls in OpenAI's form: the same bytes where they are.

        `parts`: for each of the event's choices its index and the parts of its calls.
        """
        try:
            written = [self._of_choice(choice, given) for choice, given in parts]
        except (ValueError, RecursionError):
            return event  # parts that are no objects
        return event if written == [given for _, given in parts] else _with(event, "delta", written)

    def _of_choice(self, choice: int, given: Sequence[msgspec.Raw]) -> list[msgspec.Raw]:
        calls = self._calls.setdefault(choice, [])
        parts = [_read_part(raw) for raw in given]
        return [
            _next_part(calls, raw, part, None if len(parts) == 1 else position)
            for position, (raw, part) in enumerate(zip(given, parts, strict=True))
        ]


def in_order_whole(body: bytes, calls: Sequence[Sequence[msgspec.Raw]]) -> bytes:
    """Return a whole answer, each of whose calls has an id, a type and arguments as text."""
    try:
        written = [[_whole_call(raw, _read_part(raw)) for raw in given] for given in calls]
    except (ValueError, RecursionError):
        return body
    return body if written == [list(given) for given in calls] else _with(body, "message", written)


def _next_part(
    calls: list[_Call], raw: msgspec.Raw, part: _Part, position: int | None
) -> msgspec.Raw:
    """Add a part to the call that it belongs to; return it as that call's.

    `position`: its place among the parts of one event; None where it is the only one.
    """
    place = _place_of(calls, part, position)
    is_first = place is None
    if place is None:
        place = len(calls)
        calls.append(_Call(part))
    call = calls[place]
    has_name = bool(call.name)
    call.add(part)
    if part.index == place and type(part.index) is int:
        if is_first and _is_whole_form(part):
            return raw
        if not is_first and _is_rest_form(part):
            return raw
    if is_first:
        fields = _fields_of_whole(raw, part)
    else:
        fields = _read_fields(raw)
        for name in ("id", "type"):  # a client that is told null forgets what it knew
            fields.pop(name, None)
        _set_function(fields, part, drops_name=has_name)
    return msgspec.Raw(_encode(fields | {"index": msgspec.Raw(b"%d" % place)}))


def _place_of(calls: Sequence[_Call], part: _Part, position: int | None) -> int | None:
    """Return the place of the call that a part goes on with; None for a new call."""
    places = range(len(calls) - 1, -1, -1)  # of several the latest
    if part.index is not None:
        found = next((i for i in places if calls[i].first.index == part.index), None)
    elif part.id:
        found = next((i for i in places if calls[i].first.id == part.id), None)
    elif position is not None:
        found = position if position < len(calls) else None
    else:
        found = next(iter(places), None)
    return None if found is None or _begins_another(part, calls[found]) else found


def _begins_another(part: _Part, call: _Call) -> bool:
    """Return whether a part with the index of `call` begins another call: it has a name then."""
    if not part.name:
        return False
    if part.id:
        return part.id != call.first.id
    return (bool(part.arguments) or part.name != call.name) and call.is_whole


def _is_whole_form(part: _Part) -> bool:
    return bool(part.id and isinstance(part.id, str) and part.type) and part.has_plain_arguments


def _is_rest_form(part: _Part) -> bool:
    return not part.id and not part.name and part.type is not None and part.has_plain_arguments


def _whole_call(raw: msgspec.Raw, part: _Part) -> msgspec.Raw:
    return raw if _is_whole_form(part) else msgspec.Raw(_encode(_fields_of_whole(raw, part)))


def _fields_of_whole(raw: msgspec.Raw, part: _Part) -> dict[str, msgspec.Raw]:
    """Return a call's fields, with an id, a type and a function in OpenAI's form."""
    fields = _read_fields(raw)
    call_id = str(part.id) if part.id else f"call_{secrets.token_hex(12)}"
    fields["id"] = msgspec.Raw(_encode(call_id))
    fields["type"] = msgspec.Raw(_encode(part.type or "function"))
    _set_function(fields, part, drops_name=False)
    return fields


def _set_function(fields: dict[str, msgspec.Raw], part: _Part, *, drops_name: bool) -> None:
    if part.function is None:
        return
    function = _read_fields(fields["function"])
    if drops_name:
        function.pop("name", None)
    function["arguments"] = msgspec.Raw(_encode(part.arguments or ""))
    fields["function"] = msgspec.Raw(_encode(function))


def _with(
    raw: bytes, name: Literal["delta", "message"], calls: Sequence[Sequence[msgspec.Raw]]
) -> bytes:
    """Return an event, or a whole body, with other tool calls in its choices' deltas."""
    data = event_data(raw) if name == "delta" else raw
    fields = _read_fields(data or b"")
    choices = _read_choices(fields["choices"])
    for choice, own in zip(choices, calls, strict=True):
        if own:
            text = _read_fields(choice[name])
            text["tool_calls"] = msgspec.Raw(_encode(own))
            choice[name] = msgspec.Raw(_encode(text))
    fields["choices"] = msgspec.Raw(_encode(choices))
    body = _encode(fields)
    return to_event(body) if name == "delta" else body
