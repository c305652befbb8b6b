"""The parent of a gateway's processes: one port, one engine, and workers that are kept up."""

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from prometheus_client import CollectorRegistry

from outrider.engine.errors import EngineDiedError, EngineError
from outrider.engine.events import EngineInfo
from outrider.gateway.engines.backends.process_client import STABLE_AFTER_S
from outrider.gateway.engines.backends.spawning import EngineProcess
from outrider.gateway.engines.backends.step_loop import LoadingCallback, no_progress
from outrider.gateway.engines.backends.supervised_client import MAX_BACKOFF_S, MIN_BACKOFF_S
from outrider.gateway.experiments.experiments import build_experiments
from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.gateway.storage.database import DatabaseError
from outrider.gateway.storage.open import open_database
from outrider.gateway.tenancy.keys.key_parts import key_store
from outrider.gateway.wiring.process import process_client
from outrider.gateway.workers.connections import Dispatcher
from outrider.gateway.workers.line import CallFailedError, Handler, LineClosedError
from outrider.gateway.workers.merging import Families, WorkerMetrics
from outrider.gateway.workers.process import WorkerProcess, WorkerTask
from outrider.gateway.workers.siblings import Change

logger = logging.getLogger(__name__)

_MODULE: Final = "outrider.gateway.wiring.gateway_worker"
_ASK_S: Final = 2.0
_CHANGE_S: Final = 300.0
_CLOSING_S: Final = 60.0
"""Beyond the time for answers: for settling, the ledger and what else a gateway does at its end."""


def prepare_database(settings: Settings) -> None:
    """Bring the database up to date, experiments of the settings too, before workers open it.

    Blocks.

    Raises SettingsError for one that cannot be used, and for limits that no process could count.
    """
    database = open_database(settings)
    if database is None:
        return
    try:
        table = key_store(settings, database).load()
        build_experiments(settings.experiments, database, CollectorRegistry())
    except DatabaseError as error:
        raise SettingsError(error.detail) from None
    finally:
        database.close()
    keys = [key for key in table.keys if key.status(time.time()) == "active"]
    limited = [key.name for key in keys if not key.limits.is_empty]
    limited += [f"team {name}" for name, team in table.teams.items() if not team.limits.is_empty]
    if limited and settings.redis_url is None:
        more = f" and {len(limited) - 3} more" if len(limited) > 3 else ""
        raise SettingsError(
            f"server.workers = {settings.server.workers} (--workers): {', '.join(limited[:3])}"
            f"{more} have limits, which several processes can count only in Redis. Set redis_url "
            "(--set redis_url=redis://HOST:6379/0), delete the limits, or use one worker."
        )


