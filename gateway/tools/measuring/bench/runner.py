"""A run from the first look at the target to the result."""

import platform
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outrider.gateway.tools.measuring.bench.client import BenchClient, TargetError
from outrider.gateway.tools.measuring.bench.closed_loop import ClosedLoop, ClosedLoopSettings
from outrider.gateway.tools.measuring.bench.load import SILENT, LoadResult, RunWatch, Tracker
from outrider.gateway.tools.measuring.bench.open_loop import OpenLoop, OpenLoopSettings
from outrider.gateway.tools.measuring.bench.plan import BenchPlan, LoadSettings
from outrider.gateway.tools.measuring.bench.results import (
    BenchResult,
    Meta,
    RequestRow,
    SearchReport,
    SearchStep,
    Summary,
)
from outrider.gateway.tools.measuring.bench.search import SearchSettings, find_highest_rate
from outrider.gateway.tools.measuring.bench.summary import LoadTally, summarize
from outrider.gateway.tools.measuring.bench.target import TargetReport, inspect_target
from outrider.gateway.tools.measuring.bench.workloads import Extent, PlannedRequest, Workload

# Between the decision to begin and the first request that is due.
_HEAD_START_S = 0.05
# Prompts made for a closed loop without a given number; it then starts over with the first one.
_NUM_WRITTEN = 2000


