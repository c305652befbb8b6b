"""All experiments in memory, ready to assign, so that no request waits for a database."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from gateway.experiments.actions import ExperimentActions
from gateway.experiments.assigner import Assigner, Assignment, NobodyAssigner, Subject
from gateway.experiments.assignment import HashAssigner
from gateway.experiments.records import ExperimentRecord, ExperimentTable
from gateway.storage.database import DatabaseError

logger = logging.getLogger(__name__)

_NEVER_READ: Final = -1
_REFRESH_S: Final = 1.0


class ExperimentBook:
    """The last known state of the experiments, looked at again every `refresh_s`; an Assigner.

    While the database is away the last state is served. For one event loop.
    """

    def __init__(
        self, store: ExperimentActions, secret: bytes, *, refresh_s: float = _REFRESH_S
    ) -> None:
        """`secret`: what units are hashed with."""
        self._store = store
        self._secret = secret
        self._refresh_s = refresh_s
        self._version = _NEVER_READ
        self._experiments: Mapping[str, ExperimentRecord] = {}
        self._assigner: Assigner = NobodyAssigner()
        self._is_away = False
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def experiments(self) -> Mapping[str, ExperimentRecord]:
        """All of them, by name."""
        return self._experiments

    @property
    def wants_conversation(self) -> bool:
        """Whether an experiment assigns by conversation."""
        return self._assigner.wants_conversation

    def assign(self, subject: Subject) -> Assignment | None:
        """The arms of a request. Raises BadRequestError for a forced one that does not exist."""
        return self._assigner.assign(subject)

    async def start(self) -> None:
        """Read all experiments, and go on looking. Raises DatabaseError."""
        await self.refresh()
        self._task = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            async with self._one_at_a_time:  # a thread that reads would outlive its task
                self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def refresh(self) -> None:
        """Know of all changes until now. Raises DatabaseError; the last state stays then."""
        async with self._one_at_a_time:
            version = await asyncio.to_thread(self._store.version)
            if version != self._version:
                table, assigner = await asyncio.to_thread(self._read)
                self._assigner = assigner
                self._experiments = table.experiments
                self._version = table.version
                running = [one.name for one in table.experiments.values() if one.is_running]
                logger.info("experiments running=%s", ",".join(running) or "none")

    def _read(self) -> tuple[ExperimentTable, Assigner]:
        """All experiments, ready for use. Takes milliseconds: for a worker thread."""
        table = self._store.load()
        if not table.experiments:
            return table, NobodyAssigner()
        return table, HashAssigner(table.experiments.values(), self._secret)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s)
            try:
                await self.refresh()
            except DatabaseError as error:
                if not self._is_away:
                    logger.warning(
                        "experiments cannot be read, the last known ones are used error=%s",
                        error.detail,
                    )
                self._is_away = True
            except Exception as error:  # noqa: BLE001 - the next look may be luckier
                logger.error(
                    "experiments were not read error=%s message=%s", type(error).__name__, error
                )
            else:
                if self._is_away:
                    logger.info("experiments can be read again")
                self._is_away = False
