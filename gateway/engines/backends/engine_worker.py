"""One engine process beside its line: what it reports while it loads, and its end."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from pathlib import Path

from outrider.engine.errors import EngineDiedError
from outrider.gateway.engines.backends.spawning import end
from outrider.gateway.engines.backends.step_loop import EXIT_REPORTED, LoadingCallback
from outrider.gateway.engines.backends.wire import (
    LoadFailed,
    Loading,
    Ready,
    Report,
    decode_report,
    unpack_error,
)

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
"""Time for a process to finish its step when it is told to stop before it is killed."""

_PIPE_BYTES = 65_536


class Worker:
    """Follows a process that was told what it is. `stop` must be called in any case: it reaps."""

    def __init__(self, process: "subprocess.Popen[bytes]", on_progress: LoadingCallback) -> None:
        """`on_progress` is called while the process loads its models."""
        assert process.stdout is not None
        self._process = process
        self._on_progress = on_progress
        self._pipe = process.stdout.fileno()
        self._unread = b""
        self._loaded: Ready | LoadFailed | None = None
        self._has_loaded = asyncio.Event()  # or ended before
        self._exited = asyncio.Event()
        self._kill_reason: str | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pipe, self._read)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    async def loaded(self) -> str:
        """Wait until the models are loaded, and return where the process listens.

        Raises an EngineError when they cannot be loaded.
        """
        await self._has_loaded.wait()
        match self._loaded:
            case Ready(endpoint):
                return endpoint
            case LoadFailed(error):
                raise unpack_error(error)
        await self._reap()
        raise EngineDiedError(
            f"The engine's process ended while it loaded the models ({self.describe_exit()})."
        )

    def processor_s(self) -> float | None:
        """Return the processor time of the process so far; None where the system does not say."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return None
        user, system = text.rpartition(")")[2].split()[11:13]  # behind the name, see proc(5)
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    async def wait_exit(self, timeout_s: float) -> bool:
        """Wait for the process's end, at most `timeout_s`. Whether it has ended."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._exited.wait()
        except TimeoutError:
            return False
        await self._reap()
        return True

    @property
    def has_reported(self) -> bool:
        """True if it has ended after it said why, on the line or in a report."""
        return self._process.returncode == EXIT_REPORTED

    def describe_exit(self) -> str:
        """Return why the process ended, in a few words."""
        if self._kill_reason is not None:
            return self._kill_reason
        status = self._process.poll()
        if status is None:
            return "still running"
        if status >= 0:
            return f"exit status {status}"
        hint = "; out of memory?" if -status == signal.SIGKILL else ""
        return f"signal {signal.Signals(-status).name}{hint}"

    def kill(self, reason: str) -> None:
        """End the process at once; `describe_exit` will give the reason."""
        if self._process.poll() is None:
            self._kill_reason = reason
            self._process.kill()

    async def stop(self) -> None:
        """End the process, orderly if it lets us, and release everything. May be called again."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        if isinstance(self._loaded, Ready) and not self._exited.is_set():
            with contextlib.suppress(BrokenPipeError):
                os.write(self._process.stdin.fileno(), b"\n")
            await self.wait_exit(STOP_TIMEOUT_S)
        self.kill("it did not stop when told to")
        # Reaped before its standard input is closed: it must not take the closing for our death
        # and remove the scratch folder.
        await self._reap()
        self._loop.remove_reader(self._pipe)
        end(self._process)

    def _read(self) -> None:
        """Take what the process reports; the pipe closes when it is dead or about to be."""
        chunk = os.read(self._pipe, _PIPE_BYTES)
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        try:
            for line in lines:
                self._take(decode_report(line))
        except Exception:
            logger.exception("report of the engine process could not be handled")
            self.kill("its report could not be handled")
        if not chunk:
            self._loop.remove_reader(self._pipe)
            self._exited.set()
            self._has_loaded.set()

    def _take(self, report: Report) -> None:
        if self._kill_reason is not None:
            return  # sent before the end: a process that is being killed has not loaded
        match report:
            case Loading(stage, fraction):
                self._on_progress(stage, fraction)
            case Ready() | LoadFailed():
                self._loaded = report
                self._has_loaded.set()

    async def _reap(self) -> None:
        """Wait for the exit status of a process that is ending."""
        await asyncio.to_thread(self._process.wait)