class Session:
    """A target that was looked at, and a workload that was read; runs may follow one another.

    Use it as a context manager. `clock`: seconds since whatever began; that of several sessions may
    be the same, so that their rows can be laid side by side.
    """

    def __init__(
        self,
        plan: BenchPlan,
        *,
        watch: RunWatch = SILENT,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Read the workload. Raises PlanError and WorkloadError."""
        plan.check()
        self.plan = plan if plan.salt else replace(plan, salt=secrets.token_hex(4))
        self.clock = clock or run_clock()
        self.watch = watch
        self.workload = Workload(plan.workload, seed=plan.seed)
        self.client = BenchClient(plan.target, clock=self.clock)
        self._report: TargetReport | None = None
        self._started_at = datetime.now(UTC)

    async def __aenter__(self) -> Self:
        """Look at the target. Raises TargetError."""
        await self.client.__aenter__()
        try:
            self.watch.phase("looking at the target", num_requests=None, duration_s=None)
            self._report = await inspect_target(
                self.client,
                self.plan.request_fields,
                salt=f"{self.plan.salt}/{self.plan.arm}",
                needs_lengths=self.workload.has_lengths,
                needs_seeds=self.plan.shares_noise and self.workload.num_prompts is not None,
            )
        except BaseException:
            await self.client.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the connections."""
        await self.client.__aexit__(exc_type, exc, traceback)

    @property
    def report(self) -> TargetReport:
        """The result of probing the target."""
        assert self._report is not None
        return self._report

    def requests(self, load: LoadSettings, *, salt: str = "") -> list[PlannedRequest]:
        """The requests of a load, those of its warm-up in front. Raises WorkloadError.

        `salt`: of texts that no other run of this session has.
        """
        duration_s, num_requests = load.duration_s, load.num_requests
        if load.warm_up_s > 0.0:
            duration_s = None if duration_s is None else duration_s + load.warm_up_s
            if num_requests is not None and load.rate_per_s is not None:
                num_requests += round(load.rate_per_s * load.warm_up_s)
        if load.loop == "closed":
            # Its users decide when they ask: a trace's times and the duration say nothing here.
            duration_s, num_requests = None, num_requests or _NUM_WRITTEN
        extent = Extent(
            rate_per_s=load.rate_per_s, duration_s=duration_s, num_requests=num_requests
        )
        self.watch.phase("writing the requests", num_requests=None, duration_s=None)
        return self.workload.requests(extent, self.report.facts, salt=f"{self.plan.salt}/{salt}")

    async def run(
        self,
        requests: Sequence[PlannedRequest],
        load: LoadSettings,
        *,
        text: str = "measuring",
        first_index: int = 0,
    ) -> LoadResult:
        """Send these requests, the first one at once; times in the rows are the session's clock's.

        `first_index`: of the first row. `text`: what the watch is told.
        """
        assert requests
        begin_s = self.clock() + _HEAD_START_S
        shift_s = requests[0].at_s
        moved = [replace(planned, at_s=planned.at_s - shift_s) for planned in requests]
        tracker = Tracker(
            client=self.client,
            watch=self.watch,
            clock=self.clock,
            warm_up_s=begin_s + load.warm_up_s if load.warm_up_s > 0.0 else float("-inf"),
            arm=self.plan.arm,
            first_index=first_index,
        )
        if load.concurrency is None:
            self.watch.phase(
                text, num_requests=len(moved), duration_s=moved[-1].at_s + _HEAD_START_S
            )
            settings = OpenLoopSettings(max_in_flight=load.max_in_flight, drain_s=load.drain_s)
            return await OpenLoop(tracker, settings, clock=self.clock).run(moved, begin_s=begin_s)
        duration_s = None if load.duration_s is None else load.duration_s + load.warm_up_s
        self.watch.phase(text, num_requests=load.num_requests, duration_s=duration_s)
        closed = ClosedLoopSettings(
            concurrency=load.concurrency,
            duration_s=duration_s,
            num_requests=load.num_requests,
            drain_s=load.drain_s,
        )
        return await ClosedLoop(tracker, closed, clock=self.clock).run(moved, begin_s=begin_s)

    def summarize(self, rows: Sequence[RequestRow], tally: LoadTally) -> Summary:
        """Raises TargetError where nothing was measured."""
        if all(row.is_warm_up for row in rows):
            raise TargetError("the run was over before its warm-up: make it longer (--duration)")
        return summarize(
            rows,
            self.plan.objectives,
            loop=self.plan.load.loop,
            prices=self.plan.prices or self.report.prices,
            tally=tally,
            seed=self.plan.seed,
        )

    def result(
        self,
        rows: Sequence[RequestRow],
        summary: Summary,
        search: SearchReport | None = None,
    ) -> BenchResult:
        """The document: rows in the order of their indexes."""
        return BenchResult(
            meta=self._meta(summary, num_asked=len(rows)),
            objectives=self.plan.objectives,
            summary=summary,
            rows=sorted(rows, key=lambda row: row.index),
            search=search,
        )

    def _meta(self, summary: Summary, *, num_asked: int) -> Meta:
        plan, report = self.plan, self.report
        notes = [*report.notes, *self.workload.notes]
        num_prompts = self.workload.num_prompts
        if num_prompts is not None and num_asked > num_prompts:
            notes.append(
                f"{num_asked} requests for {num_prompts} prompts: a prefix cache may have had them"
            )
        is_endless = plan.load.loop == "closed" and plan.load.num_requests is None
        if is_endless and num_prompts is None and num_asked > _NUM_WRITTEN:
            notes.append(f"the requests began anew after {_NUM_WRITTEN}")
        if summary.token_source == "mixed":
            notes.append("some answers had no usage: their tokens are events with text")
        if held := summary.schedule.num_held:
            notes.append(
                f"{held} requests waited because {plan.load.max_in_flight} were in flight "
                "(--max-in-flight); their wait is part of the latencies"
            )
        return Meta(
            url=plan.target.shown_url,
            model=report.model,
            started_at=self._started_at.isoformat(timespec="seconds"),
            ended_at=datetime.now(UTC).isoformat(timespec="seconds"),
            loop=plan.load.loop,
            workload=_described(plan.workload)
            | {
                "name": self.workload.name,
                "context_tokens": plan.workload.context_tokens or report.context_tokens,
            },
            settings=_described(plan.load)
            | {
                "seed": plan.seed,
                "salt": plan.salt,
                "is_stream": plan.target.is_stream,
                "timeout_s": plan.target.timeout_s,
                "stall_s": plan.target.stall_s,
            },
            request_fields=dict(plan.request_fields),
            versions=_versions(),
            machine=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
            served_by=report.served_by,
            device=report.device,
            commit=plan.commit,
            arm=plan.arm,
            notes=list(dict.fromkeys(notes)),
        )


async def run_bench(plan: BenchPlan, *, watch: RunWatch = SILENT) -> BenchResult:
    """Run it. Failures of requests are in the rows.

    Raises PlanError, WorkloadError and TargetError.
    """
    async with Session(plan, watch=watch) as session:
        if plan.search is not None:
            return await _search(session, plan.search)
        load = plan.load
        done = await session.run(session.requests(load), load)
        return session.result(done.rows, session.summarize(done.rows, done.tally))


async def _search(session: Session, settings: SearchSettings) -> BenchResult:
    """The rows kept are those of the best rate; of the lowest where none was enough."""
    plan = session.plan
    num_steps = 0

    async def measure(rate: float) -> tuple[bool, tuple[list[RequestRow], Summary]]:
        nonlocal num_steps
        num_steps += 1
        load = replace(plan.load, rate_per_s=rate)
        done = await session.run(
            session.requests(load, salt=str(num_steps)), load, text=f"{rate:.3g} requests/s"
        )
        summary = session.summarize(done.rows, done.tally)
        assert summary.attainment is not None
        is_enough = summary.attainment.value >= settings.target_attainment
        return is_enough, (done.rows, summary)

    found = await find_highest_rate(measure, settings)
    kept = found.best or min(found.steps, key=lambda step: step.rate_per_s)
    rows, summary = kept.measured
    report = SearchReport(
        target_attainment=settings.target_attainment,
        best_rate_per_s=None if found.best is None else found.best.rate_per_s,
        is_bounded=found.is_bounded,
        steps=[
            SearchStep(
                rate_per_s=step.rate_per_s, is_enough=step.is_enough, summary=step.measured[1]
            )
            for step in found.steps
        ],
    )
    return session.result(rows, summary, report)


def run_clock() -> Callable[[], float]:
    """Seconds from now on."""
    origin_s = time.perf_counter()
    return lambda: time.perf_counter() - origin_s


def _described(settings: Any) -> dict[str, Any]:
    """Settings as JSON types; a path to its last part."""
    return {
        name: value.name if isinstance(value, Path) else value
        for name, value in asdict(settings).items()
        if value is not None
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("outrider", "aiohttp"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
