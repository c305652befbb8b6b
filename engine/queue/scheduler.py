"""Plans passes: admission, prefill chunks, pre-emption."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from outrider.engine.config import EngineConfig
from outrider.engine.queue.block_space import BlockCache, BlockSpace, DraftBlocks
from outrider.engine.queue.policy import NewcomerHolds, QueuePolicy
from outrider.engine.queue.prefill_rows import PrefillRows
from outrider.engine.sequences.sequence import Sequence, SequenceStatus
from outrider.engine.sequences.work_counts import WorkCounts, note_start
from outrider.engine.ttft_predictor import ServiceTimes
from outrider.verifier.params import Tier

# One part of so many of a pass is left to prompts that are less urgent than one that waits.
_PATIENT_PART = 4


@dataclass(slots=True, kw_only=True)
class PassPlan:
    """The sequences that one model computes in one pass; every slot of it is reserved."""

    decodes: list[Sequence] = field(default_factory=list)
    """Sequences whose last token is computed."""
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    """(sequence, number of its uncomputed tokens to compute now)."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compute."""
        return not self.decodes and not self.prefills

    def drop_preempted(self) -> None:
        """Drop sequences that were pre-empted after being planned."""
        self.decodes = [s for s in self.decodes if s.status is SequenceStatus.RUNNING]
        self.prefills = [p for p in self.prefills if p[0].status is SequenceStatus.RUNNING]


