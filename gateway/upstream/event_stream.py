"""Server-sent events as bytes: their ends and their data.

https://html.spec.whatwg.org/multipage/server-sent-events.html. An event is passed on as the bytes
that came, with its comments and its blank line; nothing is decoded without need.
"""

import re
from typing import Final

# "\n\r" alone is no blank line here, as no server mixes its line ends so: the "\n" that makes it
# one may be in the next packet, and an event must not depend on how the network cuts it.
_BLANK_LINE: Final = re.compile(rb"\n\r?\n|\r\r")
_LONGEST_BLANK_LINE: Final = 3
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class EventSplitter:
    """Cuts a stream of bytes after every blank line, however the bytes arrive."""

    __slots__ = ("_held", "_num_searched")

    def __init__(self) -> None:
        self._held = bytearray()
        self._num_searched = 0

    @property
    def rest(self) -> bytes:
        """Return the received part of an event that is not complete yet."""
        return bytes(self._held)

    @property
    def num_held_bytes(self) -> int:
        """Return the length of `rest`, without a copy of it."""
        return len(self._held)

    def push(self, data: bytes) -> list[bytes]:
        """Take more bytes; the events that are whole now, each with its blank line."""
        if self._held or b"\r" in data:
            self._held += data
            return self._cut_held()
        events = []
        start = 0
        while (end := data.find(b"\n\n", start) + 2) > 1:
            events.append(data[start:end])
            start = end
        if start < len(data):
            self._held += data[start:]
            self._num_searched = len(self._held)
        return events

    def _cut_held(self) -> list[bytes]:
        held = self._held
        events = []
        start = 0
        # Bytes searched before are not searched again: a long event stays linear in its length.
        search_at = max(0, self._num_searched - _LONGEST_BLANK_LINE + 1)
        while blank_line := _BLANK_LINE.search(held, search_at):
            events.append(bytes(held[start : blank_line.end()]))
            start = search_at = blank_line.end()
        del held[:start]
        self._num_searched = len(held)
        return events

    def finish(self) -> list[bytes]:
        """End the stream: return its last event, if only the blank line is missing.

        An event that was cut within a line is left in `rest`: its content is unknown.
        """
        held = bytes(self._held)
        line_end = b"\r\n" if held.endswith(b"\r\n") else held[-1:]
        if line_end not in (b"\n", b"\r", b"\r\n") or not held.strip():
            return []
        self._held.clear()
        self._num_searched = 0
        return [held + line_end]


def event_data(event: bytes) -> bytes | None:
    """Return the data of a whole event, its lines joined by line feeds; None where it has none.

    None is for comments, and for events with only a name or a blank line.
    """
    # The form of nearly every server: one line.
    is_framed = event[:6] == b"data: " and event[-2:] == b"\n\n"
    if is_framed and event.count(b"\n") == 2 and b"\r" not in event:
        return event[6:-2]
    values = []
    for line in event.removeprefix(_BYTE_ORDER_MARK).splitlines():
        name, _, value = line.partition(b":")
        if name == b"data":
            values.append(value.removeprefix(b" "))
    return b"\n".join(values) if values else None
