"""Faults of a server: one description for tests, for the mock and for the fault table.

An answer is a list of steps: bytes with the time to wait before them. A toxic makes another list of
it, so a spoilt answer is played by the same code as a healthy one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Final, Literal

import msgspec

ToxicKind = Literal[
    "reset",  # RST: before the head where after_events is 0, else behind that many text events
    "status",  # an HTTP status that is no success, with `retry_after_s` and `headers`
    "slow_headers",  # `delay_s` before the head
    "slow_first_token",  # the head at once, the first event after `delay_s`
    "stall",  # behind `after_events` nothing more comes, and the connection stays open
    "garbage",  # an event that is no JSON
    "half_closed",  # FIN in the midst of the body
    "no_done",  # the body ends as it should, but the answer is not at its end
    "content_type",  # 200 with a page of HTML
    "long_line",  # one event of `size_bytes`
    "error_event",  # an error in the midst of the stream
]
Ending = Literal["keep", "fin", "reset", "stall"]
"""What becomes of the connection behind the last step."""

CHUNKED_END: Final = b"0\r\n\r\n"
# So that what was sent before a reset is on its way: RST throws away what waits for sending.
_BEFORE_RESET_S: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Toxic:
    """One way to fail. A server that does not listen is made by `MockUpstream.refuse`.

    `after_events` counts events with text (or a call), not the first one that names the role; of an
    answer that is not streamed a number above 0 means half of its body.
    """

    kind: ToxicKind
    after_events: int = 0
    status: int = 500
    retry_after_s: float | None = None
    headers: tuple[tuple[str, str], ...] = ()
    code: str | None = None
    delay_s: float = 60.0
    size_bytes: int = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Bytes that are sent `wait_s` behind the step before. `is_head`: the response's head."""

    data: bytes
    wait_s: float = 0.0
    is_head: bool = False
    has_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole answer, as it goes over the wire."""

    steps: Sequence[Step]
    ending: Ending = "keep"


def framed(data: bytes) -> bytes:
    """A chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def head(
    status: int,
    content_type: str,
    *,
    num_bytes: int | None = None,
    headers: Sequence[tuple[str, str]] = (),
) -> bytes:
    """A response's head; chunked where the body's length is not known."""
    length = "transfer-encoding: chunked" if num_bytes is None else f"content-length: {num_bytes}"
    more = "".join(f"{name}: {value}\r\n" for name, value in headers)
    first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
    return f"{first}content-type: {content_type}\r\n{more}{length}\r\n\r\n".encode()


def whole_plan(
    status: int, content_type: str, body: bytes, *, headers: Sequence[tuple[str, str]] = ()
) -> Plan:
    """An answer of one piece."""
    start = head(status, content_type, num_bytes=len(body), headers=headers)
    return Plan(steps=[Step(data=start, is_head=True), Step(data=body, has_text=True)])


def error_body(message: str, *, kind: str = "server_error", code: str | None = None) -> bytes:
    """OpenAI's error object."""
    detail = {"message": message, "type": kind, "param": None, "code": code}
    return msgspec.json.encode({"error": detail})


def spoil(plan: Plan, toxic: Toxic) -> Plan:
    """The answer as the toxic leaves it."""
    return _SPOILERS[toxic.kind](plan, toxic)


def _is_streamed(plan: Plan) -> bool:
    return b"text/event-stream" in plan.steps[0].data


def _first(plan: Plan, num_events: int) -> list[Step]:
    """The steps up to the last of so many text events; 0: the head alone."""
    if not _is_streamed(plan):
        start, body = plan.steps
        half = replace(body, data=body.data[: len(body.data) // 2])
        return [start, half] if num_events else [start]
    kept: list[Step] = [plan.steps[0]]
    seen = 0
    for step in plan.steps[1:]:
        if seen == num_events:
            break
        kept.append(step)
        seen += step.has_text
    return kept


def _reset(plan: Plan, toxic: Toxic) -> Plan:
    kept = _first(plan, toxic.after_events) if toxic.after_events else []
    return Plan(steps=[*kept, Step(data=b"", wait_s=_BEFORE_RESET_S)], ending="reset")


def _status(plan: Plan, toxic: Toxic) -> Plan:
    del plan
    headers = list(toxic.headers)
    if toxic.retry_after_s is not None:
        headers.append(("retry-after", f"{toxic.retry_after_s:g}"))
    kind = "rate_limit_error" if toxic.status == 429 else "server_error"
    body = error_body("The mock was told to answer so.", kind=kind, code=toxic.code)
    return whole_plan(toxic.status, "application/json", body, headers=headers)


def _slow_headers(plan: Plan, toxic: Toxic) -> Plan:
    start, *rest = plan.steps
    return replace(plan, steps=[replace(start, wait_s=start.wait_s + toxic.delay_s), *rest])


def _slow_first_token(plan: Plan, toxic: Toxic) -> Plan:
    start, event, *rest = plan.steps
    return replace(plan, steps=[start, replace(event, wait_s=event.wait_s + toxic.delay_s), *rest])


def _stall(plan: Plan, toxic: Toxic) -> Plan:
    return Plan(steps=_first(plan, toxic.after_events), ending="stall")


def _half_closed(plan: Plan, toxic: Toxic) -> Plan:
    return Plan(steps=_first(plan, toxic.after_events), ending="fin")


def _no_done(plan: Plan, toxic: Toxic) -> Plan:
    if not _is_streamed(plan):
        return whole_plan(200, "application/json", b"")
    return Plan(steps=[*_first(plan, toxic.after_events), Step(data=CHUNKED_END)])


def _ends_with(plan: Plan, toxic: Toxic, data: bytes) -> Plan:
    """The first events, then one with `data`, then the body's end."""
    if not _is_streamed(plan):
        return whole_plan(200, "application/json", data)
    event = framed(b"data: " + data + b"\n\n")
    kept = _first(plan, toxic.after_events)
    return Plan(steps=[*kept, Step(data=event), Step(data=CHUNKED_END)])


def _garbage(plan: Plan, toxic: Toxic) -> Plan:
    return _ends_with(plan, toxic, b'{"id": "chatcmpl-mock", "choices": [{"delta')


def _error_event(plan: Plan, toxic: Toxic) -> Plan:
    return _ends_with(plan, toxic, error_body("The mock's engine has died."))


def _long_line(plan: Plan, toxic: Toxic) -> Plan:
    return _ends_with(plan, toxic, b'{"id": "' + b"x" * toxic.size_bytes + b'"}')


def _content_type(plan: Plan, toxic: Toxic) -> Plan:
    del plan, toxic
    return whole_plan(200, "text/html; charset=utf-8", b"<html><body>Please log in.</body></html>")


_SPOILERS: Final[Mapping[ToxicKind, Callable[[Plan, Toxic], Plan]]] = {
    "reset": _reset,
    "status": _status,
    "slow_headers": _slow_headers,
    "slow_first_token": _slow_first_token,
    "stall": _stall,
    "garbage": _garbage,
    "half_closed": _half_closed,
    "no_done": _no_done,
    "content_type": _content_type,
    "long_line": _long_line,
    "error_event": _error_event,
}
