"""Replicas in virtual time behind the real index and placement."""

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

import numpy as np

from benchmarks.simulate.fleet_trace import BLOCK, Call
from benchmarks.simulate.simulate_slo import Machine
from outrider.engine.events import TierInfo
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.wire import BlocksChanged, BlocksReset
from outrider.gateway.engines.fleet.autoscaling import FleetFigures, ScaleToLatency
from outrider.gateway.engines.fleet.block_index import BlockIndex, Depths
from outrider.gateway.engines.fleet.block_table import Keys
from outrider.gateway.engines.fleet.cache_aware import CacheAware
from outrider.gateway.engines.fleet.replica_placement import (
    LeastWork,
    LoadBoard,
    Loads,
    Placement,
    ReplicaLoad,
)
from outrider.verifier.params import SamplingParams

TICK_S: Final = 0.05
"""Between two looks at all replicas, and the delay of their news."""
_CHUNK: Final = 2048
_BEFORE_S: Final = 60.0
"""The first calls of so long tell what a scaled fleet had to do before them."""
_SAMPLING: Final = SamplingParams(max_tokens=1)
TIER: Final = TierInfo(
    tier="large",
    model_id="virtual",
    path="virtual",
    max_context=2**20,
    vocab_size=2,
    num_parameters=1,
    dtype="bfloat16",
    device="cpu",
    kv_dtype="bfloat16",
    block_size=BLOCK,
)


@dataclass(slots=True, eq=False)
class Job:
    """A request and what became of it; it begins anew where its replica fails."""

    name: str
    call: Call
    left: int = -1  # prompt tokens to compute; -1 before it began
    expected: int = 0
    hit: int = 0
    first_s: float | None = None
    end_s: float | None = None
    num_failures: int = 0
    target: int | None = None  # the replica that answers, where another computes the prompt


