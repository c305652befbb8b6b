"""All experiments in memory, ready to assign, so that no request waits for a database."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from outrider.gateway.experiments.assigner import (
    Assigner,
    Assignment,
    NullAssigner,
    PassedOver,
    Subject,
)
from outrider.gateway.experiments.assignment import HashAssigner
from outrider.gateway.experiments.records import ExperimentRecord, ExperimentTable
from outrider.gateway.experiments.store import ExperimentStore
from outrider.gateway.storage.refresh import PeriodicRefresh

logger = logging.getLogger(__name__)

_NEVER_READ: Final = -1
_REFRESH_S: Final = 1.0
_NO_EXPERIMENTS: Final = NullAssigner()


class ExperimentRegistry:
    """The last known state of the experiments, read again every `refresh_s`; an Assigner.

    While the database is unavailable the last known state is used. For one event loop.
    """

    def __init__(
        self, store: ExperimentStore, secret: bytes, *, refresh_s: float = _REFRESH_S
    ) -> None:
        """Store the arguments. `secret` keys the hash that assigns units to arms."""
        self._store = store
        self._secret = secret
        self._version = _NEVER_READ
        self._experiments: Mapping[str, ExperimentRecord] = {}
        self._num_running = 0
        self.assigner: Assigner | None = None
        """Assigns the arms of requests; None while there are no experiments."""
        self._refresh = PeriodicRefresh(
            self._read_changes,
            name="experiments",
            meanwhile="the last known ones are used",
            every_s=refresh_s,
        )

    @property
    def experiments(self) -> Mapping[str, ExperimentRecord]:
        """Return all experiments by name."""
        return self._experiments

    @property
    def num_running(self) -> int:
        """Return the number of running experiments."""
        return self._num_running

    @property
    def wants_conversation(self) -> bool:
        """Return whether an experiment assigns by conversation."""
        return self.assigner is not None and self.assigner.wants_conversation

    @property
    def sets_models(self) -> bool:
        """Return whether an arm names a model."""
        return self.assigner is not None and self.assigner.sets_models

    def assign(self, subject: Subject) -> Assignment | None:
        """Return the arms of a request. Raises BadRequestError for an unknown forced arm."""
        return (self.assigner or _NO_EXPERIMENTS).assign(subject)

    def passed_over(self, subject: Subject) -> list[PassedOver]:
        """Return the running experiments that this request takes no part in."""
        return [] if self.assigner is None else self.assigner.passed_over(subject)

    async def start(self) -> None:
        """Read all experiments, and begin to look for changes. Raises DatabaseError."""
        await self.refresh()
        self._refresh.start()

    async def close(self) -> None:
        """Stop looking for changes."""
        await self._refresh.close()

    async def refresh(self) -> None:
        """Read the changes so far. Raises DatabaseError; then the last known state stays."""
        await self._refresh.run()

    async def _read_changes(self) -> None:
        version = await asyncio.to_thread(self._store.version)
        if version != self._version:
            table, assigner = await asyncio.to_thread(self._read)
            self.assigner = assigner
            self._experiments = table.experiments
            self._version = table.version
            running = [one.name for one in table.experiments.values() if one.is_running]
            self._num_running = len(running)
            logger.info("experiments running=%s", ",".join(running) or "none")

    def _read(self) -> tuple[ExperimentTable, Assigner | None]:
        """Return all experiments, ready for use. Takes milliseconds: for a worker thread."""
        table = self._store.load()
        if not table.experiments:
            return table, None
        return table, HashAssigner(table.experiments.values(), self._secret)
