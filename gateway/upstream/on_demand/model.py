"""A model that is loaded when a request needs it, and put out when another needs its memory."""

import asyncio
import contextlib
import contextvars
import logging
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from outrider.gateway.contract.errors.tree import ConflictError, UnavailableError
from outrider.gateway.contract.schema.kinds import ModelState
from outrider.gateway.telemetry.log_context import log_context
from outrider.gateway.upstream.on_demand.process import LoadError, ModelProcess, ProcessRecipe
from outrider.gateway.upstream.replicas import ReplicaSet

if TYPE_CHECKING:
    from outrider.gateway.upstream.on_demand.pool import ModelPool

logger = logging.getLogger(__name__)

RETRY_S: Final = 10.0
_MAX_RETRY_S: Final = 600.0
_PROVEN_S: Final = 60.0
"""A process that has served for so long has not failed to load."""


class LackOfRoom(LoadError):
    """There is no memory for a model, which may change at any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """What a model takes."""

    recipe: ProcessRecipe
    memory_bytes: int
    keep_alive_s: float | None
    """None: until another model needs its memory."""


@dataclass(slots=True)
class ModelCounts:
    """What has happened to a model since the gateway's start."""

    num_loads: int = 0
    load_s: float = 0.0
    """Of all loads together."""
    num_failures: int = 0
    num_refused: int = 0
    """Requests that got no answer since the model was not loaded."""
    put_out: Counter[str] = field(default_factory=Counter)
    """By reason: memory, keep_alive, unload, shutdown."""


@dataclass(slots=True)
class _Failure:
    """The last attempt's."""

    error: LoadError | None = None
    num_in_a_row: int = 0
    until_s: float = -math.inf
    """No other attempt is made before."""


