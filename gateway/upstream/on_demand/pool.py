"""The models on demand of one gateway, and the memory that they share."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Final

from outrider.gateway.contract.errors.tree import UnavailableError
from outrider.gateway.settings.on_demand import OnDemandPoolSettings
from outrider.gateway.upstream.on_demand.model import (
    LackOfRoom,
    ModelNeeds,
    OnDemandModel,
    StartProcess,
)
from outrider.gateway.upstream.on_demand.process import ModelProcess
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
        start: StartProcess = ModelProcess.start,
    ) -> None:
        """`free_bytes` is read, each time, where the settings name no memory."""
        gib = settings.memory_gib
        self._memory_bytes = None if gib is None else round(gib * _GIB)
        self._read_free = free_bytes
        self._settings = settings
        self._clock = clock
        self._start = start
        self._models: dict[str, OnDemandModel] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def models(self) -> Mapping[str, OnDemandModel]:
        """Return the models by name, in the order of the settings."""
        return self._models

    @property
    def num_waiting(self) -> int:
        """Return the requests that wait for any of them."""
        return sum(model.num_waiting for model in self._models.values())

    def add(self, name: str, needs: ModelNeeds, replicas: ReplicaSet) -> OnDemandModel:
        """Add a model, which serves as the server of these replicas."""
        model = OnDemandModel(
            name,
            needs,
            replicas,
            self,
            patience=self._settings,
            clock=self._clock,
            start=self._start,
        )
        self._models[name] = model
        return model

    async def start(self) -> None:
        """Watch over the models, and load those that are to be there at once; waits for none."""
        preloaded = (model for model in self._models.values() if model.needs.preload)
        self._tasks = [
            asyncio.create_task(self._tend(), name="models on demand"),
            *(asyncio.create_task(_preload(model)) for model in preloaded),
        ]

    async def close(self) -> None:
        """End all processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(model.close() for model in self._models.values()))

    async def make_room(self, model: OnDemandModel) -> None:
        """Return when the model's memory is kept free for it: idle ones are put out.

        Raises LackOfRoom once nobody waits for the model, or where waiting is in vain.
        """
        needed = model.needs.memory_bytes
        if self._memory_bytes is not None and needed > self._memory_bytes:
            raise LackOfRoom(self.lack_of_room(model))
        while self._free_bytes() < needed:
            if ending := [each for each in self._others(model) if each.state == "unloading"]:
                await ending[0].put_out("memory")
            elif victim := self._victim(model):
                await victim.put_out(f"memory for {model.name}")
            elif not model.num_waiting or not self._may_fit(model):
                raise LackOfRoom(self.lack_of_room(model))
            else:
                await asyncio.sleep(_LOOK_EVERY_S)
        model.holds_memory = True

    def lack_of_room(self, model: OnDemandModel) -> str:
        """Return what holds the memory that the model needs."""
        holders = ", ".join(map(_held, self._others(model))) or "no model"
        whole = "" if self._memory_bytes is None else f" of {_gib(self._memory_bytes)}"
        return (
            f"it takes {_gib(model.needs.memory_bytes)} of memory, and "
            f"{_gib(max(self._free_bytes(), 0))}{whole} are free; in use by {holders}"
        )

    def _others(self, model: OnDemandModel) -> list[OnDemandModel]:
        """Return the other models that take memory."""
        return [each for each in self._models.values() if each.holds_memory and each is not model]

    def _free_bytes(self) -> int:
        """Return the memory that nothing takes, and that is not kept free for a model."""
        holders = [each for each in self._models.values() if each.holds_memory]
        if self._memory_bytes is not None:
            return self._memory_bytes - sum(each.needs.memory_bytes for each in holders)
        loading = (each.needs.memory_bytes for each in holders if each.state == "loading")
        return self._read_free() - sum(loading)

    def _victim(self, model: OnDemandModel) -> OnDemandModel | None:
        """Return the idle model that was used least recently; None where that does not suffice."""
        idle = [each for each in self._others(model) if each.is_loaded and not each.is_busy]
        gained = sum(each.needs.memory_bytes for each in idle)
        if self._free_bytes() + gained < model.needs.memory_bytes:
            return None
        return min(idle, key=lambda each: each.last_used_s)

    def _may_fit(self, model: OnDemandModel) -> bool:
        """Return whether there is room once the others have nothing to do."""
        gained = sum(each.needs.memory_bytes for each in self._others(model))
        return self._free_bytes() + gained >= model.needs.memory_bytes

    async def _tend(self) -> None:
        """Put out models that nobody has used for long; until cancelled."""
        while True:
            await asyncio.sleep(_TEND_EVERY_S)
            now_s = self._clock()
            for model in self._models.values():
                if model.is_busy:
                    model.last_used_s = now_s
                elif model.is_loaded and self._is_over(model, now_s):
                    await model.put_out("keep_alive")

    def _is_over(self, model: OnDemandModel, now_s: float) -> bool:
        kept_s = model.needs.keep_alive_s
        return kept_s is not None and now_s - model.last_used_s >= kept_s


async def _preload(model: OnDemandModel) -> None:
    with contextlib.suppress(UnavailableError):  # the log and the model's report say so
        await model.load()


def _held(model: OnDemandModel) -> str:
    requests = model.num_in_flight
    busy = f", {requests} {'request' if requests == 1 else 'requests'}" if requests else ""
    return f"{model.name} ({model.state}, {_gib(model.needs.memory_bytes)}{busy})"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.3g} GiB"
