"""A worker's process as its parent sees it: started, told, given connections, ended."""

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, Final

from outrider.gateway.workers.connections import give, give_no_more
from outrider.gateway.workers.line import CallFailedError, Handler, Line, LineClosedError
from outrider.gateway.workers.watchdog import until_silent

logger = logging.getLogger(__name__)

_LENGTH: Final = struct.Struct("<I")
_EXIT_S: Final = 5.0
"""Time for a process that has closed its line to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask:
    """The parameters that a worker's process receives on standard input."""

    number: int
    settings: Any
    """The settings of this gateway."""
    engine: str | None
    """The address of the engine that all workers share; None where there is none here."""


def write_task(pipe: IO[bytes], task: WorkerTask) -> None:
    """Tell a process its task. Raises OSError where it has ended."""
    data = pickle.dumps(task)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def read_task(pipe: IO[bytes]) -> WorkerTask:
    """Read the task from a pipe that stays open for as long as the parent lives."""
    (length,) = _LENGTH.unpack(pipe.read(_LENGTH.size))
    task = pickle.loads(pipe.read(length))
    assert isinstance(task, WorkerTask)
    return task


class WorkerProcess:
    """One process of a worker. Made in an event loop; `ended` must be awaited in any case."""

    def __init__(self, key: int, module: str, task: WorkerTask) -> None:
        """Start `python -m module`. `key`: a number that no other process of a worker has."""
        self.key = key
        self.number = task.number
        self.is_serving = False
        """True from when it takes connections."""
        self.is_ready = False
        """True from when it answers requests."""
        self.handlers: dict[str, Handler] = {"connections": self._count}
        """Answers to its calls, by name; further ones may be added at once."""
        line_end, line_other = socket.socketpair()
        self._connections, connections_other = socket.socketpair()
        self._connections.setblocking(False)
        self._num_given = self._num_received = self._num_open = 0
        with line_other, connections_other:
            files = (line_other.fileno(), connections_other.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *map(str, files)],
                stdin=subprocess.PIPE,
                pass_fds=files,
                env=_environment(),
            )
        self.line = Line(line_end, self.handlers)
        self._reading = asyncio.create_task(self.line.run())
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # its end is noticed
            write_task(self._process.stdin, task)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def num_connections(self) -> int:
        """Return the connections that it has, those on their way included."""
        return self._num_open + self._num_given - self._num_received

    def give(self, connection: socket.socket) -> bool:
        """Give it a connection; False where it cannot take it now."""
        is_given = give(self._connections, connection)
        self._num_given += is_given
        return is_given

    def give_no_more(self) -> None:
        """Tell it that no more connections will come: it ends when its answers have."""
        give_no_more(self._connections)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    async def watch(self, stall_timeout_s: float) -> None:
        """Kill the process once it has served and then answers nothing for so long.

        Returns when it has been killed, or has ended.
        """
        try:
            await until_silent(self._ask, stall_timeout_s)
        except (LineClosedError, CallFailedError):
            return
        logger.error(
            "worker does not answer and is killed worker=%d pid=%d silent_s=%g",
            self.number,
            self.pid,
            stall_timeout_s,
        )
        self.kill()

    async def _ask(self, timeout_s: float) -> None:
        if self.is_serving:
            await self.line.call("alive", timeout_s=timeout_s)

    async def ended(self) -> str:
        """Wait for its end, and return the reason in a few words."""
        try:
            await self._reading
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, _EXIT_S)
        finally:
            self.is_serving = self.is_ready = False
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._reading.cancel()
            self.line.close()
            self._connections.close()
            if self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
        status = self._process.returncode
        if status < 0:
            return f"signal {signal.Signals(-status).name}"
        return f"exit status {status}"

    async def _count(self, counts: tuple[int, int]) -> None:
        self._num_received, self._num_open = counts


def _environment() -> Mapping[str, str]:
    """Return this process's variables; the code is the same, wherever it was imported from."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
