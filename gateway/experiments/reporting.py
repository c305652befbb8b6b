"""An experiment's records and its measures, put together for the statistics."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from outrider.gateway.contract.errors.tree import NotFoundError
from outrider.gateway.experiments.measure_store import MeasureStore
from outrider.gateway.experiments.records import ExperimentRecord, VersionRecord
from outrider.gateway.experiments.statistics.plan import Limits, SamplePlan
from outrider.gateway.experiments.store import ExperimentStore
from outrider.gateway.experiments.totals import ArmTotals

if TYPE_CHECKING:
    from outrider.gateway.experiments.statistics.report import Analysis
    from outrider.gateway.experiments.statistics.selfcheck import SelfCheck


def plan_of(record: ExperimentRecord, version: VersionRecord | None = None) -> SamplePlan:
    """Return a version's plan for the statistics; the newest one's unless another is given."""
    version = version or record.current
    spec = version.spec
    is_newest = version.number == record.version
    return SamplePlan(
        name=record.name,
        version=version.number,
        control=spec.control_arm,
        weights=version.weights,
        metric=spec.metric,
        alpha=spec.alpha,
        unit=spec.unit,
        state=record.state if is_newest else "stopped",
        is_adaptive=spec.allocation.kind != "fixed",
        stopped={arm: one.reason for arm, one in version.stopped_arms.items()},
        limits=Limits(**asdict(record.guardrails)) if is_newest else _limits(version),
        min_effect=spec.min_effect,
        feedback_name=spec.feedback_name,
    )


class Reporter:
    """Reports on experiments. Blocks: in an event loop, use a thread.

    Raises NotFoundError for an experiment or a version that does not exist, StorageError where the
    database is unavailable.
    """

    def __init__(self, store: ExperimentStore, totals: MeasureStore) -> None:
        self._store = store
        self._totals = totals

    def plan(self, name: str, version: int | None = None) -> SamplePlan:
        """Return a version's plan for the statistics; the newest one's unless another is named."""
        record = self._store.get(name)
        if version is None or version == record.version:
            return plan_of(record)
        found = next((one for one in self._store.versions(name) if one.number == version), None)
        if found is None:
            raise NotFoundError(
                f"The experiment {name!r} has no version {version}.",
                param="version",
                code="not_found",
            )
        return plan_of(record, found)

    def totals(self, plan: SamplePlan) -> Mapping[str, ArmTotals]:
        """Return the totals of this version, by arm."""
        return self._totals.totals(plan.name, plan.version)

    def report(self, name: str, version: int | None = None) -> "Analysis":
        """Return its present report."""
        from outrider.gateway.experiments.statistics.report import analyse  # SciPy is slow to load

        plan = self.plan(name, version)
        passed_over = self._totals.passed_over(plan.name, plan.version)
        return analyse(plan, self.totals(plan), passed_over)

    def check(self, name: str, version: int | None, randomness: np.random.Generator) -> "SelfCheck":
        """Check that the data of the experiment, split at random, show no difference."""
        from outrider.gateway.experiments.statistics.selfcheck import self_check

        plan = self.plan(name, version)
        return self_check(plan, self.totals(plan), randomness)


def _limits(version: VersionRecord) -> Limits:
    return Limits(**version.spec.guardrails.model_dump())
