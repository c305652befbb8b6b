"""A worker whose event loop stands still is killed, so that its parent can start another."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from outrider.gateway.workers.process import WorkerProcess, WorkerTask

WORKER = """
import asyncio, socket, sys, threading
from outrider.gateway.workers.siblings import Siblings

threading.Thread(target=lambda: (sys.stdin.buffer.read(), sys.exit()), daemon=True).start()

async def main():
    siblings = Siblings(1, 1, socket.socket(fileno=int(sys.argv[1])))
    await siblings.run()

asyncio.run(main())
"""


@asynccontextmanager
async def started_worker(folder: Path) -> AsyncIterator[WorkerProcess]:
    (folder / "turning_worker.py").write_text(WORKER)
    worker = WorkerProcess(1, "turning_worker", WorkerTask(number=1, settings=None, engine=None))
    try:
        assert await worker.line.call("alive") is None
        yield worker
    finally:
        worker.kill()
        assert await worker.ended() == "signal SIGKILL"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


async def test_a_worker_that_stands_still_is_killed(folder: Path) -> None:
    async with started_worker(folder) as worker:
        worker.is_serving = True
        os.kill(worker.pid, signal.SIGSTOP)
        await worker.watch(0.5)


async def test_a_worker_that_answers_or_has_not_begun_is_left_alone(folder: Path) -> None:
    async with started_worker(folder) as worker:
        watching = asyncio.create_task(worker.watch(0.01))
        await asyncio.sleep(0.1)
        assert not watching.done()
        watching.cancel()
        worker.is_serving = True
        watching = asyncio.create_task(worker.watch(120.0))
        await worker.line.call("alive")
        assert not watching.done()
        watching.cancel()
