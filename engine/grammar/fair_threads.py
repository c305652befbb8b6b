"""Threads for jobs of several tenants: tenants take turns, and none has all threads."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

ResourceT = TypeVar("ResourceT")
ResultT = TypeVar("ResultT")


class TooManyJobsError(Exception):
    """A tenant has as many jobs waiting as it may have."""

    def __init__(self, *, num_waiting: int) -> None:
        super().__init__(f"{num_waiting} jobs of this tenant are waiting already")
        self.num_waiting = num_waiting


class FairThreads(Generic[ResourceT, ResultT]):
    """One daemon thread for each resource; a job is called with its thread's resource.

    The next job is of the tenant whose turn was longest ago. One tenant has at most all threads but
    one (and always one), so its slow jobs never keep another tenant's from starting.
    """

    def __init__(self, resources: Sequence[ResourceT], *, max_waiting_each: int, name: str) -> None:
        self._resources = tuple(resources)
        self._max_waiting_each = max_waiting_each
        self._max_running_each = max(1, len(resources) - 1)
        self._name = name
        self._changed = threading.Condition()
        # The tenants that have jobs waiting, the one whose turn is next first.
        self._waiting: OrderedDict[str, deque[_Job[ResourceT, ResultT]]] = OrderedDict()
        self._running: dict[str, int] = {}
        self._num_idle = 0
        self._num_started = 0
        self._is_closed = False

    def submit(self, tenant: str, run: Callable[[ResourceT], ResultT]) -> "Future[ResultT]":
        """Queue a job. Raises TooManyJobsError."""
        job = _Job(run)
        with self._changed:
            if self._is_closed:
                job.future.cancel()
                return job.future
            jobs = self._waiting.setdefault(tenant, deque())
            if len(jobs) >= self._max_waiting_each:
                jobs = self._waiting[tenant] = deque(job for job in jobs if not job.is_cancelled)
            if len(jobs) >= self._max_waiting_each:
                raise TooManyJobsError(num_waiting=len(jobs))
            jobs.append(job)
            self._start_thread()
            self._changed.notify()
        return job.future

    def _start_thread(self) -> None:
        """Start another thread where none is idle and one is left."""
        num_waiting = sum(map(len, self._waiting.values()))
        if num_waiting <= self._num_idle or self._num_started == len(self._resources):
            return
        resource = self._resources[self._num_started]
        self._num_started += 1
        name = f"{self._name}-{self._num_started}"
        threading.Thread(target=self._work, args=(resource,), name=name, daemon=True).start()

    def _work(self, resource: ResourceT) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                found = self._changed.wait_for(lambda: self._is_closed or self._take())
                self._num_idle -= 1
            if not isinstance(found, tuple):
                return
            tenant, job = found
            try:
                job.run_on(resource)
            finally:
                del job, found  # what it holds must not live until the next one comes
                with self._changed:
                    self._running[tenant] -= 1
                    if not self._running[tenant]:
                        del self._running[tenant]
                    self._changed.notify()

    def _take(self) -> "tuple[str, _Job[ResourceT, ResultT]] | None":
        """The next job, of a tenant that may have one more running."""
        for tenant, jobs in self._waiting.items():
            if self._running.get(tenant, 0) < self._max_running_each:
                job = jobs.popleft()
                del self._waiting[tenant]
                if jobs:
                    self._waiting[tenant] = jobs  # behind the others
                self._running[tenant] = self._running.get(tenant, 0) + 1
                return tenant, job
        return None

    def close(self) -> None:
        """Cancel the jobs that wait; threads end when their job does."""
        with self._changed:
            self._is_closed = True
            for jobs in self._waiting.values():
                for job in jobs:
                    job.future.cancel()
            self._waiting.clear()
            self._changed.notify_all()


class _Job(Generic[ResourceT, ResultT]):
    def __init__(self, run: Callable[[ResourceT], ResultT]) -> None:
        self._run = run
        self.future: Future[ResultT] = Future()

    @property
    def is_cancelled(self) -> bool:
        """True if it need not run any more."""
        return self.future.cancelled()

    def run_on(self, resource: ResourceT) -> None:
        """Run it, unless it was cancelled, and give the future what it comes to."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._run(resource)
        except BaseException as error:  # noqa: BLE001 - the future's owner decides
            _drop_frames(error)
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


def _drop_frames(error: BaseException) -> None:
    """Let go of what a failed job had in its variables: a future may be kept for a long time."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__context__
