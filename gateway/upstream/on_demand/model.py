"""A model that is loaded when a request needs it, and put out when another needs its memory."""

import asyncio
import contextvars
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from outrider.gateway.contract.errors.tree import ConflictError, UnavailableError
from outrider.gateway.contract.schema.kinds import ModelState
from outrider.gateway.settings.on_demand import OnDemandPoolSettings
from outrider.gateway.upstream.on_demand.process import LoadError, ModelProcess, ProcessRecipe
from outrider.gateway.upstream.replicas import ReplicaSet

logger = logging.getLogger(__name__)


RETRY_S: Final = 10.0
_MAX_RETRY_S: Final = 600.0
_PROVEN_S: Final = 60.0
"""A process that has served for so long has not failed to load."""


class LackOfRoom(Exception):
    """There is no memory for a model. The message names what holds it."""


class ServingProcess(Protocol):
    """A process that was started; see `ModelProcess`."""

    async def serving(self) -> str:
        """Return its address once the model is loaded. Raises LoadError."""

    async def wait(self) -> int:
        """Return its status once it has ended."""

    async def end(self) -> None:
        """End it and return when its memory is free."""


StartProcess = Callable[[ProcessRecipe], Awaitable[ServingProcess]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """What a model takes."""

    recipe: ProcessRecipe
    memory_bytes: int
    keep_alive_s: float | None
    """None: until another model needs its memory."""
    preload: bool = False


class Host(Protocol):
    """What a model asks of the pool that it is in."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for any model."""

    async def make_room(self, model: "OnDemandModel") -> None:
        """Return when the model's memory is kept free for it.

        Raises LackOfRoom once nobody waits for the model, or where waiting is in vain.
        """

    def lack_of_room(self, model: "OnDemandModel") -> str:
        """Return what holds the memory that the model needs."""


@dataclass(slots=True)
class _Failure:
    """The last attempt's."""

    reason: str = ""
    detail: str = ""
    """The same for operators."""
    num_in_a_row: int = 0
    until_s: float = field(default=-math.inf)
    """No other attempt is made before."""


class OnDemandModel:
    """One model's process, from the first request that names it to its end. In one event loop."""

    def __init__(
        self,
        name: str,
        needs: ModelNeeds,
        replicas: ReplicaSet,
        host: Host,
        *,
        patience: OnDemandPoolSettings,
        clock: Callable[[], float],
        start: StartProcess = ModelProcess.start,
    ) -> None:
        """`replicas`: its tier's, empty while it is not loaded."""
        self.name = name
        self.needs = needs
        self.state: ModelState = "unloaded"
        self.last_used_s = clock()
        self.num_waiting = 0
        self.load_s: float | None = None
        """Seconds that the last loading took; None before."""
        self.holds_memory = False
        """Its memory is taken, or kept free for it."""
        self._replicas = replicas
        self._host = host
        self._patience = patience
        self._clock = clock
        self._start = start
        self._process: ServingProcess | None = None
        self._loading: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._failure = _Failure()
        self._loaded_s = 0.0

    @property
    def is_loaded(self) -> bool:
        """Return whether its process serves."""
        return self._process is not None

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
        return max(0.0, self._clock() - self.last_used_s) if self.is_loaded else None

    @property
    def reason(self) -> str:
        """Return why it is not loaded, where it was to be; else empty."""
        failure = self._failure
        return "" if self.is_loaded else failure.detail or failure.reason

    async def until_loaded(self, end_s: float = math.inf) -> None:
        """Return once it is loaded, until `end_s` on the clock at most. Raises UnavailableError.

        Pick its replica without an await after this: until then it may not be put out.
        """
        self.last_used_s = self._clock()
        if self.is_loaded:
            return
        self._require_hope()
        loading = self._load_once()
        wait_s = min(self._patience.start_within_s, end_s - self._clock())
        self.num_waiting += 1
        try:
            await asyncio.wait({loading}, timeout=max(wait_s, 0.0))
        finally:
            self.num_waiting -= 1
        self.last_used_s = self._clock()
        if self.is_loaded:
            return
        if loading.done():
            raise self._refusal()
        if not self.holds_memory:
            self._failure.reason = self._host.lack_of_room(self)
            raise self._refusal()
        raise UnavailableError(
            f"The model {self.name} has not been loaded within {wait_s:.3g} s; it goes on "
            f"loading. Try again in {RETRY_S:g} s.",
            retry_after_s=RETRY_S,
        )

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
        if self._loading is not None and not self._loading.done():
            self._loading.cancel()
            await asyncio.wait({self._loading})
        await self.put_out("unload")

    async def put_out(self, why: str) -> None:
        """End its process, and return when its memory is free."""
        if self._process is not None:
            logger.info("model is unloaded tier=%s why=%s", self.name, why)
            process, self._process = self._process, None
            self.state = "unloading"
            self._replicas.replace(())
            self._ending = asyncio.create_task(self._end(process), name=f"unload {self.name}")
        if self._ending is not None:
            await asyncio.wait({self._ending})

    async def close(self) -> None:
        """End its process, and what works for it."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait({self._loading})
        await self.put_out("shutdown")
        if self._watching is not None:
            await asyncio.wait({self._watching})

    def _require_hope(self) -> None:
        """Raise UnavailableError where waiting for it would be in vain."""
        if self._failure.until_s > self._clock():
            raise self._refusal()
        if self._host.num_waiting >= self._patience.max_waiting:
            raise UnavailableError(
                f"{self._host.num_waiting} requests wait for models (on_demand.max_waiting). "
                f"Try again in {RETRY_S:g} s.",
                retry_after_s=RETRY_S,
            )

    def _refusal(self) -> UnavailableError:
        wait_s = self._failure.until_s - self._clock()
        wait_s = max(wait_s, 1.0) if wait_s > 0 else RETRY_S
        return UnavailableError(
            f"The model {self.name} cannot be loaded: {self._failure.reason.rstrip('.')}. "
            f"Try again in {math.ceil(wait_s)} s.",
            retry_after_s=wait_s,
        )

    def _load_once(self) -> asyncio.Task[None]:
        """Return the task that loads it, the one that runs if one does.

        It is no request's own: its log lines name none.
        """
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(
                self._load(), name=f"load {self.name}", context=contextvars.Context()
            )
        return self._loading

    async def _load(self) -> None:
        """Load it. Raises nothing: the state and the reason tell how it went."""
        if self._ending is not None:
            await asyncio.wait({self._ending})
        self.state = "loading"
        try:
            await self._host.make_room(self)
            await self._start_process()
        except LackOfRoom as error:  # which may change at any time
            self._failure.reason, self._failure.detail = str(error), ""
            self.state = "unloaded"
        except LoadError as error:
            self._note_failure(error)
        except asyncio.CancelledError:
            self._failure.reason, self._failure.detail = "it was unloaded", ""
            self.state = "unloaded"
            raise
        finally:
            self.holds_memory = self.is_loaded

    async def _start_process(self) -> None:
        """Have a process serve the model. Raises LoadError; then none is left."""
        started_s = self._clock()
        within_s = self._patience.load_within_s
        process = None
        try:
            async with asyncio.timeout(within_s):
                process = await self._start(self.needs.recipe)
                url = await process.serving()
        except BaseException as error:
            if process is not None:
                await process.end()
            if isinstance(error, TimeoutError):
                raise LoadError(f"it took longer than {within_s:g} s") from error
            raise
        self._loaded_s = self._clock()
        self.load_s = self._loaded_s - started_s
        self._process = process
        self._replicas.replace((url,), name=self.name)
        self.state = "loaded"
        self._watching = asyncio.create_task(self._watch(process), name=f"watch {self.name}")
        logger.info("model is loaded tier=%s seconds=%.1f", self.name, self.load_s)

    async def _watch(self, process: ServingProcess) -> None:
        """Notice that its process has ended by itself."""
        status = await process.wait()
        if self._process is not process:
            return  # it was ended
        self._process = None
        self._replicas.replace(())
        self.holds_memory = False
        if self._clock() - self._loaded_s >= _PROVEN_S:
            logger.error("a model's process has ended tier=%s status=%d", self.name, status)
            self.state, self._failure = "unloaded", _Failure()
        else:
            self._note_failure(LoadError(f"its process ended soon (status {status}); see the log"))

    async def _end(self, process: ServingProcess) -> None:
        await process.end()
        self.holds_memory = False
        self.state = "unloaded"
        self._failure = _Failure()

    def _note_failure(self, error: LoadError) -> None:
        """Keep other attempts away for a while, longer each time."""
        failure = self._failure
        failure.num_in_a_row += 1
        wait_s = min(RETRY_S * 2 ** min(failure.num_in_a_row - 1, 10), _MAX_RETRY_S)
        failure.reason, failure.detail = str(error), error.detail
        failure.until_s = self._clock() + wait_s
        self.state = "failed"
        logger.error(
            "model cannot be loaded tier=%s retry_s=%g reason=%s", self.name, wait_s, error.detail
        )
