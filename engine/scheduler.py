"""Who computes what in the next pass: admission, prefill chunks, pre-emption."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from engine.block_pool import OutOfBlocksError
from engine.config import EngineConfig
from engine.protocols import Drafter, QueuePolicy
from engine.request import Tier
from engine.runner import ModelRunner
from engine.sequence import Sequence, SequenceStatus
from engine.work_counts import WorkCounts, note_start

_EMA_WEIGHT = 0.2
# Below this many rows a pass says little about the cost of one more row.
_MIN_ROWS_FOR_COST = 32


@dataclass(slots=True, kw_only=True)
class PassPlan:
    """What one model computes in one pass; every slot it names is reserved.

    decodes: sequences whose last token is computed. prefills: (sequence, number of its uncomputed
    tokens to compute now).
    """

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.decodes and not self.prefills

    def leave_out_waiting(self) -> None:
        """Take out who was pre-empted since he was planned."""
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
        runners: Mapping[Tier, ModelRunner],
        config: EngineConfig,
        policy: QueuePolicy,
        drafter: Drafter | None,
    ) -> None:
        self.waiting: list[Sequence] = []
        self.held: list[Sequence] = []  # answers that have ended and may be handed over
        self.running: dict[Tier, list[Sequence]] = {tier: [] for tier in runners}
        self.counters: dict[Tier, WorkCounts] = {tier: WorkCounts() for tier in runners}
        self._runners = runners
        self._config = config
        self._policy = policy
        self._drafter = drafter
        self._row_cost_s: dict[Tier, float] = {}
        self._promised: list[Sequence] = []  # for each of them a running one gave way

    @property
    def num_running(self) -> int:
        """Sequences of all tiers that hold blocks."""
        return sum(len(running) for running in self.running.values())

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that holds nothing."""
        self._enqueue(sequence)
        self._policy.added(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give back its blocks and drafts."""
        self._list_of(sequence).remove(sequence)
        if sequence.status is not SequenceStatus.HELD:
            self._policy.removed(sequence)
        self._let_go(sequence)
        sequence.status = SequenceStatus.FINISHED

    def hold(self, sequence: Sequence) -> None:
        """Stop computing a running sequence. It keeps its blocks until others need them."""
        self.running[sequence.tier].remove(sequence)
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
        self._let_go(sequence)
        sequence.num_preemptions += 1
        for counts in self.counts(sequence, sequence.tier):
            counts.num_preemptions += 1
        self._enqueue(sequence)

    def counts(self, sequence: Sequence, tier: Tier) -> tuple[WorkCounts, WorkCounts]:
        """Where a tier's work for a sequence is counted: the tier's counters and its own."""
        return self.counters[tier], sequence.work_on(tier)

    def note_retracted(self, sequence: Sequence) -> None:
        """All that the sequence's answer has by now is about to be taken back."""
        for tier, own in sequence.work.items():
            num_tokens = own.num_output_tokens - own.num_discarded_tokens
            for counts in self.counts(sequence, tier):
                counts.num_discarded_tokens += num_tokens

    def note_pass(self, tier: Tier, *, num_rows: int, elapsed_s: float) -> None:
        """Learn what a row costs, from a pass with many of them."""
        if num_rows >= _MIN_ROWS_FOR_COST:
            cost_s = elapsed_s / num_rows
            known_s = self._row_cost_s.get(tier, cost_s)
            self._row_cost_s[tier] = known_s + _EMA_WEIGHT * (cost_s - known_s)

    def make_way(self, now_s: float) -> None:
        """Where every place is taken, free one for each tier where somebody has a claim to it.

        To be called once a step, before its first plan: what is planned already cannot give way.
        """
        self._promised = [s for s in self._promised if s.status is SequenceStatus.WAITING]
        capacity = self._config.max_sequences
        for tier in self.running:
            if self.num_running + len(self._promised) < capacity or not self._policy.may_displace:
                return
            for newcomer in self._next_of_each_tenant(tier, now_s):
                tenant = newcomer.request.tenant
                victim = self._policy.displaced(
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
        """In the policy's order; without those that were promised a place."""
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
        for sequence in running:
            # an older sequence may have taken this one's place in this very loop
            is_due = sequence.status is SequenceStatus.RUNNING and sequence.is_decoding
            if is_due and self._reserve(sequence, 1):
                plan.decodes.append(sequence)
        if with_prefill:
            budget = self._prefill_budget(tier) - len(plan.decodes)
            for sequence in running:
                if sequence.status is SequenceStatus.RUNNING and not sequence.is_decoding:
                    num_tokens = min(sequence.num_prefill_tokens, budget)
                    if num_tokens > 0 and self._reserve(sequence, num_tokens):
                        plan.prefills.append((sequence, num_tokens))
                        budget -= num_tokens
        # Who gave way is taken out before admission, which may start it again.
        plan.leave_out_waiting()
        if with_prefill:
            for sequence, num_tokens in self._admit(tier, budget, now_s):
                if num_tokens:
                    plan.prefills.append((sequence, num_tokens))
                else:  # all that it lacks is the last token, which a cascade decodes
                    plan.decodes.append(sequence)
            plan.leave_out_waiting()  # newcomers may have displaced somebody
        return plan

    def _prefill_budget(self, tier: Tier) -> int:
        """Rows that a pass may have; fewer where somebody waits for the next token meanwhile."""
        config = self._config
        cost_s = self._row_cost_s.get(tier)
        somebody_decodes = any(s.is_decoding for running in self.running.values() for s in running)
        if cost_s is None or not somebody_decodes:
            return config.max_tokens_per_step
        affordable = max(int(config.prefill_chunk_s / cost_s), config.min_prefill_tokens)
        return min(affordable, config.max_tokens_per_step)

    def _admit(self, tier: Tier, budget: int, now_s: float) -> Iterator[tuple[Sequence, int]]:
        """Start waiting sequences while rows and blocks last, in the policy's order.

        Gives the number of tokens to prefill; 0 for one that decodes at once.
        """
        max_sequences = self._config.max_sequences
        if budget <= 0 or self.num_running >= max_sequences:
            return
        candidates = [sequence for sequence in self.waiting if sequence.tier == tier]
        for sequence in self._policy.order(candidates, now_s):
            if budget <= 0 or self.num_running >= max_sequences:
                return
            if self.num_running + self._num_promised(sequence) >= max_sequences:
                continue
            if self._prompt_is_under_way(sequence):
                continue
            if not self._fits(sequence) and not self._displace(sequence):
                return
            num_tokens = min(sequence.num_prefill_tokens, budget)
            num_rows = max(num_tokens, 1)
            self._runners[tier].copy_blocks(
                sequence.view.reserve(sequence.view.num_computed_tokens + num_rows)
            )
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

    def _num_promised(self, sequence: Sequence) -> int:
        """How many places are kept for others."""
        return sum(
            other is not sequence and other.status is SequenceStatus.WAITING
            for other in self._promised
        )

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
        """Whether another choice of the same request is computing the blocks both share."""
        group_id = sequence.request.group_id
        if group_id is None:
            return False
        num_tokens, block_size = sequence.num_prompt_tokens, sequence.view.pool.block_size
        num_shared = min(num_tokens // block_size * block_size, num_tokens - 1)
        return any(
            other.request.group_id == group_id and other.view.num_computed_tokens < num_shared
            for other in self.running[sequence.tier]
        )

    def _fits(self, sequence: Sequence) -> bool:
        """Match the prefix cache and see whether the whole prompt can be held beside the others.

        One block for each running sequence is kept free, or the newcomer would soon be pre-empted.
        """
        tier = sequence.tier
        pool = self._runners[tier].pool
        headroom = len(self.running[tier])
        view = sequence.view
        if pool.num_available <= headroom:
            self._make_room(tier, headroom + 1)
            if pool.num_available <= headroom:
                return False
        view.match_prefix(sequence.token_ids)
        needed = view.num_blocks_needed(len(sequence.token_ids)) + headroom
        if needed > pool.num_available:
            self._make_room(tier, needed)
        if needed > pool.num_available:
            view.release()
            return False
        return True

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for a running sequence's next tokens; False if it had to give way itself."""
        view = sequence.view
        num_slots = view.num_computed_tokens + num_tokens
        while True:
            try:
                copies = view.reserve(num_slots)
            except OutOfBlocksError:
                if self._make_room(sequence.tier, view.num_blocks_needed(num_slots)):
                    continue
                victim = max(self.running[sequence.tier], key=lambda s: s.arrival_number)
                self.preempt(victim)
                if victim is sequence:
                    return False
            else:
                self._runners[sequence.tier].copy_blocks(copies)
                return True

    def _make_room(self, tier: Tier, num_blocks: int) -> bool:
        """Let go what answers can do without; True if that made enough room.

        Held answers go first: nobody may ever ask for what they keep.
        """
        pool = self._runners[tier].pool
        for sequence in reversed(self.held):
            if pool.num_available >= num_blocks:
                return True
            if sequence.tier == tier:
                sequence.view.release()
        if tier == "small" and self._drafter is not None:
            self._drafter.reclaim(num_blocks - pool.num_available)
        return pool.num_available >= num_blocks

    def _let_go(self, sequence: Sequence) -> None:
        sequence.view.release()
        if self._drafter is not None:
            self._drafter.release(sequence)
