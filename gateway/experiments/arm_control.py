"""The experiments of a registry, as the controller reads and changes them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

from outrider.gateway.experiments.controller import WatchedExperiment
from outrider.gateway.experiments.records import ExperimentRecord


class ArmStore(Protocol):
    """Changes experiments where they are kept; blocks. Raises GatewayErrors."""

    def stop_arm(self, name: str, version: int, arm: str, reason: str) -> object:
        """Take an arm out; do nothing if it is out, or if the version is not the newest."""

    def set_weights(self, name: str, version: int, weights: Mapping[str, float]) -> object:
        """Set other weights for the arms that are not stopped; the version stays the same."""


class StoredArmControl:
    """An ArmControl over the records in memory and the store that they come from."""

    def __init__(
        self,
        records: Callable[[], Iterable[ExperimentRecord]],
        store: ArmStore,
        refresh: Callable[[], Awaitable[object]],
    ) -> None:
        """Store the arguments. `records` returns the last known ones; `refresh` reads them again
        after a change."""
        self._records = records
        self._store = store
        self._refresh = refresh

    def watched(self) -> list[WatchedExperiment]:
        """Return the experiments that run now."""
        return [_watched(record) for record in self._records() if record.is_running]

    async def stop_arm(self, name: str, version: int, arm: str, reason: str) -> None:
        """Take an arm out."""
        await asyncio.to_thread(self._store.stop_arm, name, version, arm, reason)
        await self._refresh()

    async def set_weights(self, name: str, version: int, weights: Mapping[str, float]) -> None:
        """Change the arms' shares of the traffic."""
        await asyncio.to_thread(self._store.set_weights, name, version, weights)
        await self._refresh()


def _watched(record: ExperimentRecord) -> WatchedExperiment:
    weights = record.current.weights
    return WatchedExperiment(
        name=record.name,
        version=record.version,
        weights={arm: weights[arm] for arm in record.live_arms},
        stopped_arms=frozenset(record.current.stopped_arms),
        guardrails=record.guardrails,
        allocation=record.allocation,
        is_independent=record.spec.unit == "request",
    )