@dataclass(kw_only=True)
class VirtualReplica:
    """Continuous batching as a model of step times has it: chunks of prompts between tokens.

    Blocks are evicted least recently used first. `news` are what its messages would be.
    """

    machine: Machine
    num_blocks: int
    max_running: int
    lane: int = 0
    now_s: float = 0.0
    work_s: float = 0.0
    queue: deque[Job] = field(default_factory=deque)
    running: list[tuple[int, int, Job]] = field(default_factory=list)
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    prefilled: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    generation: int = 0
    num_steps: int = 0
    queued_tokens: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list)  # between tokens, and how many
    numbers: "count[int]" = field(default_factory=count)

    def add(self, job: Job) -> None:
        self.queue.append(job)
        self.queued_tokens += job.call.num_prompt - job.expected

    def take_in(self, job: Job, at_s: float, copied_s: float) -> None:
        """Begin an answer whose prompt another replica has computed: its blocks have come."""
        self.now_s = max(self.now_s, at_s) + copied_s
        if self.running:
            self.gaps.append((copied_s, len(self.running)))
        job.expected, job.target, job.left = job.call.num_prompt, None, 0
        self.queue.appendleft(job)

    def depth(self, keys: Keys) -> int:
        """Count the leading blocks of a text that are there."""
        depth = 0
        for key in keys.tolist():
            if key not in self.cache:
                break
            depth += 1
        return depth

    def run(self, until_s: float) -> None:
        """Step until a time."""
        machine = self.machine
        while self.now_s < until_s:
            num_running = len(self.running)
            step_s = machine.base_s + num_running * machine.row_s
            if self.queue and num_running < self.max_running:
                step_s += self._chunk() * machine.prompt_row_s
                self.now_s += step_s
                self.work_s += step_s
                self.gaps.append((step_s, num_running))
                self.num_steps += 1
                self._end_due()
                if self.queue[0].left == 0:
                    self._begin_answer(self.queue.popleft())
            elif num_running:
                wanted = int((until_s - self.now_s) / step_s) + 1
                steps = min(self.running[0][0] - self.num_steps, wanted)
                self.num_steps += steps
                self.now_s += steps * step_s
                self.work_s += steps * step_s
                self.gaps.append((step_s, steps * num_running))
                self._end_due()
            else:
                self.now_s = until_s

    def _chunk(self) -> int:
        job = self.queue[0]
        if job.left < 0:
            depth = self.depth(job.call.keys)
            for key in job.call.keys[:depth].tolist():
                self.cache.move_to_end(key)
            job.hit = min(depth * BLOCK, job.call.num_prompt - 1)
            job.left = job.call.num_prompt - job.hit
        size = min(_CHUNK, job.left)
        job.left -= size
        return size

    def _begin_answer(self, job: Job) -> None:
        self.queued_tokens -= job.call.num_prompt - job.expected
        for key in reversed(job.call.keys.tolist()):  # the end of a text goes first
            if key not in self.cache:
                self.kept.append(key)
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) > self.num_blocks:
            self.dropped.append(self.cache.popitem(last=False)[0])
        self.prefilled.append(job)
        if job.target is not None:
            return
        job.first_s = job.first_s or self.now_s
        heapq.heappush(
            self.running, (self.num_steps + job.call.num_answer, next(self.numbers), job)
        )

    def _end_due(self) -> None:
        while self.running and self.running[0][0] <= self.num_steps:
            job = heapq.heappop(self.running)[2]
            job.end_s = self.now_s
            self.ended.append(job)

    def fail(self) -> list[Job]:
        """Lose everything; return the requests that must go on at other replicas."""
        jobs = [*self.queue, *(job for _, _, job in self.running)]
        self.queue.clear()
        self.running.clear()
        self.cache.clear()
        self.kept, self.dropped, self.queued_tokens = [], [], 0
        for job in jobs:
            job.left, job.num_failures = -1, job.num_failures + 1
        return jobs

    def load(self, known: ReplicaLoad) -> ReplicaLoad:
        """Return its load; the same object where it is the same."""
        fresh = (self.queued_tokens, len(self.running))
        if (known.num_queued_prompt_tokens, known.num_running) == fresh:
            return known
        return replace(
            known,
            num_queued_prompt_tokens=fresh[0],
            num_running=fresh[1],
            seconds_per_output_token=self.machine.base_s / max(fresh[1], 1) + self.machine.row_s,
        )


class RoundRobin(LeastWork):
    """One after another."""

    def __init__(self) -> None:
        super().__init__()
        self._number = -1

    def choose(self, request: EngineRequest, candidates: Loads) -> int:
        self._number = (self._number + 1) % len(candidates)
        return self._number


