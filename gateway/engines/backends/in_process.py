"""The engine in a thread of this process: for tests, for library use and for `outrider chat`."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable

from outrider.engine.errors import EngineDiedError
from outrider.engine.events import EngineInfo
from outrider.gateway.engines.backends.client import LOADING_REASON
from outrider.gateway.engines.backends.command_client import CommandClient
from outrider.gateway.engines.backends.step_loop import (
    LoadingCallback,
    StepEngine,
    no_progress,
    run_step_loop,
)
from outrider.gateway.engines.backends.streams import SHUT_DOWN_MESSAGE
from outrider.gateway.engines.backends.wire import Command, Reply, Stop

logger = logging.getLogger(__name__)

ENDED_MESSAGE = (
    "The engine failed, and it cannot restart alone because it runs in the gateway's own process. "
    "Restart the gateway."
)


class InProcessEngineClient(CommandClient):
    """An `EngineClient` whose engine steps in a dedicated thread.

    The engine is built and used in that thread only. Commands reach it through a thread-safe queue
    on which it sleeps when idle; the events of one step come back with one wake-up of the loop.
    A step that raises leaves nothing to trust: the client stays down until it is made anew.
    """

    def __init__(
        self,
        build_engine: Callable[[LoadingCallback], StepEngine],
        *,
        on_progress: LoadingCallback = no_progress,
    ) -> None:
        """`build_engine` loads the models, in the engine's thread, when `start` is called."""
        super().__init__()
        self._build_engine = build_engine
        self._on_progress = on_progress
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start_lock = asyncio.Lock()
        self._has_died = False

    async def start(self) -> None:
        """Load the engine. Raises what building it raises; a second call waits for the first."""
        async with self._start_lock:
            if self._info is None:
                await self._start()

    async def _start(self) -> None:
        if self._thread is not None:
            raise EngineDiedError("This engine client is closed; make a new one.")
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="engine", daemon=True
        )
        self._thread.start()
        try:
            self._info = await started
        except BaseException:
            await self.close()
            raise
        self._streams.is_open = True
        self._ask_for_blocks()

    async def close(self) -> None:
        """Stop the engine after the step it is in. In-flight requests end with `Failed`."""
        self._streams.close(SHUT_DOWN_MESSAGE)
        self._info = None
        if self._thread is not None and self._thread.is_alive():
            self._commands.put(Stop())
            # A join here would block the loop, which the engine's thread needs to hand over events.
            await asyncio.to_thread(self._thread.join)

    @property
    def is_ready(self) -> bool:
        """True if the engine's thread serves requests."""
        return self._streams.is_open

    @property
    def not_ready_reason(self) -> str:
        """Message for clients while the engine is not ready."""
        return ENDED_MESSAGE if self._has_died else LOADING_REASON

    def _send(self, command: Command) -> None:
        self._commands.put(command)

    # In the engine's thread.

    def _run(self, started: asyncio.Future[EngineInfo]) -> None:
        try:
            engine = self._build_engine(self._report_progress)
            info = engine.info()
        except BaseException as error:  # noqa: BLE001 - start() raises it
            self._call_in_loop(_set_exception, started, error)
            return
        self._call_in_loop(_set_result, started, info)
        try:
            run_step_loop(engine, _QueueChannel(self._commands, self._send_reply))
        except Exception:
            logger.exception(
                "engine step failed; no further requests are taken, restart the gateway"
            )
            self._call_in_loop(self._note_death)

    def _report_progress(self, stage: str, fraction: float) -> None:
        self._call_in_loop(self._on_progress, stage, fraction)

    def _send_reply(self, reply: Reply) -> None:
        self._call_in_loop(self._handle, reply)

    def _call_in_loop(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop is closed: its owner left without close(), and no reader is left.
            self._commands.put(Stop())

    # In the event loop.

    def _note_death(self) -> None:
        self._has_died = True
        self._streams.died()


class _QueueChannel:
    """`Channel` over a queue in this process; nothing is encoded."""

    def __init__(self, commands: queue.SimpleQueue[Command], send: Callable[[Reply], None]) -> None:
        self._commands = commands
        self.send = send

    def receive(self, *, wait: bool) -> list[Command]:
        received = [self._commands.get()] if wait else []
        while True:
            try:
                received.append(self._commands.get_nowait())
            except queue.Empty:
                return received


def _set_result(future: asyncio.Future[EngineInfo], info: EngineInfo) -> None:
    if not future.done():  # start() may have been cancelled
        future.set_result(info)


def _set_exception(future: asyncio.Future[EngineInfo], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
