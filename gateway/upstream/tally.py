"""Counts an answer's tokens from its text, where the server's own count is not known."""

from typing import Final

from outrider.gateway.upstream.call import Chunk, WholeAnswer

_BYTES_PER_TOKEN: Final = 4
"""Bytes of UTF-8: about as many in English, and in scripts with two or three bytes a character."""
_LONG_TOKEN_BYTES: Final = 16
"""More than the tokens of any text have on average."""


class Tally:
    """Counts the text of one answer: all of its choices, reasoning, calls and refusals."""

    __slots__ = ("_num_bytes", "_num_parts")

    def __init__(self) -> None:
        self._num_bytes = 0
        self._num_parts = 0

    def add(self, chunk: Chunk) -> None:
        """Add one more chunk. This runs for each token of each client."""
        if num_bytes := _num_bytes(chunk):
            self._num_bytes += num_bytes
            self._num_parts += 1

    def take_back(self, chunk: Chunk) -> None:
        """Take back a chunk that was added and does not count after all."""
        if num_bytes := _num_bytes(chunk):
            self._num_bytes -= num_bytes
            self._num_parts -= 1

    def add_whole(self, answer: WholeAnswer) -> None:
        """Add an answer that is not streamed."""
        for text in (*answer.texts, *answer.reasoning):
            self._num_bytes += size_bytes(text)
            self._num_parts += bool(text)
        self._num_bytes += answer.num_other_bytes
        self._num_parts += bool(answer.num_other_bytes)

    @property
    def num_tokens(self) -> int:
        """Return the likely number: a part of a stream has at least one."""
        return max(self._num_parts, tokens_of(self._num_bytes))

    @property
    def least_tokens(self) -> int:
        """Return the least number of tokens it can have; at least one where there is any text."""
        return max(self._num_bytes // _LONG_TOKEN_BYTES, min(self._num_parts, 1))


def tokens_of(num_bytes: int) -> int:
    """Return the likely number of tokens of a text of this size."""
    return -(-num_bytes // _BYTES_PER_TOKEN)


def size_bytes(text: str) -> int:
    """Return the size in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _num_bytes(chunk: Chunk) -> int:
    num_bytes = size_bytes(chunk.content) + chunk.num_other_bytes
    return num_bytes + size_bytes(chunk.reasoning) if chunk.reasoning else num_bytes