class Crew:
    """Runs the workers, and the engine that they share, from start to end."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        *,
        on_progress: LoadingCallback = no_progress,
        on_ready: Callable[[EngineInfo, str], None] = lambda info, routing: None,
        engine_process: EngineProcess | None = None,
    ) -> None:
        """Store the arguments. `listener` is closed at the end; callbacks run in the event loop.

        `engine_process`: the engine's, started for these settings; None where it runs elsewhere.
        """
        self._settings = settings
        self._on_ready = on_ready
        self._engine = None
        if engine_process is not None:
            self._engine = process_client(settings, on_progress, engine_process)
        self._endpoint = None if engine_process is None else engine_process.spec.endpoint
        self.workers: dict[int, WorkerProcess] = {}
        """The processes that live, by their workers' numbers."""
        self.changes: dict[str, Change] = {}
        """The last change of each subject, for workers that start later."""
        self._keys = itertools.count(1)
        self._metrics = WorkerMetrics()
        self._changing = asyncio.Lock()
        self._claims: dict[bytes, WorkerProcess] = {}  # of idempotency keys
        self._dispatcher = Dispatcher(listener, self._takers)
        self._is_dispatching = False
        self._told: tuple[EngineInfo, str] | None = None
        self._failure: Exception | None = None
        self._progress = asyncio.Event()  # something that `_until_ready` waits for has changed
        self._is_ready = False
        self._num_signals = 0
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._keepers: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Serve until `stop`. Raises SettingsError or EngineError where a worker cannot start."""
        self._task = asyncio.current_task()
        loading = None if self._engine is None else asyncio.create_task(self._engine.start())
        try:
            numbers = range(1, self._settings.server.workers + 1)
            self._keepers = [asyncio.create_task(self._keep(number)) for number in numbers]
            await self._until_ready(loading)
            await asyncio.gather(*self._keepers)  # they return when the port has been closed
        finally:
            self._end_workers()
            for task in (*self._keepers, self._draining):
                if task is not None:
                    task.cancel()
            await asyncio.gather(*self._keepers, return_exceptions=True)
            if loading is not None:
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
            self._dispatcher.close()
            if self._engine is not None:
                await self._engine.close()

    def stop(self) -> None:
        """Finish the running requests and end; called again, end soon; once more, at once."""
        self._num_signals += 1
        if not self._is_ready:
            if self._task is not None:
                self._task.cancel()
        elif self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        elif self._num_signals == 2:
            self._hurry.set()
            for worker in self.workers.values():
                worker.line.notify("end")
        else:
            self._end_workers()

    # ---- from start to end ------------------------------------------------------------------

    async def _until_ready(self, loading: "asyncio.Task[None] | None") -> None:
        """Return when engine and workers are ready. Raises what keeps them from it."""
        if loading is not None:
            loading.add_done_callback(lambda _: self._progress.set())
        while True:
            await self._progress.wait()
            self._progress.clear()
            if loading is not None and loading.done():
                loading.result()
            if self._failure is not None:
                raise self._failure
            if self._told is not None and self._num_ready == self._settings.server.workers:
                break
        self._is_ready = True
        self._on_ready(*self._told)

    async def _keep(self, number: int) -> None:
        """Keep a worker up until the gateway drains."""
        backoff_s, loop = MIN_BACKOFF_S, asyncio.get_running_loop()
        while self._draining is None:
            started_s = loop.time()
            reason = await self._run_once(number)
            if self._draining is not None:
                return
            if not self._is_ready:
                if self._failure is None:
                    self._failure = EngineDiedError(
                        f"Worker {number} ended while it started ({reason}); its log says why."
                    )
                self._progress.set()
                return
            if loop.time() - started_s > STABLE_AFTER_S:
                backoff_s = MIN_BACKOFF_S
            logger.error(
                "worker ended, the others go on worker=%d reason=%s restart_in_s=%.1f",
                number,
                reason,
                backoff_s,
            )
            await self._pause(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _run_once(self, number: int) -> str:
        """Start a worker's process, and return why it ended."""
        try:
            worker = self._start(number)
        except OSError as error:
            return f"it could not be started: {error.strerror}"
        watching = asyncio.create_task(worker.watch(self._settings.server.stall_timeout_s))
        try:
            return await worker.ended()
        finally:
            watching.cancel()
            del self.workers[number]
            self._metrics.ended(worker.key)
            self.forget_claims(worker)
            self._notify_workers()

    def _start(self, number: int) -> WorkerProcess:
        task = WorkerTask(number=number, settings=self._settings, engine=self._endpoint)
        worker = self.workers[number] = WorkerProcess(next(self._keys), _MODULE, task)
        worker.handlers.update(self.handlers(worker))
        for change in self.changes.values():
            worker.line.notify("change", change)
        return worker

    async def _drain(self) -> None:
        """Let the answers end, then the workers; the port is closed after the grace."""
        options = self._settings.server
        logger.info(
            "draining grace_s=%g timeout_s=%g", options.drain_grace_s, options.drain_timeout_s
        )
        for worker in self.workers.values():
            worker.line.notify("drain")
        await self._pause(options.drain_grace_s)
        self._dispatcher.close()
        for worker in list(self.workers.values()):
            if worker.is_serving:
                worker.give_no_more()
            else:
                worker.kill()
        await asyncio.sleep(options.drain_timeout_s + _CLOSING_S)
        logger.error("workers did not end in time and are killed")
        self._end_workers()

    async def _pause(self, seconds: float) -> None:
        """Sleep; not for longer than until a second signal."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    def _end_workers(self) -> None:
        for worker in self.workers.values():
            worker.kill()

    def handlers(self, worker: WorkerProcess) -> dict[str, Handler]:
        """Return the answers to a worker's calls, by name."""
        return {
            "failed": partial(self._note_failure, worker),
            "ready": partial(self._note_ready, worker),
            "serving": partial(self._note_serving, worker),
            "metrics": self._sum_metrics,
            "others": partial(self._ask_others, worker),
            "in_turn": partial(self._change, worker),
            "claim": partial(self._claim, worker),
            "unclaim": partial(self._unclaim, worker),
        }

    # ---- what workers say -------------------------------------------------------------------

    async def _note_failure(self, worker: WorkerProcess, told: tuple[bool, str]) -> None:
        """Note why a worker cannot start: because of the settings (True), or the engine."""
        is_settings, text = told
        if self._is_ready:
            logger.error("worker cannot start worker=%d reason=%s", worker.number, text)
        elif self._failure is None:
            self._failure = SettingsError(text) if is_settings else EngineError(text)

    async def _note_serving(self, worker: WorkerProcess, _: object) -> None:
        worker.is_serving = True
        if not self._is_dispatching:
            self._is_dispatching = True
            self._dispatcher.start()

    async def _note_ready(self, worker: WorkerProcess, told: tuple[EngineInfo, str]) -> None:
        worker.is_ready = True
        self._told = told
        if self._is_ready:
            logger.info("worker is ready again worker=%d pid=%d", worker.number, worker.pid)
            if self._draining is not None:
                worker.line.notify("drain")
        self._notify_workers()
        self._progress.set()

    @property
    def _num_ready(self) -> int:
        return sum(worker.is_ready for worker in self.workers.values())

    def _notify_workers(self) -> None:
        for worker in self.workers.values():
            worker.line.notify("crew", self._num_ready)

    def _takers(self) -> Sequence[WorkerProcess]:
        """Return the workers that may get a connection: those that are ready, if any are."""
        serving = [worker for worker in self.workers.values() if worker.is_serving]
        return [worker for worker in serving if worker.is_ready] or serving

    # ---- what workers ask -------------------------------------------------------------------

    async def _sum_metrics(self, _: object) -> Families:
        """Return all workers' metrics; of one that does not answer in time, what it said last."""

        async def add_metrics(worker: WorkerProcess) -> None:
            with suppress(LineClosedError, CallFailedError, TimeoutError):
                families = await worker.line.call("snapshot", timeout_s=_ASK_S)
                if self.workers.get(worker.number) is worker:
                    self._metrics.add(worker.key, families)

        await asyncio.gather(
            *(add_metrics(each) for each in self.workers.values() if each.is_serving)
        )
        return self._metrics.all()

    async def _ask_others(self, asker: WorkerProcess, call: tuple[str, Any]) -> list[Any]:
        """Return the answers of the other workers that give one in time."""
        name, value = call
        others = [each for each in self.workers.values() if each is not asker and each.is_serving]
        answers = await asyncio.gather(
            *(each.line.call(name, value, timeout_s=_ASK_S) for each in others),
            return_exceptions=True,
        )
        return [each for each in answers if not isinstance(each, BaseException)]

    async def _change(self, maker: WorkerProcess, change: Change) -> bool:
        """Have a change made by its maker, then by the others; False where the maker cannot."""
        async with self._changing:
            if not await maker.line.call("change", change, timeout_s=_CHANGE_S):
                return False
            repeated = replace(change, number=0)
            self.changes[change.subject] = repeated
            calls = []
            for worker in self.workers.values():
                if worker.is_ready and worker is not maker:
                    calls.append(worker.line.call("change", repeated, timeout_s=_CHANGE_S))
                elif worker is not maker:
                    worker.line.notify("change", repeated)
            await asyncio.gather(*calls, return_exceptions=True)
            return True

    async def _claim(self, asker: WorkerProcess, asked: tuple[bytes, bytes]) -> Any:
        """Return another worker's answer to an idempotency key; None: the asker is to answer."""
        name, _ = asked
        while (owner := self._claims.get(name)) not in (None, asker):
            found = None
            with suppress(LineClosedError, CallFailedError):
                found = await owner.line.call("kept_answer", asked)
            if found is not None:
                return found
            if self._claims.get(name) is owner:  # it has none, or has died
                del self._claims[name]
        self._claims[name] = asker
        return None

    def forget_claims(self, owner: WorkerProcess) -> None:
        """Leave a worker's idempotency keys to the others."""
        self._claims = {
            name: claimant for name, claimant in self._claims.items() if claimant is not owner
        }

    async def _unclaim(self, owner: WorkerProcess, name: bytes) -> None:
        if self._claims.get(name) is owner:
            del self._claims[name]
