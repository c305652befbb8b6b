"""Controls running experiments: stops arms that exceed a guardrail, changes arms' weights."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from outrider.gateway.contract.errors.tree import GatewayError, StorageError
from outrider.gateway.experiments.measure_store import MeasureStore
from outrider.gateway.experiments.totals import ArmTotals
from outrider.gateway.settings.experiment_rules import (
    FIXED_ALLOCATION,
    NO_GUARDRAILS,
    AllocationRule,
    GuardrailLimits,
)
from outrider.gateway.storage.refresh import PeriodicRefresh

if TYPE_CHECKING:
    from outrider.gateway.experiments.guardrails import Breach

logger = logging.getLogger(__name__)

_CHECK_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedExperiment:
    """The part of a running experiment that guardrails and allocation need."""

    name: str
    version: int
    weights: Mapping[str, float]
    """The weights of the arms that take traffic."""
    stopped_arms: frozenset[str] = frozenset()
    """Arms that were stopped and take no traffic."""
    guardrails: GuardrailLimits = NO_GUARDRAILS
    allocation: AllocationRule = FIXED_ALLOCATION
    is_independent: bool = False
    """True if every request is a unit of its own."""

    @property
    def needs_totals(self) -> bool:
        """Return whether the experiment has guardrails or changing weights."""
        return bool(self.guardrails.names) or self.allocation.kind != "fixed"


class ArmControl(Protocol):
    """Lists the running experiments and changes their arms."""

    def watched(self) -> Sequence[WatchedExperiment]:
        """Return the experiments that run now, from memory."""

    async def stop_arm(self, name: str, version: int, arm: str, reason: str) -> None:
        """Send the arm's traffic to the control; where it is the control, stop the experiment."""

    async def set_weights(self, name: str, version: int, weights: Mapping[str, float]) -> None:
        """Change the weights of the arms; the version stays the same."""


class ControllerMetrics:
    """Metrics of stopped arms and of changed weights."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._stopped = Gauge(
            "outrider_experiment_arm_stopped",
            "1 for an arm of a running experiment that a guardrail or an administrator stopped.",
            ["experiment", "version", "arm"],
            registry=registry,
        )
        self._trips = Counter(
            "outrider_experiment_guardrail_trips",
            "Arms that this gateway stopped, by the guardrail that was exceeded.",
            ["guardrail"],
            registry=registry,
        )
        self._allocations = Counter(
            "outrider_experiment_allocations",
            "Number of times that an experiment's weights were changed.",
            registry=registry,
        )

    def show(self, watched: Sequence[WatchedExperiment]) -> None:
        """Set the gauge to the arms that are stopped now."""
        self._stopped.clear()
        for experiment in watched:
            for arm in experiment.stopped_arms:
                self._stopped.labels(experiment.name, str(experiment.version), arm).set(1)

    def count_trip(self, guardrail: str) -> None:
        """Count a stopped arm."""
        self._trips.labels(guardrail).inc()

    def count_allocation(self) -> None:
        """Count a change of weights."""
        self._allocations.inc()


class ExperimentController:
    """Checks all running experiments every `every_s`. For one event loop.

    Each gateway has one. They read the same totals, and stopping an arm twice has no effect.
    """

    def __init__(
        self,
        control: ArmControl,
        store: MeasureStore,
        flush: Callable[[], Awaitable[None]],
        metrics: ControllerMetrics,
        *,
        clock: Callable[[], float],
        every_s: float = _CHECK_S,
    ) -> None:
        """Store the arguments. `flush` stores this gateway's counts; `clock` is monotonic, in
        seconds."""
        self._control = control
        self._store = store
        self._flush = flush
        self._metrics = metrics
        self._clock = clock
        self._allocated_s: dict[tuple[str, int], float] = {}
        self._refresh = PeriodicRefresh(
            self._check,
            name="guardrails and allocations of experiments",
            meanwhile="arms and weights stay as they are",
            every_s=every_s,
        )

    async def start(self) -> None:
        """Begin to check."""
        self._refresh.start()

    async def close(self) -> None:
        """Stop checking."""
        await self._refresh.close()

    async def check(self) -> None:
        """Check all running experiments now. Raises StorageError while the database is away."""
        await self._refresh.run()

    async def _check(self) -> None:
        watched = [item for item in self._control.watched() if item.needs_totals]
        if watched:
            await self._flush()
        for experiment in watched:
            totals = await asyncio.to_thread(
                self._store.totals, experiment.name, experiment.version
            )
            try:
                if not await self._guard(experiment, totals):
                    await self._allocate(experiment, totals)
            except StorageError:
                raise
            except GatewayError as error:  # deleted or edited meanwhile
                logger.info(
                    "experiment changed while it was checked experiment=%s reason=%s",
                    experiment.name,
                    error,
                )
        names = {(item.name, item.version) for item in watched}
        self._allocated_s = {k: at_s for k, at_s in self._allocated_s.items() if k in names}
        self._metrics.show(self._control.watched())

    async def _guard(self, experiment: WatchedExperiment, totals: Mapping[str, ArmTotals]) -> bool:
        """Stop the arms that exceed a limit; return whether there was any."""
        live = {arm: totals[arm] for arm in experiment.weights if arm in totals}
        found = await asyncio.to_thread(_breaches, experiment, live)
        for breach in found:
            name, version = experiment.name, experiment.version
            await self._control.stop_arm(name, version, breach.arm, breach.reason)
            self._metrics.count_trip(breach.guardrail)
            logger.warning(
                "experiment arm stopped experiment=%s version=%d arm=%s guardrail=%s limit=%g "
                "estimate=%.4g at_least=%.4g",
                name,
                version,
                breach.arm,
                breach.guardrail,
                breach.limit,
                breach.interval.estimate,
                breach.interval.low,
            )
        return bool(found)

    async def _allocate(
        self, experiment: WatchedExperiment, totals: Mapping[str, ArmTotals]
    ) -> None:
        rule, key = experiment.allocation, (experiment.name, experiment.version)
        now_s = self._clock()
        last_s = self._allocated_s.get(key)
        if rule.kind == "fixed" or (last_s is not None and now_s - last_s < rule.every_s):
            return
        self._allocated_s[key] = now_s
        weights = await asyncio.to_thread(_next_weights, experiment, totals)
        if weights is None:
            return
        logger.info(
            "experiment weights changed experiment=%s version=%d weights=%s",
            experiment.name,
            experiment.version,
            ",".join(f"{arm}:{share:.3f}" for arm, share in weights.items()),
        )
        await self._control.set_weights(experiment.name, experiment.version, weights)
        self._metrics.count_allocation()


def _breaches(experiment: WatchedExperiment, live: Mapping[str, ArmTotals]) -> "list[Breach]":
    from outrider.gateway.experiments.guardrails import breaches  # SciPy is slow to load

    return breaches(
        live,
        experiment.guardrails,
        num_arms=len(experiment.weights) + len(experiment.stopped_arms),
        is_independent=experiment.is_independent,
    )


def _next_weights(
    experiment: WatchedExperiment, totals: Mapping[str, ArmTotals]
) -> dict[str, float] | None:
    from outrider.gateway.experiments.allocation import next_weights  # SciPy is slow to load

    return next_weights(
        experiment.allocation,
        experiment.weights,
        totals,
        is_independent=experiment.is_independent,
    )
