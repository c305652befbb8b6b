"""The models on demand of one gateway, and the memory that they share."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from outrider.gateway.settings.on_demand import OnDemandPoolSettings
from outrider.gateway.upstream.on_demand.model import LackOfRoom, ModelNeeds, OnDemandModel
from outrider.gateway.upstream.on_demand.process import ModelProcess, ProcessRecipe
from outrider.gateway.upstream.replicas import ReplicaSet

_LOOK_EVERY_S: Final = 0.1
_TEND_EVERY_S: Final = 1.0
_GIB: Final = 2**30


class ModelPool:
    """Gives models room, least recently used first out, and puts out those that nobody uses."""

    def __init__(
        self,
        *,
        settings: OnDemandPoolSettings,
        free_bytes: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        start_process: Callable[[ProcessRecipe], Awaitable[ModelProcess]] = ModelProcess.start,
    ) -> None:
        """`free_bytes`: reads what this machine has free, where the settings name no memory."""
        self.settings = settings
        self.clock = clock
        self.start_process = start_process
        self.models: dict[str, OnDemandModel] = {}
        """By name, in the order of the settings."""
        self.waiting: Counter[str] = Counter()
        """Requests that wait for any of them, by tenant; no tenant is there without one."""
        self._read_free = free_bytes
        self._memory_bytes = round((settings.memory_gib or 0) * _GIB)
        """For all models together; where no setting names it, what was free without any."""
        self._tending: asyncio.Task[None] | None = None

    def has_place(self, tenant: str) -> bool:
        """Return whether another request of this tenant may wait.

        Where others take all places, a tenant with less than its share is taken in; but never are
        there twice as many.
        """
        num_waiting, most = self.waiting.total(), self.settings.max_waiting
        share = most / len(self.waiting.keys() | {tenant})
        return num_waiting < most or (self.waiting[tenant] < share and num_waiting < 2 * most)

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """Count a request that waits."""
        self.waiting[tenant] += 1
        try:
            yield
        finally:
            self.waiting -= Counter((tenant,))

    def add(self, name: str, needs: ModelNeeds, replicas: ReplicaSet) -> OnDemandModel:
        """Add a model, which serves as the server of these replicas."""
        self.models[name] = OnDemandModel(name, needs, replicas, self)
        return self.models[name]

    async def start(self) -> None:
        """Watch over the models."""
        self._tending = asyncio.create_task(self._tend(), name="models on demand")

    async def close(self) -> None:
        """End all processes."""
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.wait({self._tending})
        await asyncio.gather(*(model.put_out("shutdown") for model in self.models.values()))

    async def make_room(self, model: OnDemandModel) -> None:
        """Return when the model's memory is kept free for it: idle ones are put out.

        Raises LackOfRoom once nobody waits for the model, or where waiting is in vain.
        """
        while (lacking := model.needs.memory_bytes - self._free_bytes()) > 0:
            others = self._others(model)
            idle = [each for each in others if each.is_loaded and not each.is_busy]
            if ending := [each for each in others if each.state == "unloading"]:
                await ending[0].put_out("memory")
            elif _bytes(idle) >= lacking:
                oldest = min(idle, key=lambda each: each.last_used_s)
                await oldest.put_out("memory", whom_for=model.name)
            elif not model.num_waiting or _bytes(others) < lacking:
                raise self.lack_of_room(model)
            else:
                await asyncio.sleep(_LOOK_EVERY_S)
        model.holds_memory = True

    def lack_of_room(self, model: OnDemandModel) -> LackOfRoom:
        """Return an error that tells operators, and no clients, what holds the memory."""
        free = _gib(max(self._free_bytes(), 0))
        lack = f"it takes {_gib(model.needs.memory_bytes)} of memory, and {free} are free"
        holders = ", ".join(map(_held, self._others(model))) or "no model"
        return LackOfRoom(f"{lack} beside other models", detail=f"{lack}; in use by {holders}")

    def _others(self, model: OnDemandModel) -> list[OnDemandModel]:
        """Return the other models that take memory."""
        return [each for each in self.models.values() if each.holds_memory and each is not model]

    def _free_bytes(self) -> int:
        """Return the memory that nothing takes, and that is not kept free for a model."""
        holders = [each for each in self.models.values() if each.holds_memory]
        if self.settings.memory_gib is not None:
            return self._memory_bytes - _bytes(holders)
        measured = self._read_free()
        if not holders:
            self._memory_bytes = measured
        # A model that is loaded takes some of its memory only when it is busy.
        loading = (each for each in holders if each.state == "loading")
        return min(measured - _bytes(loading), self._memory_bytes - _bytes(holders))

    async def _tend(self) -> None:
        """Put out models that nobody has used for long; until cancelled."""
        while True:
            await asyncio.sleep(_TEND_EVERY_S)
            now_s = self.clock()
            for model in self.models.values():
                kept_s = model.needs.keep_alive_s
                if model.is_busy:
                    model.last_used_s = now_s
                elif model.is_loaded and kept_s is not None and now_s - model.last_used_s >= kept_s:
                    await model.put_out("keep_alive")


def _bytes(models: Iterable[OnDemandModel]) -> int:
    return sum(model.needs.memory_bytes for model in models)


def _held(model: OnDemandModel) -> str:
    busy = f", {model.num_in_flight} in flight" if model.num_in_flight else ""
    return f"{model.name} ({model.state}, {_gib(model.needs.memory_bytes)}{busy})"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.3g} GiB"
