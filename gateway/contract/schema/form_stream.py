"""Forms whose contents are too large for memory: parts as they come, within the bounds of forms."""

from collections.abc import AsyncIterator

from outrider.gateway.contract.schema.forms import (
    MAX_HEAD_BYTES,
    MAX_PARTS,
    FormPart,
    no_form,
    read_boundary,
    read_part,
)

_LINE_END = b"\r\n"
_HEAD_END = b"\r\n\r\n"


class FormStream:
    """Reads a form from pieces of its body. Each part is taken to its end before the next."""

    def __init__(self, content_type: str, pieces: AsyncIterator[bytes]) -> None:
        """Raises BadRequestError for a type without a boundary."""
        self._mark = b"\r\n--" + read_boundary(content_type)
        self._pieces = pieces
        self._buffer = bytearray(_LINE_END)  # so that the first boundary is like the others
        self._num_parts = 0

    async def parts(self) -> AsyncIterator[FormPart]:
        """Yield parts without content, which `content` has. Raises BadRequestError."""
        await self._hold(len(self._mark) + 2)
        if not self._buffer.startswith(self._mark):
            raise no_form()
        del self._buffer[: len(self._mark)]
        while True:
            await self._hold(2)
            if self._buffer.startswith(b"--"):
                return
            self._num_parts += 1
            if not self._buffer.startswith(_LINE_END) or self._num_parts > MAX_PARTS:
                raise no_form()
            yield read_part(await self._head(), memoryview(b""))

    async def content(self) -> AsyncIterator[bytes]:
        """Yield the content of the part that came last, in pieces of any size."""
        mark = self._mark
        while (found := self._buffer.find(mark)) < 0:
            if (sure := len(self._buffer) - len(mark) + 1) > 0:
                yield bytes(self._buffer[:sure])
                del self._buffer[:sure]
            await self._more()
        yield bytes(self._buffer[:found])
        del self._buffer[: found + len(mark)]

    async def _head(self) -> bytes:
        while (end := self._buffer.find(_HEAD_END, 0, MAX_HEAD_BYTES)) < 0:
            if len(self._buffer) >= MAX_HEAD_BYTES:
                raise no_form()
            await self._more()
        head = bytes(self._buffer[len(_LINE_END) : end])
        del self._buffer[: end + len(_HEAD_END)]
        return head

    async def _hold(self, num_bytes: int) -> None:
        while len(self._buffer) < num_bytes:
            await self._more()

    async def _more(self) -> None:
        try:
            self._buffer += await anext(self._pieces)
        except StopAsyncIteration:
            raise no_form() from None
