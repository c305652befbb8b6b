"""A pool of models whose processes are scripted: they load when they are told to."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from outrider.gateway.settings.on_demand import OnDemandPoolSettings
from outrider.gateway.upstream.on_demand.model import ModelNeeds, OnDemandModel
from outrider.gateway.upstream.on_demand.pool import ModelPool
from outrider.gateway.upstream.on_demand.process import LoadError, ModelProcess, ProcessRecipe
from outrider.gateway.upstream.replicas import Lease, ReplicaSet
from tests.gateway.upstream.replica_sets import replica_set
from tests.gateway.waiting import HandClock
from tests.gateway.waiting import until as until

GIB = 2**30


@dataclass
class ScriptedProcess(ModelProcess):
    """A process that serves once `loaded` is set, and ends when it is told to."""

    name: str
    url: str = "http://127.0.0.1:1/v1"
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    error: str = ""
    has_failed: bool = False

    async def serving(self) -> str:
        """Load, or fail."""
        await self.loaded.wait()
        if self.error:
            raise LoadError(self.error, detail=f"{self.error}: /models/secret")
        return self.url

    async def wait(self) -> int:
        """Wait for its end."""
        await self.ended.wait()
        return -9 if self.has_failed else 0

    async def end(self) -> None:
        """End in good order."""
        await asyncio.sleep(0.01)
        self.ended.set()

    def crash(self) -> None:
        """End by itself."""
        self.has_failed = True
        self.ended.set()


@dataclass
class SkippingClock:
    """The machine's clock, and what was skipped."""

    skipped_s: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped_s


@dataclass
class PoolWorld:
    """A pool, and the processes that it has started."""

    pool: ModelPool
    clock: "SkippingClock"
    started: list[ScriptedProcess] = field(default_factory=list)
    error: str = ""
    """Of the processes that are started from now on."""
    used_gib: float = 1.0
    """Of this machine's memory, by each process."""
    loads_at_once: bool = True
    urls: dict[str, str] = field(default_factory=dict)
    """Addresses of the models' servers."""
    replicas: dict[str, ReplicaSet] = field(default_factory=dict)

    async def start(self, recipe: ProcessRecipe) -> ScriptedProcess:
        """Start a process."""
        told = json.loads(recipe.settings)
        name: str = told.get("name") or next(iter(told["aliases"]))
        process = ScriptedProcess(name, error=self.error)
        process.url = self.urls.get(name, process.url)
        if self.loads_at_once:
            process.loaded.set()
        self.started.append(process)
        return process

    def add(
        self,
        name: str,
        gib: float = 1.0,
        *,
        keep_alive_s: float | None = None,
    ) -> OnDemandModel:
        """Add a model."""
        recipe = ProcessRecipe(settings=json.dumps({"name": name}), key="secret")
        needs = ModelNeeds(
            recipe=recipe,
            memory_bytes=round(gib * GIB),
            keep_alive_s=keep_alive_s,
        )
        self.replicas[name] = replica_set(0, HandClock())
        return self.pool.add(name, needs, self.replicas[name])

    def begin(self, model: OnDemandModel) -> Lease:
        """Send a request to a model that is loaded."""
        (replica,) = self.replicas[model.name].replicas
        return replica.begin()

    @property
    def names(self) -> list[str]:
        """The models whose processes run."""
        return [process.name for process in self.started if not process.ended.is_set()]


def pool_world(*, memory_gib: float | None = 4.0, free_gib: float = 0.0) -> PoolWorld:
    """Return a pool with 4 GiB, in which waits are short."""
    clock = SkippingClock()
    made: list[PoolWorld] = []

    async def start(recipe: ProcessRecipe) -> ScriptedProcess:
        return await made[0].start(recipe)

    pool = ModelPool(
        settings=OnDemandPoolSettings(
            memory_gib=memory_gib, start_within_s=0.3, load_within_s=30.0, max_waiting=3
        ),
        free_bytes=lambda: round((free_gib - len(made[0].names) * made[0].used_gib) * GIB),
        clock=clock,
        start_process=start,
    )
    made.append(PoolWorld(pool, clock))
    return made[0]


@asynccontextmanager
async def running(world: PoolWorld) -> AsyncIterator[PoolWorld]:
    """Run the pool; leaves no task and no process."""
    before = asyncio.all_tasks()
    await world.pool.start()
    try:
        yield world
    finally:
        await world.pool.close()
    assert asyncio.all_tasks() == before
    await until(lambda: not world.names)
