"""Records an answer while it is sent, to send it again."""

from collections.abc import Callable
from typing import Final

from starlette.types import Message, Send

from outrider.gateway.http.edge.cors import Header

_OF_THE_MOMENT: Final = b"x-ratelimit-"
"""The limits left when the first answer was sent do not hold for a repetition."""
_SLOT_BYTES: Final = 1024
"""The approximate memory of one entry beside its answer."""


class AnswerRecorder:
    """Passes an answer on and remembers it, if it is one of success and memory allows."""

    def __init__(
        self,
        send: Send,
        tenant: str,
        *,
        reserve: Callable[["AnswerRecorder", int], bool],
        release: Callable[["AnswerRecorder"], None],
    ) -> None:
        """`reserve` takes this many bytes of the tenant's memory, if there is room for them."""
        self.tenant = tenant
        self.status = 0
        self.headers: list[Header] = []
        self.body = bytearray()
        self.num_bytes = 0
        self.is_whole = False
        self._send = send
        self._is_recording = False
        self._reserve_bytes = reserve
        self._release_bytes = release

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start(message)
        elif message["type"] == "http.response.body" and self._is_recording:
            self._add(message)
        await self._send(message)

    def _start(self, message: Message) -> None:
        self.status = message["status"]
        self.headers = [
            header for header in message["headers"] if not header[0].startswith(_OF_THE_MOMENT)
        ]
        is_success = 200 <= self.status < 300
        self._is_recording = is_success and self._reserve(_SLOT_BYTES)

    def _add(self, message: Message) -> None:
        part = message.get("body", b"")
        if not self._reserve(len(part)):
            self.give_up()
            return
        self.body += part
        self.is_whole = not message.get("more_body", False)

    def give_up(self) -> None:
        """Stop recording the answer; it is passed on all the same."""
        self._release_bytes(self)
        self.num_bytes = 0
        self.body.clear()
        self.is_whole = self._is_recording = False

    def _reserve(self, num_bytes: int) -> bool:
        has_room = self._reserve_bytes(self, num_bytes)
        if has_room:
            self.num_bytes += num_bytes
        return has_room
