"""Looks after running experiments: stops arms that exceed a limit, shares traffic out anew."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.errors.tree import GatewayError, StorageError
from gateway.experiments.measure_store import TotalsStore
from gateway.experiments.totals import ArmTotals
from gateway.settings.experiment_rules import (
    FIXED_ALLOCATION,
    NO_GUARDRAILS,
    AllocationRule,
    GuardrailLimits,
)

if TYPE_CHECKING:
    from gateway.experiments.guardrails import Breach

logger = logging.getLogger(__name__)

_LOOK_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedExperiment:
    """A running experiment as far as its guardrails and its allocation go.

    `weights` are of the arms that take traffic; `stopped_arms` those that do no more.
    is_independent: every request is a unit of its own.
    """

    name: str
    version: int
    weights: Mapping[str, float]
    stopped_arms: frozenset[str] = frozenset()
    guardrails: GuardrailLimits = NO_GUARDRAILS
    allocation: AllocationRule = FIXED_ALLOCATION
    is_independent: bool = False

    @property
    def needs_totals(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self.guardrails.names) or self.allocation.kind != "fixed"


class ArmControl(Protocol):
    """Knows the experiments, and may change them."""

    def watched(self) -> Sequence[WatchedExperiment]:
        """Those that run now, from memory."""

    async def stop_arm(self, name: str, version: int, arm: str, reason: str) -> None:
        """Send the arm's traffic to the control, or stop it all where it is the control."""

    async def set_weights(self, name: str, version: int, weights: Mapping[str, float]) -> None:
        """Share the traffic out so, from now on; the version stays the same."""


class KeeperMetrics:
    """What /metrics says of arms that were stopped and of traffic that was shared out anew."""

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
        self._shared = Counter(
            "outrider_experiment_allocations",
            "Times that an experiment's traffic was shared out anew.",
            registry=registry,
        )

    def show(self, watched: Sequence[WatchedExperiment]) -> None:
        """The stopped arms as they are now."""
        self._stopped.clear()
        for experiment in watched:
            for arm in experiment.stopped_arms:
                self._stopped.labels(experiment.name, str(experiment.version), arm).set(1)

    def tripped(self, guardrail: str) -> None:
        """Count a stopped arm."""
        self._trips.labels(guardrail).inc()

    def shared(self) -> None:
        """Count new weights."""
        self._shared.inc()


class ExperimentKeeper:
    """Looks at all running experiments every `every_s`. For one event loop.

    Each gateway has one; they look at the same totals, and stopping an arm twice changes nothing.
    """

    def __init__(
        self,
        control: ArmControl,
        store: TotalsStore,
        flush: Callable[[], Awaitable[None]],
        metrics: KeeperMetrics,
        *,
        clock: Callable[[], float],
        every_s: float = _LOOK_S,
    ) -> None:
        """`flush` stores what this gateway has counted; `clock` is monotonic, in seconds."""
        self._control = control
        self._store = store
        self._flush = flush
        self._metrics = metrics
        self._clock = clock
        self._every_s = every_s
        self._allocated_s: dict[tuple[str, int], float] = {}
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            async with self._one_at_a_time:  # a thread that reads would outlive its task
                self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def look(self) -> None:
        """Look once at all of them. Raises StorageError where the database is away."""
        async with self._one_at_a_time:
            await self._look()

    async def _look(self) -> None:
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
                    "an experiment changed while it was looked at experiment=%s reason=%s",
                    experiment.name,
                    error,
                )
        names = {(item.name, item.version) for item in watched}
        self._allocated_s = {k: at_s for k, at_s in self._allocated_s.items() if k in names}
        self._metrics.show(self._control.watched())

    async def _guard(self, experiment: WatchedExperiment, totals: Mapping[str, ArmTotals]) -> bool:
        """Stop the arms that exceed a limit; whether there was any."""
        live = {arm: totals[arm] for arm in experiment.weights if arm in totals}
        found = await asyncio.to_thread(_breaches, experiment, live)
        for breach in found:
            name, version = experiment.name, experiment.version
            await self._control.stop_arm(name, version, breach.arm, breach.reason)
            self._metrics.tripped(breach.guardrail)
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
            "experiment shared out experiment=%s version=%d weights=%s",
            experiment.name,
            experiment.version,
            ",".join(f"{arm}:{share:.3f}" for arm, share in weights.items()),
        )
        await self._control.set_weights(experiment.name, experiment.version, weights)
        self._metrics.shared()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.look()
            except StorageError as error:
                reason = getattr(error, "detail", str(error))
                logger.warning("experiments cannot be looked at now reason=%s", reason)
            except Exception:
                logger.exception("experiments could not be looked at")


def _breaches(experiment: WatchedExperiment, live: Mapping[str, ArmTotals]) -> "list[Breach]":
    from gateway.experiments.guardrails import breaches  # SciPy is slow to load

    return breaches(
        live,
        experiment.guardrails,
        num_arms=len(experiment.weights) + len(experiment.stopped_arms),
        is_independent=experiment.is_independent,
    )


def _next_weights(
    experiment: WatchedExperiment, totals: Mapping[str, ArmTotals]
) -> dict[str, float] | None:
    from gateway.experiments.allocation import next_weights  # SciPy is slow to load

    return next_weights(
        experiment.allocation,
        experiment.weights,
        totals,
        is_independent=experiment.is_independent,
    )
