"""The engine in its own process: started, watched and restarted from here."""

import asyncio
import logging
import shutil
import subprocess
import time
from pathlib import Path
from typing import Final

import msgspec
import zmq

from outrider.engine.errors import EngineError
from outrider.gateway.engines.backends.engine_worker import STOP_TIMEOUT_S, Worker
from outrider.gateway.engines.backends.fleet_keys import (
    FleetKeys,
    read_fleet_keys,
    write_fleet_keys,
)
from outrider.gateway.engines.backends.replica_link import ReplicaLink
from outrider.gateway.engines.backends.spawning import (
    EngineProcess,
    EngineRecipe,
    end,
    make_scratch_dir,
    send_spec,
    spawn,
    spawn_waiting,
)
from outrider.gateway.engines.backends.step_loop import LoadingCallback, no_progress
from outrider.gateway.engines.backends.supervised_client import (
    MAX_BACKOFF_S,
    MIN_BACKOFF_S,
    ReconnectPolicy,
    SupervisedClient,
)
from outrider.gateway.engines.backends.wire import WorkerSpec

logger = logging.getLogger(__name__)

STABLE_AFTER_S = 60.0
"""An engine that ran this long restarts without delay the next time."""

_DEFAULT_POLICY: Final = ReconnectPolicy()


class ProcessEngineClient(SupervisedClient):
    """An `EngineClient` that spawns its engine and restarts it when it dies.

    Death is noticed at once: the connection is closed. Requests in flight wait for the next engine,
    which goes on with their answers behind what was received (`EngineRequest.resumed_token_ids`).
    After `resume_within_s` they end with `Failed`. A request that two engines died with ends with
    `CrashSuspectError`'s code (gateway/engines/backends/crash_suspects.py). Meanwhile `is_ready` is
    False; new requests wait too while `is_paused`, else they raise `EngineDiedError`. An engine
    that is alive but says nothing for `stall_timeout_s` is killed; it answers between two steps, so
    the limit must exceed the longest step.
    """

    def __init__(
        self,
        recipe: EngineRecipe,
        *,
        first: EngineProcess | None = None,
        on_progress: LoadingCallback = no_progress,
        policy: ReconnectPolicy = _DEFAULT_POLICY,
    ) -> None:
        """`first`: a process that was made by the recipe already; others follow when it dies.

        With an importer in the recipe a process waits in reserve, which has imported all that it
        needs.
        """
        super().__init__(policy)
        self._recipe = recipe
        self._first = first
        self._on_progress = on_progress
        self._keys: FleetKeys | None = None
        self._scratch_dir: Path | None = None
        self._worker: Worker | None = None
        self._reserve: subprocess.Popen[bytes] | None = None

    async def close(self) -> None:
        """Stop the process, wait until it has gone, remove what it left. May be called again."""
        await super().close()
        await self._dispose_of_worker()
        if (reserve := self._take_reserve()) is not None:
            end(reserve)
        if self._scratch_dir is not None:
            shutil.rmtree(self._scratch_dir, ignore_errors=True)

    @property
    def pid(self) -> int | None:
        """The engine's process, None while there is none."""
        return None if self._worker is None else self._worker.pid

    async def _reach_first(self) -> None:
        self._scratch_dir = self._first.scratch_dir if self._first else make_scratch_dir()
        await self._start_worker()

    async def _start_worker(self) -> None:
        """Start a process and wait until it is ready. Raises EngineError where it fails."""
        self._worker = Worker(self._spawn(), self._on_progress)
        endpoint = await self._worker.loaded()
        self._info = (await self._meet(endpoint, self._keys)).info
        self._resume()
        if self._recipe.importer is not None and self._reserve is None:
            self._reserve = spawn_waiting(self._recipe.environment, self._recipe.importer)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        """Return the process that was started before, the one in reserve, or a new one."""
        first, self._first = self._first, None
        if first is not None:
            return first.process
        if (reserve := self._take_reserve()) is not None:
            send_spec(reserve, self._spec())
            return reserve
        return spawn(self._spec(), self._recipe.environment)

    def _spec(self) -> WorkerSpec:
        """Return the next process's parameters; without socket files its line is encrypted TCP."""
        assert self._scratch_dir is not None
        spec = self._recipe.spec(self._scratch_dir)
        if zmq.has("ipc"):
            return spec
        key_file = self._scratch_dir / "line.key"
        if self._keys is None:
            write_fleet_keys(key_file)
            self._keys = read_fleet_keys(key_file)
        return msgspec.structs.replace(spec, endpoint="tcp://127.0.0.1:0", key_file=str(key_file))

    def _take_reserve(self) -> "subprocess.Popen[bytes] | None":
        """Return the process in reserve, if it lives; from then on it is the caller's."""
        reserve, self._reserve = self._reserve, None
        if reserve is not None and reserve.poll() is not None:
            end(reserve)
            return None
        return reserve

    async def _supervise(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            started_s = time.monotonic()
            reason = await self._end_worker(await self._until_lost())
            if time.monotonic() - started_s > STABLE_AFTER_S:
                backoff_s = MIN_BACKOFF_S
            logger.error("engine process ended reason=%s restart_in_s=%.1f", reason, backoff_s)
            while not self._streams.is_open:
                await self._dispose_of_worker()
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                try:
                    await self._start_worker()
                except EngineError as error:
                    logger.error(
                        "engine restart failed reason=%s retry_in_s=%.1f", error, backoff_s
                    )
            logger.info("engine process is ready again pid=%s", self.pid)

    async def _end_worker(self, link_reason: str) -> str:
        """End the process whose link has ended, and return why it did."""
        assert self._worker is not None
        if not await self._worker.wait_exit(STOP_TIMEOUT_S):
            self._worker.kill(link_reason)
        return link_reason if self._worker.has_reported else self._worker.describe_exit()

    async def _dispose_of_worker(self) -> None:
        # Forgotten only afterwards: when this is cancelled half-way, close() finishes it.
        if self._worker is not None:
            await self._worker.stop()
            self._worker = None

    def _note_lost(self) -> None:
        """The engine has died, or will; have its answers wait for the next."""
        self._streams.died(resumes=self._policy.resume_within_s > 0)
        self._give_up_later()

    def _processor_s(self) -> float | None:
        return None if self._worker is None else self._worker.processor_s()

    def _give_up_on(self, link: ReplicaLink, reason: str) -> None:
        if self._worker is not None:
            self._worker.kill(reason)
