"""Writes of an answer: those of one turn of the event loop are joined, and none waits longer."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from outrider.gateway.http.edge.answer_transport import AnswerTransport

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Loop:
    """A loop whose turns begin a second apart."""

    def __init__(self) -> None:
        self.turn_s = 1.0
        self._soon: list[Callable[[], object]] = []

    def time(self) -> float:
        return self.turn_s

    def call_soon(self, callback: Callable[[], object]) -> None:
        self._soon.append(callback)

    def end_turn(self) -> None:
        """Run what waits for the turn's end, then begin another."""
        soon, self._soon = self._soon, []
        for callback in soon:
            callback()
        self.turn_s += 1.0


class Socket:
    """A transport that keeps each write by itself."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_gone = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.is_gone


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def socket() -> Socket:
    return Socket()


@pytest.fixture
def answer(loop: Loop, socket: Socket) -> AnswerTransport:
    def close() -> None:
        socket.is_gone = True

    return AnswerTransport(
        cast(asyncio.Transport, socket), close, cast(asyncio.AbstractEventLoop, cast(Any, loop))
    )


def test_head_and_body_are_one_write(answer: AnswerTransport, loop: Loop, socket: Socket) -> None:
    answer.write(HEAD)
    answer.write(b"body")
    assert socket.writes == [HEAD + b"body"]
    loop.end_turn()
    assert socket.writes == [HEAD + b"body"]


def test_head_of_a_stream_does_not_wait_for_its_first_chunk(
    answer: AnswerTransport, loop: Loop, socket: Socket
) -> None:
    answer.write(HEAD)
    loop.end_turn()
    assert socket.writes == [HEAD]
    answer.write(b"1")
    assert socket.writes == [HEAD, b"1"]


def test_chunks_of_one_turn_are_joined_behind_the_first(
    answer: AnswerTransport, loop: Loop, socket: Socket
) -> None:
    answer.write(HEAD)
    for chunk in (b"1", b"2", b"3"):
        answer.write(chunk)
    loop.end_turn()
    assert socket.writes == [HEAD + b"1", b"23"]
    answer.write(b"4")
    assert socket.writes[2:] == [b"4"]
    answer.write(b"5")
    answer.write(b"6")
    loop.end_turn()
    assert socket.writes[2:] == [b"4", b"56"]


def test_many_bytes_of_one_turn_are_not_held(answer: AnswerTransport, socket: Socket) -> None:
    answer.write(HEAD)
    for _ in range(64):
        answer.write(b"x" * 4096)
    # The transport has to see them, or it would never ask for a pause.
    assert sum(map(len, socket.writes)) >= 63 * 4096 + len(HEAD) - 65_536


def test_closing_sends_what_is_held(answer: AnswerTransport, loop: Loop, socket: Socket) -> None:
    answer.write(HEAD)
    answer.write(b"1")
    answer.write(b"2")
    answer.close()
    assert socket.writes == [HEAD + b"1", b"2"]
    assert socket.is_gone
    loop.end_turn()
    assert socket.writes == [HEAD + b"1", b"2"]


def test_nothing_is_written_to_a_lost_connection(
    answer: AnswerTransport, loop: Loop, socket: Socket
) -> None:
    answer.write(HEAD)
    socket.is_gone = True
    loop.end_turn()
    assert not socket.writes


def test_many_chunks_of_one_turn_do_not_wait_for_the_last(
    answer: AnswerTransport, loop: Loop, socket: Socket
) -> None:
    answer.write(HEAD)
    for number in range(20):
        answer.write(b"%d" % number)
    assert socket.writes == [HEAD + b"0", b"12345678", b"910111213141516"]
    loop.end_turn()
    assert socket.writes[3:] == [b"171819"]
