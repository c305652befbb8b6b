"""Works on the batches of the database: those that nobody works on, a tenant's one by one."""

import asyncio
import contextlib
import logging
from typing import Final

from outrider.gateway.contract.errors.tree import StorageError
from outrider.gateway.http.apis.batches.leases import LeaseLostError
from outrider.gateway.http.apis.batches.work import BatchWork, WorkParts

logger = logging.getLogger(__name__)

_POLL_S: Final = 1.0
_MAX_BATCHES: Final = 32
"""Batches that one process works on at once: their requests take turns."""
_SWEEP_S: Final = 3600.0
_AGAIN_S: Final = 60.0
"""A batch whose work failed is tried again so much later: its tenant's others come first."""


class BatchRunner:
    """The work on batches of one process. For one event loop."""

    def __init__(self, parts: WorkParts) -> None:
        self._parts = parts
        self.store = parts.store
        self._works: dict[str, tuple[BatchWork, asyncio.Task[None]]] = {}
        self._new = asyncio.Event()
        self._sweeps_at_s = 0.0
        self._has_stored_prices = False

    def wake(self) -> None:
        """Look for batches now: one was made, or is to be cancelled."""
        self._new.set()

    async def run(self) -> None:
        """Work until it is cancelled; then leave the batches to other processes."""
        try:
            while True:
                try:
                    await self._turn()
                except (StorageError, OSError) as error:
                    logger.warning("batches wait for their storage error=%s", error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._new.wait(), _POLL_S)
                self._new.clear()
        finally:
            await self._leave()

    async def _turn(self) -> None:
        leases = self._parts.leases
        if not self._has_stored_prices:
            await asyncio.to_thread(leases.store_prices)
            self._has_stored_prices = True
        if self._works:
            records = await asyncio.to_thread(leases.renew)
            for batch_id, (work, _) in self._works.items():
                record = records.get(batch_id)
                if record is not None and record.status == "cancelling":
                    work.record = record
        await self._claim()
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._sweeps_at_s:
            self._sweeps_at_s = now_s + _SWEEP_S
            await asyncio.to_thread(self.store.sweep)

    async def _claim(self) -> None:
        """Take batches that nobody works on."""
        while len(self._works) < _MAX_BATCHES:
            held = {work.record.tenant for work, _ in self._works.values()}
            record = await asyncio.to_thread(self._parts.leases.claim, held)
            if record is None:
                break
            work = BatchWork(parts=self._parts, record=record)
            self._works[record.id] = work, asyncio.create_task(self._run(work))
        self._parts.metrics.batches.set(len(self._works))

    async def _run(self, work: BatchWork) -> None:
        batch_id = work.record.id
        try:
            ended = await work.run()
            self._parts.metrics.batches_over.labels(ended.status).inc()
            logger.info("batch is over id=%s status=%s", batch_id, ended.status)
            self.wake()
        except* LeaseLostError:
            logger.warning("another process works on the batch id=%s", batch_id)
        except* Exception as group:
            error = group.exceptions[0]
            logger.exception("work on a batch failed id=%s", batch_id, exc_info=error)
            await self._release(batch_id, _AGAIN_S)
        finally:
            del self._works[batch_id]

    async def _release(self, batch_id: str, after_s: float = 0.0) -> None:
        with contextlib.suppress(StorageError):
            await asyncio.to_thread(self._parts.leases.release, batch_id, after_s)

    async def _leave(self) -> None:
        """End the work; requests that are being answered are answered again elsewhere."""
        works = dict(self._works)
        for _, task in works.values():
            task.cancel()
        if works:
            await asyncio.wait([task for _, task in works.values()])
        for batch_id in works:
            await self._release(batch_id)
