"""The experiments of a gateway: assignment, measurement, storage."""

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry

from outrider.gateway.contract.answers.outcomes import OutcomeSink
from outrider.gateway.contract.errors.tree import ConflictError, StorageError
from outrider.gateway.experiments.arm_control import StoredArmControl
from outrider.gateway.experiments.assigner import Assigner, Assignment, Subject
from outrider.gateway.experiments.controller import ControllerMetrics, ExperimentController
from outrider.gateway.experiments.feedback import FeedbackDesk
from outrider.gateway.experiments.left_out import LeftOut
from outrider.gateway.experiments.measure_store import MeasureStore
from outrider.gateway.experiments.measures import ArmMeasures, MeasureWriter
from outrider.gateway.experiments.recent import RecentRequests
from outrider.gateway.experiments.registry import ExperimentRegistry
from outrider.gateway.experiments.reporting import Reporter
from outrider.gateway.experiments.statistics.report import Analysis
from outrider.gateway.experiments.store import ExperimentStore
from outrider.gateway.experiments.syncing import apply_settings
from outrider.gateway.settings.experiments import ExperimentSettings
from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.storage.database import Database, DatabaseError
from outrider.gateway.storage.secrets import drawn_secret

_SECRET: Final = "experiments.secret"
_NO_DATABASE_SECRET: Final = b"experiments without a database"
"""Used without a database, so that units keep their arms over restarts."""


class Experiments:
    """All parts for experiments. Without arguments: no experiments, stored in memory.

    For one event loop.
    """

    def __init__(
        self,
        database: Database | None = None,
        *,
        secret: bytes = _NO_DATABASE_SECRET,
        registry: CollectorRegistry | None = None,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the arguments; read no data. `clock` is monotonic, `wall_clock` seconds since
        1970."""
        registry = CollectorRegistry() if registry is None else registry
        kept = Database(None) if database is None else database
        self._own_database = kept if database is None else None
        self.store = ExperimentStore(kept, wall_clock=wall_clock)
        self.totals = MeasureStore(kept)
        self.registry = ExperimentRegistry(self.store, secret)
        measures, recent = ArmMeasures(), RecentRequests()
        self._measures = measures
        self._wall_clock = wall_clock
        self.sinks: tuple[OutcomeSink, ...] = (measures, recent)
        """Sinks that count the outcomes of requests."""
        self.feedback = FeedbackDesk(recent, self.totals, database, registry, wall_clock=wall_clock)
        """The endpoint's part that takes feedback on answers."""
        self.writer = MeasureWriter(
            measures, self.totals, writer_id=uuid.uuid4().hex, wall_clock=wall_clock
        )
        control = StoredArmControl(
            lambda: self.registry.experiments.values(), self.store, self.registry.refresh
        )
        self._controller = ExperimentController(
            control, self.totals, self.writer.flush, ControllerMetrics(registry), clock=clock
        )
        self.left_out = LeftOut(registry, clock=clock)
        """Requests that could not be served as their arm wanted it."""
        self._reporter = Reporter(self.store, self.totals)

    @property
    def assigner(self) -> Assigner:
        """Return the object that assigns requests to arms."""
        return self.registry

    def assign(self, subject: Subject) -> Assignment | None:
        """Return the arms of a request that will be answered; count where it takes no part.

        Raises BadRequestError for an unknown forced arm.
        """
        assignment = self.registry.assign(subject)
        num_arms = 0 if assignment is None else len(assignment.arms)
        if num_arms < self.registry.num_running:
            now_s = self._wall_clock()
            for passed in self.registry.passed_over(subject):
                self._measures.pass_over(passed, now_s)
        return assignment

    async def start(self) -> None:
        """Load all experiments. Raises StorageError where the database cannot be used."""
        await self.registry.start()
        await self.writer.start()
        await self._controller.start()

    async def close(self) -> None:
        """Write all measurements, and stop."""
        await self._controller.close()
        await self.writer.close()
        await self.registry.close()
        if self._own_database is not None:
            self._own_database.close()

    async def report(self, name: str, version: int | None = None) -> Analysis:
        """Return the report on an experiment, including this gateway's latest counts.

        Raises NotFoundError for an experiment or version that does not exist, and StorageError.
        """
        await self.writer.flush()
        return await asyncio.to_thread(self._reporter.report, name, version)

    async def delete(self, name: str) -> None:
        """Forget an experiment and its data. Raises NotFoundError; ConflictError while it runs."""
        await self.writer.flush()
        await asyncio.to_thread(self.store.delete, name)
        await asyncio.to_thread(self.totals.delete, name)


def build_experiments(
    wanted: Mapping[str, ExperimentSettings],
    database: Database | None,
    registry: CollectorRegistry,
) -> Experiments:
    """Build the experiments of a gateway from its settings. Blocks.

    Raises SettingsError for experiments that exclude each other, and for an unavailable database.
    """
    try:
        if database is None:
            experiments = Experiments(registry=registry)
        else:
            secret = drawn_secret(database, _SECRET, random.SystemRandom())
            experiments = Experiments(database, secret=secret, registry=registry)
        apply_settings(experiments.store, wanted)
    except ConflictError as error:
        raise SettingsError(str(error)) from None
    except DatabaseError as error:
        raise SettingsError(error.detail) from None
    except StorageError as error:
        raise SettingsError(str(error)) from None
    return experiments
