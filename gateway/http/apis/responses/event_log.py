"""The numbered events of one response's stream."""

from collections.abc import Sequence
from typing import Any, Final, Protocol

from outrider.gateway.answering.streaming.sse import encode_text
from outrider.gateway.http.apis.events import named_event, one_line

_NO_LOGPROBS: Final = b',"logprobs":[]'


class EventSink(Protocol):
    """Receives a response's events while it is written."""

    def add(self, name: str, fields: dict[str, Any]) -> None:
        """An event; its type and number are put in front of the fields."""

    def add_delta(
        self,
        head: bytes,
        text: str,
        *,
        logprobs: Sequence[dict[str, Any]] | None,
        trace: bytes | None,
    ) -> None:
        """A piece of text behind a head that `delta_head` has made.

        `logprobs`: None where such an event has no such field. `trace`: JSON of the `outrider`
        object.
        """


class EventLog:
    """Writes events. `take` gives the bytes since it was last called."""

    def __init__(self) -> None:
        self._num_events = 0
        self._written: list[bytes] = []

    def add(self, name: str, fields: dict[str, Any]) -> None:
        """One event."""
        self._written.append(
            named_event(name, {"type": name, "sequence_number": self._num_events, **fields})
        )
        self._num_events += 1

    def add_delta(
        self,
        head: bytes,
        text: str,
        *,
        logprobs: Sequence[dict[str, Any]] | None,
        trace: bytes | None,
    ) -> None:
        """One piece of text. This runs for each token of each client."""
        parts = [head, b"%d" % self._num_events, b',"delta":', encode_text(text)]
        if logprobs is not None:
            parts.append(b',"logprobs":' + one_line(logprobs) if logprobs else _NO_LOGPROBS)
        if trace is not None:
            parts.append(b',"outrider":' + trace)
        parts.append(b"}\n\n")
        self._written.append(b"".join(parts))
        self._num_events += 1

    def pass_on(self, comment: bytes) -> None:
        """A sign of life, as it came."""
        self._written.append(comment)

    def take(self) -> bytes:
        """Whole events."""
        written, self._written = self._written, []
        return b"".join(written)


class NoEvents:
    """Event log of a response that is not streamed: it discards everything."""

    def add(self, name: str, fields: dict[str, Any]) -> None:
        """Discard an event."""

    def add_delta(
        self,
        head: bytes,
        text: str,
        *,
        logprobs: Sequence[dict[str, Any]] | None,
        trace: bytes | None,
    ) -> None:
        """Discard a delta."""


def delta_head(name: str, fields: dict[str, Any]) -> bytes:
    """Return the bytes with which all deltas of an item begin, up to their number."""
    event = named_event(name, {"type": name, **fields}).removesuffix(b"}\n\n")
    return event + b',"sequence_number":'