class PerfectIndex(BlockIndex):
    """Looks into the replicas: what an index could know at best."""

    def __init__(self, replicas: Sequence[VirtualReplica]) -> None:
        super().__init__(max_blocks=1, max_lanes=len(replicas))
        self._replicas = replicas

    def depths(self, keys: Keys, *, is_dense: bool = False) -> Depths:
        return np.array([each.depth(keys) for each in self._replicas], dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Seconds to the first token, and between two tokens on average."""

    ttft_s: float
    inter_token_s: float

    def is_met(self, job: Job) -> bool:
        if job.first_s is None or job.end_s is None:
            return False
        token_s = (job.end_s - job.first_s) / max(job.call.num_answer - 1, 1)
        return job.first_s - job.call.at_s <= self.ttft_s and token_s <= self.inter_token_s


@dataclass(kw_only=True)
class VirtualFleet:
    """Replicas, arrivals, failures, and news that come a tick late."""

    machine: Machine
    num_replicas: int
    num_blocks: int
    policy: str
    max_running: int = 64
    failures: Sequence[tuple[float, int]] = ()  # (when, which replica)
    down_s: float = 30.0
    scaling: ScaleToLatency | None = None
    num_at_first: int | None = None
    seed: int = 0
    on_tick: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.replicas = [
            VirtualReplica(
                machine=self.machine,
                num_blocks=self.num_blocks,
                max_running=self.max_running,
                lane=lane,
            )
            for lane in range(self.num_replicas)
        ]
        self.index: BlockIndex | None = None
        self.now_s = 0.0
        self.placement = self._placement()
        self.board = LoadBoard()
        self.loads = [
            ReplicaLoad(
                replica_id=str(each.lane),
                index_lane=each.lane,
                seconds_per_prompt_token=self.machine.prompt_row_s,
            )
            for each in self.replicas
        ]
        self.columns = [self.board.add(load) for load in self.loads]
        self.up_at_s = [0.0] * self.num_replicas
        self.place_s: list[float] = []
        self.update_s = 0.0
        self.replica_s = 0.0
        self.num_updates = 0

    def _placement(self) -> Placement:
        if self.policy == "round robin":
            return RoundRobin()
        if self.policy == "least work":
            return LeastWork(seed=self.seed)
        if self.policy == "oracle":
            index: BlockIndex = PerfectIndex(self.replicas)
        else:
            index = BlockIndex(
                max_blocks=max(self.num_replicas * self.num_blocks, 4096),
                max_lanes=self.num_replicas,
            )
            for each in self.replicas:
                lane = index.add_lane(most_blocks=2 * self.num_blocks)
                index.note(lane, BlocksReset(each.generation, b""))
            self.index = index
        return CacheAware(index, tiers={"large": TIER}, seed=self.seed, clock=lambda: self.now_s)

    def run(self, calls: Sequence[Call]) -> list[Job]:
        """Serve all calls; the last answer ends the run."""
        jobs = [Job(str(number), call) for number, call in enumerate(calls)]
        waiting: deque[Job] = deque(jobs)
        failures = deque(sorted(self.failures))
        again: list[Job] = []
        num_open, num_up = 0, self._num_at_first(jobs)
        came_s, decided_s = 0.0, 0.0
        self.up_at_s = [0.0] * num_up + [float("inf")] * (self.num_replicas - num_up)
        while waiting or again or num_open:
            while failures and failures[0][0] <= self.now_s:
                lane = failures.popleft()[1]
                lost = self.replicas[lane].fail()
                for job in lost:
                    self.placement.note_end(job.name)
                again += lost
                num_open -= len(lost)
                self.up_at_s[lane] = self.now_s + self.down_s
                self._lose_lane(lane)
            ready = [lane for lane, up_s in enumerate(self.up_at_s) if up_s <= self.now_s]
            if ready:
                columns = np.array([self.columns[lane] for lane in ready])
                while again or (waiting and waiting[0].call.at_s <= self.now_s):
                    job = again.pop() if again else waiting.popleft()
                    came_s += self._work_s(job)
                    lane = ready[self._place(job, self.board.take(columns))]
                    self.replicas[lane].add(job)
                    self._note_load(lane)
                    num_open += 1
            self.now_s += TICK_S
            num_open -= self._tick()
            self.replica_s += TICK_S * (len(ready) if self.scaling is None else num_up)
            if self.scaling is not None and self.now_s - decided_s >= 5.0:
                num_late = sum(1 for job in waiting if job.call.at_s <= self.now_s)
                num_up = self._scale(came_s, self.now_s - decided_s, num_open + num_late, ready)
                came_s, decided_s = 0.0, self.now_s
            self.on_tick()
        return jobs

    def _note_load(self, lane: int) -> None:
        known = self.loads[lane]
        load = self.replicas[lane].load(known)
        if load is not known:
            self.loads[lane] = load
            self.board.put(self.columns[lane], load)

    def _place(self, job: Job, candidates: Loads) -> int:
        request = request_of(job)  # not kept: its prompt is long
        begun_s = time.perf_counter()
        if isinstance(self.placement, CacheAware):
            chosen = self.placement.place(request, job.call.keys, candidates)
        else:
            chosen = self.placement.choose(request, candidates)
        self.place_s.append(time.perf_counter() - begun_s)
        job.expected = self.placement.expected_hit(job.name)
        return chosen

    def _tick(self) -> int:
        """Run all replicas to now; return how many requests ended."""
        num_ended = 0
        for each in self.replicas:
            if not (each.queue or each.running):
                each.now_s = max(each.now_s, self.now_s)
                continue
            each.run(self.now_s)
            self._note_prefilled(each)
            num_ended += len(each.ended)
            each.prefilled, each.ended = [], []
            self._note_load(each.lane)
            if each.kept or each.dropped:
                self._send(each)
        return num_ended

    def _note_prefilled(self, each: VirtualReplica) -> None:
        for job in each.prefilled:
            self.placement.note_prefill(job.name, job.hit)

    def _send(self, each: VirtualReplica) -> None:
        if self.index is not None:
            each.generation += 1
            dropped = [key for key in each.dropped if key not in each.cache]
            kept = [key for key in each.kept if key in each.cache]
            news = BlocksChanged(each.generation, _joined(kept), _joined(dropped))
            begun_s = time.perf_counter()
            self.index.note(each.lane, news)
            self.update_s += time.perf_counter() - begun_s
            self.num_updates += len(kept) + len(dropped)
        each.kept, each.dropped = [], []

    def _lose_lane(self, lane: int) -> None:
        replica = self.replicas[lane]
        replica.now_s = self.up_at_s[lane]
        self._note_load(lane)
        if self.index is not None:
            self.index.clear_lane(lane)
            replica.generation = 0
            self.index.note(lane, BlocksReset(0, b""))

    def _work_s(self, job: Job) -> float:
        # What half a batch of answers makes of a token.
        token_s = self.machine.base_s / (self.max_running / 2) + self.machine.row_s
        return job.call.num_prompt * self.machine.prompt_row_s + job.call.num_answer * token_s

    def _num_at_first(self, jobs: Sequence[Job]) -> int:
        """Return how many replicas there are at first.

        Where nothing is said, a scaled fleet has as many as if it had gone on like this before.
        """
        if self.scaling is None or self.num_at_first is not None:
            return self.num_at_first or self.num_replicas
        work_s = sum(self._work_s(job) for job in jobs if job.call.at_s < _BEFORE_S)
        wanted = self.scaling.decide(
            FleetFigures(interval_s=_BEFORE_S, work_s=work_s, wait_s=0.0, num_open=1, num_ready=1)
        )
        return min(wanted, self.num_replicas)

    def _scale(self, came_s: float, interval_s: float, num_open: int, ready: Sequence[int]) -> int:
        assert self.scaling is not None
        wait_s = float(self.board.take(np.array(ready)).work_s(0).max()) if ready else 0.0
        wanted = self.scaling.decide(
            FleetFigures(
                interval_s=interval_s,
                work_s=came_s,
                wait_s=wait_s,
                num_open=num_open,
                num_ready=len(ready),
            )
        )
        wanted = min(wanted, self.num_replicas)
        for lane in range(self.num_replicas):
            is_wanted = self.up_at_s[lane] < float("inf")
            if lane < wanted and not is_wanted:
                self.up_at_s[lane] = self.now_s + self.scaling.limits.start_s
            elif lane >= wanted and is_wanted:
                self.up_at_s[lane] = float("inf")  # it drains: what it has goes on
        return sum(
            up_s < float("inf") or bool(each.queue or each.running)
            for up_s, each in zip(self.up_at_s, self.replicas, strict=True)
        )


def request_of(job: Job) -> EngineRequest:
    """Return a request that a placement can weigh."""
    # Only the length of the text counts: its blocks are known.
    return EngineRequest(
        request_id=job.name,
        prompt_token_ids=(0,) * job.call.num_prompt,
        tier="large",
        sampling=_SAMPLING,
    )


def _joined(keys: Sequence[int]) -> bytes:
    return np.array(keys, dtype="<u8").tobytes()
