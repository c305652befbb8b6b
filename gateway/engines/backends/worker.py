"""One engine process and the socket to it, from its start to its end."""

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from outrider.engine.errors import EngineDiedError, EngineError
from outrider.engine.events import EngineInfo
from outrider.gateway.engines.backends.spawning import spawn, tell
from outrider.gateway.engines.backends.step_loop import EXIT_REPORTED
from outrider.gateway.engines.backends.wire import (
    Command,
    Crashed,
    LoadFailed,
    Ping,
    Ready,
    Reply,
    Stop,
    WorkerSpec,
    decode_reply,
    encode,
    unpack_error,
)

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
"""Time for a process to finish its step after `Stop` before it is killed."""

_REPORT_TIMEOUT_S = 2.0  # a report is on the socket already when the exit status says so


class Worker:
    """Started by the constructor. `stop` must be called in any case: it reaps and closes."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        spec: WorkerSpec,
        environment: Mapping[str, str | None],
        process: "subprocess.Popen[bytes] | None" = None,
        reserve: "subprocess.Popen[bytes] | None" = None,
        on_reply: Callable[[Reply], None],
        on_exit: Callable[[], None],
    ) -> None:
        """Spawn the process, or take over one that was started with this `spec`, or the `reserve`.

        `on_reply` sees every reply; `on_exit` is called once, at the process's end.
        """
        self._on_reply = on_reply
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._report: asyncio.Future[EngineError] = self._loop.create_future()
        self._exited = asyncio.Event()
        self._was_heard = False
        self._kill_reason: str | None = None
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0  # see engine_process
        spec = self._bind(spec)
        if reserve is not None:
            tell(reserve, spec)
        self._process = process or reserve or spawn(spec, environment)
        assert self._process.stdout is not None
        self._exit_pipe = self._process.stdout.fileno()
        self._loop.add_reader(self._exit_pipe, self._notice_exit)
        self._reader = asyncio.create_task(self._read(), name="engine-reader")

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    async def loaded(self) -> EngineInfo:
        """Wait until the models are loaded. Raises an EngineError when that fails."""
        exited = asyncio.ensure_future(self._exited.wait())
        try:
            await asyncio.wait((self._loaded, exited), return_when=asyncio.FIRST_COMPLETED)
        finally:
            exited.cancel()
        if self._loaded.done():
            return self._loaded.result()
        error = await self._reported_error()
        raise error or EngineDiedError(
            f"The engine's process ended while it loaded the models ({self.describe_exit()})."
        )

    def send(self, command: Command) -> None:
        """Pass a command on; never blocks."""
        self._socket.send(encode(command))

    def ping(self) -> None:
        """Ask for a sign of life."""
        self.send(Ping())

    def was_heard(self) -> bool:
        """Return whether a message arrived since the last call."""
        was_heard, self._was_heard = self._was_heard, False
        return was_heard

    def processor_s(self) -> float | None:
        """Return the processor time of the process so far; None where the system does not say."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return None
        user, system = text.rpartition(")")[2].split()[11:13]  # behind the name, see proc(5)
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    async def wait_exit(self, timeout_s: float | None) -> bool:
        """Wait for the process's end, at most `timeout_s`. Whether it has ended."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._exited.wait()
        except TimeoutError:
            return False
        await self._reap()
        return True

    def describe_exit(self) -> str:
        """Return why the process ended, in a few words."""
        if self._report.done():
            return str(self._report.result())
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
        self._kill_reason = reason
        self._process.kill()

    async def stop(self) -> None:
        """End the process, orderly if it lets us, and release everything. May be called again."""
        if self._socket.closed:
            return
        if not self._exited.is_set():
            if self._loaded.done():
                self.send(Stop())
                await self.wait_exit(STOP_TIMEOUT_S)
            self.kill("it did not stop when told to")
        # Reaped before its standard input is closed: it must not take the closing for our death
        # and remove the scratch folder.
        await self._reap()
        self._loop.remove_reader(self._exit_pipe)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close()

    def _bind(self, spec: WorkerSpec) -> WorkerSpec:
        """Open our end; where there are no private socket files, encrypted loopback TCP."""
        if zmq.has("ipc"):
            self._socket.bind(spec.endpoint)
            return spec
        server_key, server_secret = zmq.curve_keypair()
        public, secret = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.curve_secretkey = server_secret
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        # Connecting requires the server's key, which only this process has.
        return msgspec.structs.replace(
            spec,
            endpoint=f"tcp://127.0.0.1:{port}",
            server_key=server_key.decode(),
            client_key=(public.decode(), secret.decode()),
        )

    async def _read(self) -> None:
        try:
            while True:
                reply = decode_reply(await self._socket.recv())
                self._was_heard = True
                match reply:
                    case Ready(info):
                        self._loaded.set_result(info)
                    case LoadFailed(error) | Crashed(error):
                        self._report.set_result(unpack_error(error))
                    case _:
                        self._on_reply(reply)
                # recv() does not suspend while messages are queued; the streams want a turn too.
                await asyncio.sleep(0)
        except Exception:
            # No reader would be left: better a restart than streams that never end.
            log.exception("reply of the engine process could not be handled")
            self.kill("its reply could not be handled")

    def _notice_exit(self) -> None:
        """The pipe closed: the process is dead or about to be."""
        self._loop.remove_reader(self._exit_pipe)
        self._exited.set()
        self._on_exit()

    async def _reap(self) -> int:
        """Wait for the exit status of a process that is ending."""
        return await asyncio.to_thread(self._process.wait)

    async def _reported_error(self) -> EngineError | None:
        """Return the error that the process reported before it ended; None if it reported none."""
        if await self._reap() != EXIT_REPORTED:
            return None
        try:
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                return await asyncio.shield(self._report)
        except TimeoutError:
            return None
