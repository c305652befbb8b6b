"""The application's lifespan: starts and closes its parts in order."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import FastAPI

from outrider.engine.errors import EngineNotStartedError
from outrider.gateway.alerts.watching import AlertWatch
from outrider.gateway.answering.caching.entry import CacheStore
from outrider.gateway.answering.jobs.jobs import JobBuilder
from outrider.gateway.answering.jobs.named_prompts import NamedPrompts
from outrider.gateway.answering.reading.upstream_parts import UpstreamParts
from outrider.gateway.engines.adapters.watcher import AdapterWatcher
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.experiments.experiments import Experiments
from outrider.gateway.http.apis.batches.runner import BatchRunner
from outrider.gateway.http.apis.responses.store import ResponseStore
from outrider.gateway.http.dashboard.api import DashboardApi
from outrider.gateway.telemetry.capture import Capture
from outrider.gateway.telemetry.loop_lag import LoopLag
from outrider.gateway.telemetry.tracer import Tracer
from outrider.gateway.tenancy.metering.tenancy import Tenancy

if TYPE_CHECKING:
    from outrider.gateway.checks.checks import Checks
    from outrider.gateway.telemetry.otlp_metrics import MetricsPush, ReadFamilies

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifespan:
    """Starts and closes the parts that live as long as the application."""

    engine: EngineClient
    jobs: JobBuilder
    upstream: UpstreamParts
    tenancy: Tenancy
    experiments: Experiments
    dashboard: DashboardApi
    capture: Capture
    tracer: Tracer
    loop_lag: LoopLag
    checks_pair: bool
    """Once the engine has started, its models are compared with the router's."""
    adapter_watcher: AdapterWatcher | None
    prompts: NamedPrompts
    alerts: AlertWatch | None = None
    cache: CacheStore | None = None
    checks: "Checks | None" = None
    responses: ResponseStore | None = None
    batches: BatchRunner | None = None
    push: "MetricsPush | None" = None
    read_metrics: "ReadFamilies"

    @asynccontextmanager
    async def run(self, _: FastAPI) -> AsyncIterator[None]:
        """Load the engine behind the open port, so that /health and /ready answer meanwhile."""
        background = [
            asyncio.create_task(self._start_engine()),
            asyncio.create_task(self.loop_lag.run()),
            asyncio.create_task(self.dashboard.run()),
            asyncio.create_task(self.prompts.tend()),
        ]
        if self.adapter_watcher is not None:
            background.append(asyncio.create_task(self.adapter_watcher.run()))
        if self.alerts is not None:
            background.append(asyncio.create_task(self.alerts.run()))
        if self.push is not None:
            background.append(asyncio.create_task(self.push.run(self.read_metrics)))
        try:
            await self.tenancy.start()
            await self.experiments.start()
            await self.upstream.start()
            if self.batches is not None:
                background.append(asyncio.create_task(self.batches.run()))
            yield
        finally:
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            await self.jobs.routing.second_looks.close()
            await self.upstream.close()
            await self.engine.close()
            await self.dashboard.close()
            await self.experiments.close()
            await self.tenancy.close()
            if self.cache is not None:
                await self.cache.close()
            if self.checks is not None:
                await self.checks.close()
            if self.responses is not None:
                await self.responses.close()
            await self.capture.close()
            await self.tracer.close()
            if self.push is not None:
                await self.push.close(self.read_metrics)

    async def _start_engine(self) -> None:
        try:
            await self.engine.start()
            if self.checks_pair:
                with contextlib.suppress(EngineNotStartedError):  # the first request asks again
                    await self.jobs.models.engine_info()  # raises if the router is for other models
        except Exception as error:  # noqa: BLE001 - kept: /ready reports it
            self.jobs.models.start_error = error
            logger.error("engine failed to start error=%s message=%s", type(error).__name__, error)
