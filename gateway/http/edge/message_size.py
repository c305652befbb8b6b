"""The bytes of one HTTP message, counted while it arrives."""

from typing import Final

from outrider.gateway.http.edge import refusals
from outrider.gateway.http.edge.refusals import EdgeRefusal

_MAX_FRAMING: Final = 16
"""Bytes of a chunked body for one of its content: chunks of one byte have six."""
_MAX_DISCARDED_BYTES: Final = 64 * 2**20
"""The most bytes to discard of a body that arrives after its answer."""


class MessageSize:
    """Counts a message's headers, content and framing, and refuses too large ones."""

    __slots__ = (
        "_max_header_bytes",
        "_num_barren_bytes",
        "_num_body_bytes",
        "_num_content_seen",
        "_num_discarded_bytes",
        "_num_header_bytes",
        "num_content_bytes",
    )

    def __init__(self, max_header_bytes: int) -> None:
        self._max_header_bytes = max_header_bytes
        self.num_content_bytes = 0
        self._num_header_bytes = 0  # read without an end in sight
        self._num_body_bytes = 0  # with their framing
        self._num_discarded_bytes = 0
        self._num_barren_bytes = 0  # of the body, since the last read that held content
        self._num_content_seen = 0  # content up to that read

    @property
    def num_bytes_of_body(self) -> int:
        """Return the bytes of the body so far."""
        return max(self._num_body_bytes, self.num_content_bytes)

    def add_headers(self, num_bytes: int, *, url: bytes) -> EdgeRefusal | None:
        """Count bytes of headers that have not ended yet."""
        self._num_header_bytes += num_bytes
        if len(url) > self._max_header_bytes:
            return refusals.LONG_URL
        return refusals.LARGE_HEADERS if self._num_header_bytes > self._max_header_bytes else None

    def add_body(self, num_bytes: int, *, is_answered: bool) -> EdgeRefusal | None:
        """Count framing bytes of a body whose content was counted already."""
        self._num_body_bytes += num_bytes
        has_content = self.num_content_bytes > self._num_content_seen
        self._num_content_seen = self.num_content_bytes
        self._num_barren_bytes = 0 if has_content else self._num_barren_bytes + num_bytes
        if is_answered:
            self._num_discarded_bytes += num_bytes
        allowed = self._max_header_bytes + _MAX_FRAMING * self.num_content_bytes
        is_wasteful = (
            self._num_barren_bytes > self._max_header_bytes
            or self._num_body_bytes > allowed
            or self._num_discarded_bytes > _MAX_DISCARDED_BYTES
        )
        return refusals.WASTEFUL if is_wasteful else None