class OnDemandModel:
    """One model, and its process while there is one. In one event loop."""

    def __init__(
        self, name: str, needs: ModelNeeds, replicas: ReplicaSet, pool: "ModelPool"
    ) -> None:
        """`replicas`: its tier's, empty while it is not loaded."""
        self.name = name
        self.needs = needs
        self.state: ModelState = "unloaded"
        self.last_used_s = pool.clock()
        self.num_waiting = 0
        self.load_s: float | None = None
        """Seconds that the last loading took; None before."""
        self.holds_memory = False
        """Its memory is taken, or kept free for it."""
        self.counts = ModelCounts()
        self._replicas = replicas
        self._pool = pool
        self._failure = _Failure()
        self._life: asyncio.Task[None] | None = None
        """From the beginning of its loading to the end of its process."""
        self._settled: asyncio.Future[None] | None = None
        """Done once it is loaded, or cannot be."""

    @property
    def is_loaded(self) -> bool:
        """Return whether its process serves."""
        return self.state == "loaded"

    @property
    def num_in_flight(self) -> int:
        """Return the requests that it answers."""
        return sum(replica.in_flight for replica in self._replicas.replicas)

    @property
    def is_busy(self) -> bool:
        """Return whether a request needs it. Such a model is not put out."""
        return bool(self.num_waiting or self.num_in_flight)

    @property
    def idle_s(self) -> float | None:
        """Return the seconds since its last request; None where it is not loaded."""
        return max(0.0, self._pool.clock() - self.last_used_s) if self.is_loaded else None

    @property
    def reason(self) -> str:
        """Return, for operators, why it is not loaded where it was to be; else empty."""
        error = self._failure.error
        return "" if self.is_loaded or error is None else error.detail

    async def until_loaded(self, end_s: float = math.inf) -> None:
        """Return once it is loaded, until `end_s` on the clock at most. Raises UnavailableError.

        Pick its replica without an await after this: until then it may not be put out.
        """
        self.last_used_s = self._pool.clock()
        if self.is_loaded:
            return
        context = log_context()
        tenant = "" if context is None else context.tenant
        try:
            self._require_hope(tenant)
            with self._pool.place(tenant):
                await self._wait(end_s)
        except UnavailableError:
            self.counts.num_refused += 1
            raise

    async def load(self) -> None:
        """Load it now, also where that has just failed. Raises UnavailableError."""
        self._failure.until_s = -math.inf
        await self.until_loaded()

    async def unload(self) -> None:
        """Put it out. Raises ConflictError where requests need it."""
        if self.is_busy:
            raise ConflictError(
                f"The model {self.name} has {self.num_in_flight} requests under way and "
                f"{self.num_waiting} that wait for it; it is not unloaded."
            )
        await self.put_out("unload")

    async def put_out(self, why: str, *, whom_for: str = "-") -> None:
        """End its process or its loading, and return when its memory is free."""
        if self._life is None or self._life.done():
            return
        if self.state != "unloading":
            logger.info("model is unloaded tier=%s why=%s for=%s", self.name, why, whom_for)
            self.counts.put_out[why] += self.is_loaded
            self._stop_serving()
            self._life.cancel()
        await asyncio.wait({self._life})

    def _require_hope(self, tenant: str) -> None:
        """Raise UnavailableError where waiting for it would be in vain."""
        if self._failure.until_s > self._pool.clock():
            raise self._refusal()
        if not self._pool.has_place(tenant):
            raise UnavailableError(
                f"{self._pool.waiting.total()} requests wait for models (on_demand.max_waiting). "
                f"Try again in {RETRY_S:g} s.",
                retry_after_s=RETRY_S,
            )

    async def _wait(self, end_s: float) -> None:
        """Have it loaded, and wait for that. Raises UnavailableError."""
        clock = self._pool.clock
        wait_s = min(self._pool.settings.start_within_s, end_s - clock())
        self.num_waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(wait_s, 0.0)):
                    await self._settle()
        finally:
            self.num_waiting -= 1
        self.last_used_s = clock()
        if self.is_loaded:
            return
        if self.state == "loading" and self.holds_memory:
            raise UnavailableError(
                f"The {self.name} tier has not loaded its model within {wait_s:.3g} s; it goes on "
                f"loading. Try again in {RETRY_S:g} s.",
                retry_after_s=RETRY_S,
            )
        if self.state == "loading":
            self._failure.error = self._pool.lack_of_room(self)
        raise self._refusal()

    def _refusal(self) -> UnavailableError:
        wait_s = self._failure.until_s - self._pool.clock()
        wait_s = max(wait_s, 1.0) if wait_s > 0 else RETRY_S
        reason = str(self._failure.error or "it was unloaded").rstrip(".")
        return UnavailableError(
            f"The {self.name} tier cannot load its model: {reason}. "
            f"Try again in {math.ceil(wait_s)} s.",
            retry_after_s=wait_s,
        )

    async def _settle(self) -> None:
        """Return when it is loaded, or cannot be; one loading serves all who wait."""
        if self._life is not None and self.state == "unloading":
            await asyncio.wait({self._life})
        if self._life is None or self._life.done():
            self.state = "loading"
            self._settled = asyncio.get_running_loop().create_future()
            # It is no request's own: its log lines name none.
            self._life = asyncio.create_task(
                self._live(self._settled), name=f"model {self.name}", context=contextvars.Context()
            )
            self._life.add_done_callback(self._ended)
        if self._settled is not None:
            await asyncio.wait({self._settled})

    async def _live(self, settled: asyncio.Future[None]) -> None:
        """Have a process serve it, until that ends or this is cancelled; then none is left."""
        process = None
        try:
            await self._pool.make_room(self)
            started_s = self._pool.clock()
            process = await self._pool.start_process(self.needs.recipe)
            url = await self._address(process)
            loaded_s = self._pool.clock()
            self._serve_at(url, loaded_s - started_s)
            settled.set_result(None)
            await self._until_it_ends(process, loaded_s)
        except LackOfRoom as error:
            self._failure.error = error
        except LoadError as error:
            self._note_failure(error)
        finally:
            self._stop_serving()
            if process is not None:
                await process.end()

    def _ended(self, _: "asyncio.Task[None]") -> None:
        """Note the end of its life, also of one that was cancelled before it began."""
        self.holds_memory = False
        self.state = "failed" if self._failure.until_s > self._pool.clock() else "unloaded"
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)

    async def _address(self, process: ModelProcess) -> str:
        """Return where its process serves. Raises LoadError."""
        within_s = self._pool.settings.load_within_s
        try:
            async with asyncio.timeout(within_s):
                return await process.serving()
        except TimeoutError as error:
            raise LoadError(f"it took longer than {within_s:g} s") from error

    def _serve_at(self, url: str, load_s: float) -> None:
        self.load_s = load_s
        self.counts.num_loads += 1
        self.counts.load_s += load_s
        self._replicas.replace((url,), name=self.name)
        self.state, self._failure.error = "loaded", None
        logger.info("model is loaded tier=%s seconds=%.1f", self.name, load_s)

    def _stop_serving(self) -> None:
        self._replicas.replace(())
        self.state = "unloading"

    async def _until_it_ends(self, process: ModelProcess, loaded_s: float) -> None:
        """Return when its process has ended by itself. Raises LoadError where that was soon."""
        try:
            status = await process.wait()
        except asyncio.CancelledError:  # it served, until it was put out
            self._failure = _Failure()
            raise
        if self._pool.clock() - loaded_s < _PROVEN_S:
            raise LoadError(f"its process ended soon (status {status}); see the log")
        logger.error("a model's process has ended tier=%s status=%d", self.name, status)
        self._failure = _Failure()

    def _note_failure(self, error: LoadError) -> None:
        """Keep other attempts away for a while, longer each time."""
        failure = self._failure
        failure.num_in_a_row += 1
        wait_s = min(RETRY_S * 2 ** min(failure.num_in_a_row - 1, 10), _MAX_RETRY_S)
        failure.error, failure.until_s = error, self._pool.clock() + wait_s
        self.counts.num_failures += 1
        logger.error(
            "model cannot be loaded tier=%s retry_s=%g reason=%s", self.name, wait_s, error.detail
        )