class Scheduler:
    """The one queue, and the sequences that run.

    The oldest sequence of a tier always gets on: when blocks run out, drafts give way first, then
    the latest arrival, which is computed again later. So every sequence ends.
    """

    def __init__(
        self,
        *,
        caches: Mapping[Tier, BlockCache],
        config: EngineConfig,
        policy: QueuePolicy,
        drafts: DraftBlocks | None,
    ) -> None:
        self.waiting: list[Sequence] = []
        self.held: list[Sequence] = []  # answers that have ended and may still switch tiers
        self.running: dict[Tier, list[Sequence]] = {tier: [] for tier in caches}
        self.counters: dict[Tier, WorkCounts] = {tier: WorkCounts() for tier in caches}
        self.times = ServiceTimes(config)
        self._max_sequences = config.max_sequences
        self._space = BlockSpace(caches, self.held, drafts)
        self._rows = PrefillRows(config, self.times)
        self._policy = policy
        policy.attach(self.times, max_sequences=config.max_sequences)
        self.before_start: Callable[[Sequence], bool] = lambda _: True
        """Asked about a sequence that has room now; False sets it aside until it is added again."""
        self._promised: list[Sequence] = []  # for each of them a running one gave way

    @property
    def num_running(self) -> int:
        """Sequences of all tiers that hold blocks."""
        return sum(len(running) for running in self.running.values())

    def newcomer_holds(self, tier: Tier) -> NewcomerHolds:
        """Return a tier's sequences that wait because the policy holds them back."""
        return self._policy.newcomer_holds(tier)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that holds nothing; it is not queued where the policy raises."""
        self._policy.added(sequence)
        self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give back its blocks and drafts."""
        if sequence.status is not SequenceStatus.FINISHED:  # else a change of tier broke off
            self._list_of(sequence).remove(sequence)
            if sequence.status is not SequenceStatus.HELD:
                self._policy.removed(sequence)
        self._space.release(sequence)
        sequence.status = SequenceStatus.FINISHED

    def hold(self, sequence: Sequence) -> None:
        """Compute a sequence no further. It keeps its blocks until others need them."""
        self._list_of(sequence).remove(sequence)
        self._policy.removed(sequence)
        sequence.status = SequenceStatus.HELD
        self.held.append(sequence)

    def _list_of(self, sequence: Sequence) -> list[Sequence]:
        if sequence.status is SequenceStatus.RUNNING:
            return self.running[sequence.tier]
        return self.held if sequence.status is SequenceStatus.HELD else self.waiting

    def preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back into the queue; its tokens stay, its KV is recomputed."""
        self.running[sequence.tier].remove(sequence)
        self._space.release(sequence)
        sequence.was_restored = False
        self._policy.preempted(sequence)
        sequence.num_preemptions += 1
        for counts in self.counts(sequence, sequence.tier):
            counts.num_preemptions += 1
        self._enqueue(sequence)

    def counts(self, sequence: Sequence, tier: Tier) -> tuple[WorkCounts, WorkCounts]:
        """Return the counters of a tier's work for a sequence: the tier's and the sequence's."""
        return self.counters[tier], sequence.work_on(tier)

    def note_retracted(self, sequence: Sequence) -> None:
        """Count the answer's tokens so far as discarded."""
        for tier, own in sequence.work.items():
            num_tokens = own.num_output_tokens - own.num_discarded_tokens
            for counts in self.counts(sequence, tier):
                counts.num_discarded_tokens += num_tokens

    def note_pass(self, tier: Tier, *, num_rows: int, elapsed_s: float) -> None:
        """Learn what a row costs, from a pass with many of them."""
        self.times.note_pass(tier, num_rows=num_rows, elapsed_s=elapsed_s)

    def note_prefills(self, plan: PassPlan) -> None:
        """Count the prompt tokens of a computed plan and publish their full blocks."""
        for sequence, num_tokens in plan.prefills:
            computed = sequence.view.num_computed_tokens + num_tokens
            sequence.view.advance(computed, sequence.token_ids)
            if computed == len(sequence.token_ids):
                sequence.view.keep_checkpoint()
            for counts in self.counts(sequence, sequence.tier):
                counts.num_computed_tokens += num_tokens

    def plan_step(self, now_s: float) -> PassPlan:
        """Free seats that waiting sequences have a claim to, then plan the large pass."""
        self.preempt_for_waiting(now_s)
        return self.plan("large", now_s) if "large" in self.running else PassPlan()

    def preempt_for_waiting(self, now_s: float) -> None:
        """Free a seat for each tier whose waiting sequences may claim one, if all are taken.

        To be called once a step, before its first plan: what is planned already cannot give way.
        It also asks the policy for the step's throttle.
        """
        policy = self._policy
        self._rows.throttle = policy.step_throttle(now_s) if policy.has_objectives else None
        self._promised = [s for s in self._promised if s.status is SequenceStatus.WAITING]
        capacity = self._max_sequences
        for tier in self.running:
            if self.num_running + len(self._promised) < capacity or not policy.may_displace:
                return
            for newcomer in self._next_of_each_tenant(tier, now_s):
                tenant = newcomer.request.tenant
                victim = policy.displaced(
                    newcomer,
                    {sequence: 1 for running in self.running.values() for sequence in running},
                    wanted=1 + sum(s.request.tenant == tenant for s in self._promised),
                    capacity=capacity,
                )
                if victim is not None:
                    self.preempt(victim)
                    self._promised.append(newcomer)
                    break

    def _next_of_each_tenant(self, tier: Tier, now_s: float) -> list[Sequence]:
        """Return the waiting in the policy's order, without those that were promised a seat."""
        candidates = [
            sequence
            for sequence in self.waiting
            if sequence.tier == tier and sequence not in self._promised
        ]
        num_tenants = len({sequence.request.tenant for sequence in candidates})
        found: dict[str, Sequence] = {}
        for sequence in self._policy.order(candidates, now_s):
            found.setdefault(sequence.request.tenant, sequence)
            if len(found) == num_tenants:
                break
        return list(found.values())

    def plan(self, tier: Tier, now_s: float, *, with_prefill: bool = True) -> PassPlan:
        """Fill one pass of a tier's model: decode first, then prefill chunks, then newcomers."""
        plan = PassPlan()
        running = sorted(self.running[tier], key=lambda sequence: sequence.arrival_number)
        if (throttle := self._rows.throttle) is not None and throttle.paused:
            running = [sequence for sequence in running if sequence not in throttle.paused]
        prompts: list[Sequence] = []
        for sequence in running:
            if not sequence.is_decoding:
                prompts.append(sequence)
            # an older sequence may have taken this one's seat in this very loop
            elif sequence.status is SequenceStatus.RUNNING and self._reserve(sequence, 1):
                plan.decodes.append(sequence)
        budget = self._plan_prompts(plan, prompts, tier, now_s) if with_prefill else 0
        # Pre-empted sequences are dropped before admission, which may start them again.
        plan.drop_preempted()
        if with_prefill:
            for sequence, num_tokens in self._admit(tier, budget, now_s):
                if num_tokens:
                    plan.prefills.append((sequence, num_tokens))
                else:  # all that it lacks is the last token, which a cascade decodes
                    plan.decodes.append(sequence)
            plan.drop_preempted()  # newcomers may have displaced others
        return plan

    def _plan_prompts(
        self, plan: PassPlan, prompts: list[Sequence], tier: Tier, now_s: float
    ) -> int:
        """Give the prompts that are under way their rows; returns how many a pass has left."""
        is_decoding = any(s.is_decoding for others in self.running.values() for s in others)
        budget = self._rows.begin_pass(tier, is_decoding=is_decoding) - len(plan.decodes)
        if self._policy.has_objectives:
            return budget - self._plan_by_urgency(plan, prompts, tier, budget, now_s)
        for sequence in prompts:
            budget -= self._plan_prompt(plan, sequence, budget)
        return budget

    def _plan_by_urgency(
        self, plan: PassPlan, prompts: list[Sequence], tier: Tier, budget: int, now_s: float
    ) -> int:
        """The most urgent first; those that are less so than a newcomer leave it most of the rows.

        Returns how many rows were given away.
        """
        start_by_s = self._policy.start_by_s
        newcomer_s = math.inf
        if prompts and self.num_running < self._max_sequences:
            waiting = (start_by_s(s) for s in self.waiting if s.tier == tier)
            newcomer_s = min((at_s for at_s in waiting if at_s >= now_s), default=math.inf)
        left, for_patient = budget, max(budget // _PATIENT_PART, 1)
        for sequence in sorted(prompts, key=start_by_s):
            is_patient = start_by_s(sequence) > newcomer_s
            rows = self._plan_prompt(plan, sequence, min(left, for_patient) if is_patient else left)
            left -= rows
            for_patient -= rows * is_patient
        return budget - left

    def _plan_prompt(self, plan: PassPlan, sequence: Sequence, budget: int) -> int:
        """Take the next chunk of a prompt into a pass, if it still runs; returns its rows."""
        if sequence.status is not SequenceStatus.RUNNING:
            return 0
        num_tokens = self._rows.take(sequence, budget)
        if num_tokens <= 0 or not self._reserve(sequence, num_tokens):
            return 0
        plan.prefills.append((sequence, num_tokens))
        return num_tokens

    def _admit(self, tier: Tier, budget: int, now_s: float) -> Iterator[tuple[Sequence, int]]:
        """Start waiting sequences while rows and blocks last, in the policy's order.

        Gives the number of tokens to prefill; 0 for one that decodes at once.
        """
        max_sequences = self._max_sequences
        if budget <= 0 or self.num_running >= max_sequences:
            return
        candidates = [sequence for sequence in self.waiting if sequence.tier == tier]
        for sequence in self._policy.order(candidates, now_s):
            if budget <= 0 or self.num_running >= max_sequences:
                return
            if self.num_running + self._num_promised(sequence) >= max_sequences:
                continue
            if self._prompt_is_under_way(sequence) or self._rows.leaves_out(sequence):
                continue
            if not self._fits(sequence) and not self._displace(sequence):
                return
            if not self.before_start(sequence):
                self.remove(sequence)
                sequence.status = SequenceStatus.WAITING
                continue
            num_tokens = self._rows.take(sequence, budget)
            num_rows = max(num_tokens, 1)
            has_room = self._space.reserve(sequence, sequence.view.num_computed_tokens + num_rows)
            assert has_room, "its whole prompt fits"
            self.waiting.remove(sequence)
            self.running[tier].append(sequence)
            sequence.status = SequenceStatus.RUNNING
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now_s
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = sequence.view.num_cached_tokens
            note_start(
                self.counts(sequence, tier),
                num_tokens=len(sequence.token_ids),
                num_cached=sequence.view.num_cached_tokens,
            )
            self._policy.started(sequence)
            budget -= num_rows
            yield sequence, num_tokens

    def ahead_of(self, newcomer: Sequence, now_s: float) -> list[Sequence]:
        """Return the sequences of its tier that would start before a newcomer, in order."""
        self._policy.added(newcomer)
        try:
            candidates = [s for s in self.waiting if s.tier == newcomer.tier]
            order = self._policy.order([*candidates, newcomer], now_s)
            return list(takewhile(lambda sequence: sequence is not newcomer, order))
        finally:
            self._policy.removed(newcomer)

    def gives_way_to(self, sequence: Sequence, newcomer: Sequence) -> bool:
        """True if a running sequence would lose its seat to a newcomer that needs one."""
        return self._policy.gives_way_to(sequence, newcomer)

    def _num_promised(self, sequence: Sequence) -> int:
        """Count how many seats are kept for others."""
        return sum(
            other is not sequence and other.status is SequenceStatus.WAITING
            for other in self._promised
        )

    def _fits(self, newcomer: Sequence) -> bool:
        return self._space.fits(newcomer, self.running[newcomer.tier])

    def _displace(self, newcomer: Sequence) -> bool:
        """Pre-empt those whose blocks the newcomer has a claim to; whether it fits then."""
        tier, view = newcomer.tier, newcomer.view
        while self._policy.may_displace:
            victim = self._policy.displaced(
                newcomer,
                {sequence: len(sequence.view.block_table) for sequence in self.running[tier]},
                wanted=view.num_blocks_needed(len(newcomer.token_ids)),
                capacity=view.pool.num_blocks,
            )
            if victim is None:
                return False
            self.preempt(victim)
            if self._fits(newcomer):
                return True
        return False

    def _prompt_is_under_way(self, sequence: Sequence) -> bool:
        """True if another choice of the same request is computing the blocks both share."""
        group_id = sequence.request.group_id
        if group_id is None:
            return False
        num_tokens, block_size = sequence.num_prompt_tokens, sequence.view.pool.block_size
        num_shared = min(num_tokens // block_size * block_size, num_tokens - 1)
        return any(
            other.request.group_id == group_id and other.view.num_computed_tokens < num_shared
            for other in self.running[sequence.tier]
        )

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for a running sequence's next tokens; False if it had to give way itself."""
        num_slots = sequence.view.num_computed_tokens + num_tokens
        while not self._space.reserve(sequence, num_slots):
            victim = max(self.running[sequence.tier], key=lambda s: s.arrival_number)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True
