"""The engine in its own process: started, watched and restarted from here."""

import asyncio
import logging
import shutil
import subprocess
import time
from pathlib import Path

import zmq.asyncio

from outrider.engine.errors import EngineDiedError, EngineError
from outrider.gateway.engines.backends.spawning import (
    EngineProcess,
    EngineRecipe,
    end,
    make_scratch_dir,
    spawn_untold,
)
from outrider.gateway.engines.backends.step_loop import LoadingCallback, no_progress
from outrider.gateway.engines.backends.streams import SHUT_DOWN_MESSAGE
from outrider.gateway.engines.backends.watched_client import (
    MAX_BACKOFF_S,
    MIN_BACKOFF_S,
    Patience,
    WatchedClient,
)
from outrider.gateway.engines.backends.wire import (
    AdapterReply,
    BlocksChanged,
    BlocksReset,
    Command,
    Events,
    Loading,
    Refused,
    Reply,
    StatsReply,
)
from outrider.gateway.engines.backends.worker import Worker

log = logging.getLogger(__name__)

STABLE_AFTER_S = 60.0
"""An engine that ran this long restarts without delay the next time."""


class ProcessEngineClient(WatchedClient):
    """An `EngineClient` that spawns its engine and restarts it when it dies.

    Death is noticed at once (a pipe closes). Requests in flight wait for the next engine, which
    goes on with their answers behind what was received (`EngineRequest.resumed_token_ids`); those
    that wait for `resume_within_s` end with `Failed`, and so do, with `CrashSuspectError`'s code,
    those that two engines died with (gateway/engines/backends/crash_suspects.py). Meanwhile
    `is_ready` is False; new requests wait too while `is_paused`, else they raise `EngineDiedError`.
    An engine that is alive but says nothing for `stall_timeout_s` is killed; it answers between two
    steps, so the limit must exceed the longest step.
    """

    def __init__(
        self,
        recipe: EngineRecipe,
        *,
        first: EngineProcess | None = None,
        on_progress: LoadingCallback = no_progress,
        stall_timeout_s: float = 120.0,
        unready_after_s: float = 10.0,
        resume_within_s: float = 60.0,
        max_waiting: int = 512,
    ) -> None:
        """`first`: a process that was made by the recipe already; others follow when it dies.

        An engine that was not heard for `unready_after_s` takes no new requests until it is heard
        again. `resume_within_s` 0: requests in flight at a death end with `Failed` at once.
        `max_waiting`: so many requests may wait for the next engine, new ones included. With an
        importer in the recipe a process waits in reserve, which has imported all that it needs.
        """
        patience = Patience(
            stall_timeout_s=stall_timeout_s,
            unready_after_s=unready_after_s,
            resume_within_s=resume_within_s,
            max_waiting=max_waiting,
        )
        super().__init__(patience)
        self._recipe = recipe
        self._first = first
        self._on_progress = on_progress
        self._context: zmq.asyncio.Context | None = None
        self._scratch_dir: Path | None = None
        self._worker: Worker | None = None
        self._reserve: subprocess.Popen[bytes] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._num_starts = 0
        self._start_lock = asyncio.Lock()
        self._start_error: EngineError | None = None

    async def start(self) -> None:
        """Start the engine's process and wait until its models are loaded.

        Raises the EngineError with which loading failed; a first start is not repeated. A second
        call waits for the same start, and fails as it did.
        """
        async with self._start_lock:
            if self._start_error is not None:
                raise self._start_error
            if self._supervisor is None:
                await self._start()

    async def _start(self) -> None:
        if self._context is not None:
            raise EngineDiedError("This engine client is closed; make a new one.")
        self._context = zmq.asyncio.Context()
        self._scratch_dir = self._first.scratch_dir if self._first else make_scratch_dir()
        try:
            await self._start_worker()
        except BaseException as error:
            self._start_error = error if isinstance(error, EngineError) else None
            await self.close()
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def close(self) -> None:
        """Stop the process, wait until it has gone, remove what it left. May be called again."""
        self._streams.close(SHUT_DOWN_MESSAGE)
        self._cancel_giving_up()
        self._info = None
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        await self._dispose_of_worker()
        if (reserve := self._take_reserve()) is not None:
            end(reserve)
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._scratch_dir is not None:
            shutil.rmtree(self._scratch_dir, ignore_errors=True)

    @property
    def pid(self) -> int | None:
        """The engine's process, None while there is none."""
        return None if self._worker is None else self._worker.pid

    def _send(self, command: Command) -> None:
        # A dead or loading engine has nothing in flight that a command could be about.
        if self._worker is not None and self._streams.is_open:
            self._worker.send(command)

    async def _start_worker(self) -> None:
        """One process, from start to ready. Raises EngineError when it does not get there."""
        assert self._context is not None
        assert self._scratch_dir is not None
        self._num_starts += 1
        first, self._first = self._first, None
        # A socket of its own for each: nothing of a dead one's can reach the next.
        spec = self._recipe.spec(self._scratch_dir, f"engine-{self._num_starts}")
        self._worker = Worker(
            self._context,
            spec=first.spec if first else spec,
            environment=self._recipe.environment,
            process=first.process if first else None,
            reserve=None if first else self._take_reserve(),
            on_reply=self._handle,
            on_exit=self._note_death,
        )
        self._info = await self._worker.loaded()
        self._resume()
        if self._recipe.importer is not None and self._reserve is None:
            self._reserve = spawn_untold(self._recipe.environment, self._recipe.importer)

    def _take_reserve(self) -> "subprocess.Popen[bytes] | None":
        """Return the process in reserve, if it lives; from then on it is the caller's."""
        reserve, self._reserve = self._reserve, None
        if reserve is not None and reserve.poll() is not None:
            end(reserve)
            return None
        return reserve

    async def _supervise(self) -> None:
        """Wait for the process's end and start the next, for as long as the client is open."""
        backoff_s = MIN_BACKOFF_S
        while True:
            started_s = time.monotonic()
            assert self._worker is not None
            await self._watch(self._worker)
            if time.monotonic() - started_s > STABLE_AFTER_S:
                backoff_s = MIN_BACKOFF_S
            log.error("engine process ended reason=%s restart_in_s=%.1f", self._why(), backoff_s)
            while not self._streams.is_open:
                await self._dispose_of_worker()
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                try:
                    await self._start_worker()
                except EngineError as error:
                    log.error("engine restart failed reason=%s retry_in_s=%.1f", error, backoff_s)
            log.info("engine process is ready again pid=%s", self.pid)

    def _why(self) -> str:
        return "unknown" if self._worker is None else self._worker.describe_exit()

    async def _dispose_of_worker(self) -> None:
        # Forgotten only afterwards: when this is cancelled half-way, close() finishes it.
        if self._worker is not None:
            await self._worker.stop()
            self._worker = None

    def _handle(self, reply: Reply) -> None:
        match reply:
            case Events() | Refused() | StatsReply() | AdapterReply():
                self._streams.receive(reply)
            case BlocksChanged() | BlocksReset():
                self._note_blocks(reply)
            case Loading(stage, fraction):
                self._on_progress(stage, fraction)
