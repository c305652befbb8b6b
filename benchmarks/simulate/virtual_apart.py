"""Replicas in virtual time, some of which compute prompts for the others: the gateway's own choice.

`pays_apart` decides for each request, as in the gateway, with the loads that placement knows. What
is moved takes its time after the prompt, and holds up the replica that takes it in.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

import numpy as np

from benchmarks.simulate.fleet_trace import Call
from benchmarks.simulate.virtual_fleet import (
    Job,
    Objective,
    VirtualFleet,
    VirtualReplica,
    request_of,
)
from outrider.gateway.engines.fleet.block_sources import Work, pays_apart
from outrider.gateway.engines.fleet.cache_aware import MOVE_S, CacheAware
from outrider.gateway.engines.fleet.replica_placement import Loads

TOKEN_BYTES: Final = 65_536
"""Keys and values of a token of an 8 B model (32 layers, 8 heads of 128) in fp8."""
LINES: Final[Mapping[str, float]] = {"200 Gbit/s": 25e9, "10 Gbit/s": 1.25e9}


@dataclass(kw_only=True)
class ApartFleet(VirtualFleet):
    """A fleet whose first replicas compute prompts only. All are up, and none fails."""

    num_prefill: int
    bytes_per_s: float
    num_apart: int = 0
    moving: list[tuple[float, int, Job, float]] = field(default_factory=list)
    numbers: "count[int]" = field(default_factory=count)

    def _place(self, job: Job, candidates: Loads) -> int:
        columns = np.array(self.columns)
        answering = self.board.take(columns[self.num_prefill :])
        here = self.num_prefill + super()._place(job, answering)
        if not self.num_prefill or not isinstance(self.placement, CacheAware):
            return here
        prompt = replace(request_of(job), request_id=f"{job.name}/prompt")
        computing = self.board.take(columns[: self.num_prefill])
        there = self.placement.place(prompt, job.call.keys, computing)
        hit = self.placement.expected_hit(prompt.request_id)
        num_missing = max(job.call.num_prompt - job.expected, 1)
        is_apart = pays_apart(
            Work(load=self.loads[here], num_tokens=num_missing),
            Work(load=self.loads[there], num_tokens=max(job.call.num_prompt - hit, 1)),
            num_missing * TOKEN_BYTES / self.bytes_per_s,
        )
        if not is_apart:
            self.placement.note_end(prompt.request_id)
            return here
        self.placement.note_end(job.name)
        self.num_apart += 1
        job.target, job.expected = here, hit
        return there

    def _note_prefilled(self, each: VirtualReplica) -> None:
        for job in each.prefilled:
            if job.target is None:
                self.placement.note_prefill(job.name, job.hit)
                continue
            self.placement.note_prefill(f"{job.name}/prompt", job.hit)
            missing = job.call.num_prompt
            missing -= self.replicas[job.target].depth(job.call.keys) * 512
            moved_s = max(missing, 1) * TOKEN_BYTES / self.bytes_per_s
            heapq.heappush(
                self.moving, (each.now_s + moved_s + MOVE_S, next(self.numbers), job, moved_s)
            )

    def _tick(self) -> int:
        while self.moving and self.moving[0][0] <= self.now_s:
            at_s, _, job, moved_s = heapq.heappop(self.moving)
            if job.target is not None:
                lane = job.target
                self.replicas[lane].take_in(job, at_s, moved_s)
                self._note_load(lane)
        return super()._tick()


def gap_percentile_s(replicas: Sequence[VirtualReplica], percent: float) -> float:
    """Return a percentile of the times between two tokens, over all tokens."""
    gaps = sorted(gap for each in replicas for gap in each.gaps if gap[1])
    if not gaps:
        return 0.0
    weights = np.cumsum([number for _, number in gaps])
    place = int(np.searchsorted(weights, weights[-1] * percent / 100))
    return gaps[min(place, len(gaps) - 1)][0]


def apart_figures(
    fleet: ApartFleet, jobs: Sequence[Job], calls: Sequence[Call], objective: Objective
) -> dict[str, float]:
    """Return what came of a run."""
    good = sum(objective.is_met(job) for job in jobs)
    waits_s = np.array([job.first_s - job.call.at_s for job in jobs if job.first_s is not None])
    return {
        "goodput_per_s": good / calls[-1].at_s,
        "attainment": good / len(jobs),
        "ttft_p50_s": float(np.percentile(waits_s, 50)),
        "ttft_p99_s": float(np.percentile(waits_s, 99)),
        "gap_p99_s": gap_percentile_s(fleet.replicas, 99),
        "apart_share": fleet.num_apart / len(jobs),
    }
