"""Blocks over the line between two engines: sockets with keys, engines that do not keep to it."""

import asyncio
from concurrent.futures import Future
from pathlib import Path

import pytest

from outrider.engine.cache.extents import Extent, ExtentError, ExtentHeader
from outrider.engine.cache.peers import BlocksWanted, PeerError
from outrider.gateway.engines.backends.peer_lines import PeerLines
from outrider.gateway.engines.backends.remote_client import RemoteEngineClient
from tests.gateway.engines.backends.clients import becomes, run, started
from tests.gateway.engines.backends.replicas import Replica, make_keys
from tests.gateway.scripted_engine import ScriptedEngine
from tests.peers import listening, peer_lines

WANTED = BlocksWanted(
    tier="large", fingerprint="f", first=0, parent=b"p", hashes=(b"one",), wait_s=30.0
)
EXTENT = Extent(
    header=ExtentHeader(
        fingerprint="f", kind="blocks", first=0, parent=b"p", hashes=(b"one",), shapes=((1, 3),)
    ),
    payload=b"abc",
)


class SendingEngine(ScriptedEngine):
    """Has blocks after so many looks, or refuses."""

    def __init__(self, num_looks: int = 0, error: Exception | None = None) -> None:
        super().__init__()
        self.num_looks = num_looks
        self._error = error

    def export_blocks(self, wanted: BlocksWanted) -> list[Extent] | None:
        if self._error is not None:
            raise self._error
        self.num_looks -= 1
        return None if self.num_looks >= 0 else [EXTENT]


def pulled(lines: PeerLines, endpoint: str, wanted: BlocksWanted = WANTED) -> list[Extent]:
    return lines.pull(endpoint, wanted).result(timeout=60)


def test_blocks_come_over_a_line_with_keys(tmp_path: Path) -> None:
    keys = make_keys(tmp_path)
    with listening(SendingEngine(), keys) as endpoint, peer_lines(keys) as lines:
        futures = [lines.pull(endpoint, WANTED) for _ in range(100)]  # more than a line takes
        for future in futures:
            (extent,) = future.result(timeout=60)
            assert extent.header == EXTENT.header
            assert bytes(extent.payload) == b"abc"


def test_another_fleets_engine_gets_nothing(tmp_path: Path) -> None:
    keys, others = make_keys(tmp_path), make_keys(tmp_path, "other.key")
    with (
        listening(SendingEngine(), keys) as endpoint,
        peer_lines(others) as lines,
        pytest.raises(PeerError, match="key"),
    ):
        pulled(lines, endpoint)


def test_without_keys_no_other_machine_is_asked() -> None:
    with peer_lines() as lines, pytest.raises(PeerError, match="without keys"):
        pulled(lines, "tcp://10.1.2.3:7600")


@pytest.mark.parametrize("error", [PeerError("of another release"), RuntimeError("broken")])
def test_a_refusal_comes_with_its_reason_and_ends_nothing(error: Exception) -> None:
    with listening(SendingEngine(error=error)) as endpoint, peer_lines() as lines:
        for _ in range(2):
            with pytest.raises(PeerError, match=str(error)):
                pulled(lines, endpoint)


@pytest.mark.slow
def test_blocks_that_come_to_be_there_are_sent_then() -> None:
    with listening(SendingEngine(num_looks=1)) as endpoint, peer_lines() as lines:
        assert pulled(lines, endpoint)
        soon = BlocksWanted(
            tier="large", fingerprint="f", first=0, parent=b"p", hashes=(b"one",), wait_s=0.0
        )
        assert pulled(lines, endpoint, soon)


def test_blocks_that_never_come_to_be_there_are_not_waited_for() -> None:
    soon = BlocksWanted(
        tier="large", fingerprint="f", first=0, parent=b"p", hashes=(b"one",), wait_s=0.0
    )
    with listening(SendingEngine(num_looks=10**9)) as endpoint, peer_lines() as lines:
        assert pulled(lines, endpoint, soon) == []


@pytest.mark.slow
def test_an_engine_that_computes_nothing_says_so_before_the_wait_is_over() -> None:
    with listening(SendingEngine(num_looks=10**9)) as endpoint, peer_lines() as lines:
        assert lines.pull(endpoint, WANTED).result(timeout=20) == []


def test_damaged_blocks_are_told_from_sound_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "outrider.gateway.engines.backends.block_server.pack_extent", lambda _: b"OUTRKV" * 30
    )
    with (
        listening(SendingEngine()) as endpoint,
        peer_lines() as lines,
        pytest.raises(ExtentError),
    ):
        pulled(lines, endpoint)


@pytest.mark.slow
def test_an_engine_that_ends_fails_what_it_was_asked_and_is_reached_again() -> None:
    with peer_lines() as lines:
        with listening(SendingEngine(num_looks=10**9)) as endpoint:
            future: Future[list[Extent]] = lines.pull(endpoint, WANTED)
            with pytest.raises(TimeoutError):
                future.result(timeout=0.2)
        with pytest.raises(PeerError):
            future.result(timeout=60)
        with pytest.raises(PeerError):
            pulled(lines, endpoint)


def test_closing_fails_what_is_under_way() -> None:
    with listening(SendingEngine(num_looks=10**9)) as endpoint:
        with peer_lines() as lines:
            future = lines.pull(endpoint, WANTED)
        with pytest.raises(PeerError, match="closed"):
            future.result(timeout=60)


@pytest.mark.slow
def test_an_engine_that_drains_sends_blocks_to_those_that_take_its_answers_over() -> None:
    async def main() -> None:
        listening_one = Replica()
        listening_one.engine = SendingEngine()
        client = RemoteEngineClient(listening_one.start().endpoint)
        news: list[object] = []
        client.follow_block_events(news.append)
        async with started(client):
            await becomes(lambda: bool(news))
            listening_one.listener.drain(60.0)
            with peer_lines() as lines:
                assert await asyncio.to_thread(pulled, lines, listening_one.endpoint)
            await asyncio.to_thread(listening_one.stop, 60.0)  # soon afterwards it has ended
        assert listening_one.exit_status == 0

    run(main())
