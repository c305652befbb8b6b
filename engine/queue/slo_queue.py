"""Latency objectives: urgent sequences go first, as far as fairness between tenants allows.

Between tenants the fair queue decides. Within a tenant the request whose first token has the least
slack starts first (earliest deadline first, less the time that its own prompt takes). One that can
no longer meet its deadline lets those pass that can. So under overload few deadlines are missed,
instead of all (the domino effect of earliest deadline first; Locke, "Best-Effort Decision Making
for Real-Time Scheduling", 1986). Batch requests fill what is left.

A newcomer waits where one answer more would make all of them slower than they may be: under
overload some requests are late then, and the others keep their pace. That is so for objectives that
were asked for; assumed ones only order the queue, and make batch give way.

No sequence starves. One of every few starts is for sequences that were passed over for long, oldest
first. A sequence is paused, or loses its seat, a bounded number of times.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Final

from outrider.engine.queue.deadlines import Deadlines, SloQueueConfig
from outrider.engine.queue.fair_queue import FairQueue, FairQueueConfig
from outrider.engine.queue.policy import NO_HOLDS, NewcomerHolds, StepThrottle
from outrider.engine.request import LOW, NORMAL
from outrider.engine.sequences.sequence import Sequence, SequenceStatus
from outrider.engine.ttft_predictor import ServiceTimes
from outrider.verifier.params import Tier

# A newcomer that has used up this share of its time, and still has no seat, may take another's.
_PRESSING_SHARE: Final = 0.5


class SloQueue(FairQueue):
    """The fair queue with deadlines within each tenant; without deadlines it is the fair queue.

    A batch request counts as low priority between tenants as well, until it has waited for
    `batch_aging_s`.
    """

    def __init__(
        self, config: SloQueueConfig | None = None, *, fair: FairQueueConfig | None = None
    ) -> None:
        """`fair`: how tenants share; see there."""
        super().__init__(fair)
        self._slo = config or SloQueueConfig()
        self._deadlines = Deadlines(self._slo)
        self._max_batch_running = 1
        self._stated: dict[Sequence, None] = {}  # with an objective, not batch
        self._batch: dict[Sequence, int] = {}  # how often each has been displaced
        self._paused_since_s: dict[Sequence, float] = {}
        self._batch_running: set[Sequence] = set()
        self._num_here = 0
        self._now_s = 0.0  # of the step
        self._is_pressed = False  # one that is here and has asked for it is short of time
        self._aged: frozenset[Sequence] = frozenset()
        self._num_since_aged: dict[Tier, int] = {}
        self._held_since_s: dict[Sequence, float] = {}
        self._holds: dict[Tier, NewcomerHolds] = {}  # that have ended

    def attach(self, times: ServiceTimes, *, max_sequences: int) -> None:
        """Go by these times, and leave batch its share of so many seats."""
        self._deadlines.times = times
        self._max_batch_running = max(int(max_sequences * self._slo.batch_share), 1)

    # ---- what happens to sequences --------------------------------------------------------

    @property
    def has_objectives(self) -> bool:
        """True if any sequence has a latency objective."""
        return bool(self._stated or self._batch)

    def added(self, sequence: Sequence) -> None:
        """A sequence came to the queue."""
        super().added(sequence)
        self._num_here += 1
        objective = sequence.request.objective
        if objective.is_batch:
            self._batch[sequence] = 0
        elif objective.is_stated:
            self._stated[sequence] = None

    def started(self, sequence: Sequence) -> None:
        """Charge the tenant, and count the sequences passed over meanwhile."""
        super().started(sequence)
        self._let_go(sequence)
        if sequence in self._batch:
            self._batch_running.add(sequence)
        if sequence in self._aged:
            self._num_since_aged[sequence.tier] = 0
        elif self._aged:
            self._num_since_aged[sequence.tier] = self._num_since_aged.get(sequence.tier, 0) + 1

    def removed(self, sequence: Sequence) -> None:
        """Forget it."""
        super().removed(sequence)
        self._let_go(sequence)
        self._num_here -= 1
        self._batch_running.discard(sequence)
        self._batch.pop(sequence, None)
        self._stated.pop(sequence, None)
        self._paused_since_s.pop(sequence, None)
        if sequence in self._aged:
            self._aged -= {sequence}

    def preempted(self, sequence: Sequence) -> None:
        """Note that it stands in the queue again: no pause of it goes on."""
        self._batch_running.discard(sequence)
        self._paused_since_s.pop(sequence, None)

    def start_by_s(self, sequence: Sequence) -> float:
        """Return the latest time to begin its prompt for its first token to come in time."""
        return self._deadlines.start_by_s(sequence)

    # ---- the order ----------------------------------------------------------------------

    def order(self, waiting: list[Sequence], now_s: float) -> Iterator[Sequence]:
        """Yield sequences as the fair queue does, without those that must not start yet."""
        if not self.has_objectives:
            yield from super().order(waiting, now_s)
            return
        self._now_s = now_s
        for sequence in super().order(waiting, now_s):
            if self._may_start(sequence, now_s):
                self._let_go(sequence)
                yield sequence
            else:
                self._held_since_s.setdefault(sequence, now_s)

    def _let_go(self, sequence: Sequence) -> None:
        """Count for how long a sequence was held, if it was."""
        since_s = self._held_since_s.pop(sequence, self._now_s)
        if since_s < self._now_s:
            before = self._holds.get(sequence.tier, NO_HOLDS)
            self._holds[sequence.tier] = NewcomerHolds(
                num_ended=before.num_ended + 1,
                seconds=before.seconds + self._now_s - since_s,
            )

    def newcomer_holds(self, tier: Tier) -> NewcomerHolds:
        """Return those that would slow others down, or have to let an urgent one pass."""
        ended = self._holds.get(tier, NO_HOLDS)
        since_s = [at_s for other, at_s in self._held_since_s.items() if other.tier == tier]
        return NewcomerHolds(
            num_now=len(since_s),
            num_ended=ended.num_ended,
            seconds=ended.seconds + sum(self._now_s - at_s for at_s in since_s),
        )

    def _may_start(self, sequence: Sequence, now_s: float) -> bool:
        """True if no urgent sequence would be delayed and batch leaves seats to others."""
        is_batch = sequence in self._batch
        is_full = len(self._batch_running) >= self._max_batch_running
        if is_batch and is_full and self._num_here > len(self._batch):
            return False
        if sequence in self._aged:
            return True
        if sequence.request.objective.is_yielding and self._answers_others():
            return False
        if self._slows_answers(sequence, now_s):
            return False
        if not self._is_pressed:
            return True
        if is_batch or self._deadlines.is_late(sequence, now_s):
            return False
        return not self._deadlines.has_time(sequence, now_s)

    def _slows_answers(self, sequence: Sequence, now_s: float) -> bool:
        """True if, with its answer beside them, answers would miss their time between tokens.

        Batch beside them does not count for a request of another kind: it stands still. An
        objective that not even a lone answer could meet holds nothing back. A tenant with no more
        than its share of the answers is not held back by the objectives of others.
        """
        times = self._deadlines.times
        if times is None or sequence.tier != "large":
            return False
        pace = times.pace
        running = [
            other
            for other in self._stated
            if other.status is SequenceStatus.RUNNING and other.tier == "large"
        ]
        num_answers = 1 + len(running)
        if sequence in self._batch:
            num_answers += len(self._batch_running)
        alone_s, expected_s = pace.expected_s(1), pace.expected_s(num_answers)
        slowed = {
            other.request.tenant
            for other in (*running, sequence)
            if (inter_token_s := other.request.objective.inter_token_s) is not None
            and not other.request.objective.is_assumed
            and alone_s <= inter_token_s * self._slo.pace < expected_s
            and not self._deadlines.is_behind(other, inter_token_s, now_s)
        }
        if not slowed or sequence in self._batch or sequence.request.tenant in slowed:
            return bool(slowed)
        return not self._is_within_share(sequence)

    def _is_within_share(self, newcomer: Sequence) -> bool:
        """True if, with it, its tenant has no more of the running answers than its weight gives."""
        running = [
            other.request
            for other in self._charges
            if other.status is SequenceStatus.RUNNING and other.tier == newcomer.tier
        ]
        answers = [*running, newcomer.request]
        weights = {request.tenant: request.weight for request in answers}
        num_own = sum(request.tenant == newcomer.request.tenant for request in answers)
        share = newcomer.request.weight / sum(weights.values())
        return num_own <= share * len(answers)

    def _arranged(self, waiting: list[Sequence], now_s: float) -> list[Sequence]:
        """Order by slack; sequences passed over for long come in between, the oldest first."""
        self._aged = frozenset()
        if not self.has_objectives:
            return super()._arranged(waiting, now_s)
        ranked = sorted(waiting, key=lambda sequence: self._rank(sequence, now_s))
        aged = [sequence for sequence in ranked if self._deadlines.is_aged(sequence, now_s)]
        if not aged:
            return ranked
        self._aged = frozenset(aged)
        aged.sort(key=attrgetter("arrival_number"))
        others = (sequence for sequence in ranked if sequence not in self._aged)
        return list(self._interleaved(others, aged))

    def _interleaved(self, others: Iterable[Sequence], aged: list[Sequence]) -> Iterator[Sequence]:
        every = self._slo.aged_every
        number = self._num_since_aged.get(aged[0].tier, 0)
        queue = iter(aged)
        for sequence in others:
            number += 1
            if number >= every and (one := next(queue, None)) is not None:
                number = 0
                yield one
            yield sequence
        yield from queue

    def _rank(self, sequence: Sequence, now_s: float) -> tuple[int, float, int]:
        """Lower starts earlier: begun and lost its seat, in time, late; then batch likewise."""
        number = sequence.arrival_number
        has_begun = sequence in self._charges
        if sequence in self._batch:
            return 3 if has_begun else 4, 0.0, number
        if has_begun:
            return 0, 0.0, number
        start_by_s = self.start_by_s(sequence)
        if now_s > start_by_s and sequence.request.objective.ttft_s is not None:
            return 2, 0.0, number
        return 1, start_by_s, number

    def _priority(self, sequence: Sequence, now_s: float) -> int:
        """Age goes by the objective where there is one, not by the fair queue's own measure."""
        objective = sequence.request.objective
        if not objective.is_batch and objective.ttft_s is None:
            return super()._priority(sequence, now_s)
        own = sequence.request.priority
        if sequence in self._aged:
            return max(own, NORMAL)
        return LOW if objective.is_batch else own

    # ---- the throttle ---------------------------------------------------------------------

    def step_throttle(self, now_s: float) -> StepThrottle | None:
        """Batch answers stand still, and batch prompts wait, while others are short of time."""
        self._now_s = now_s
        spare_s = {s: self._deadlines.spare_s(s, now_s) for s in self._stated}
        self._is_pressed = any(
            seconds < 0.0 and not s.request.objective.is_assumed for s, seconds in spare_s.items()
        )
        if not self._batch:
            return None
        least_s = min(spare_s.values(), default=math.inf)
        if least_s >= 0.0:
            return self._yielding(least_s, now_s)
        paused: frozenset[Sequence] = frozenset()
        # For one that has no seat yet, it would only make all of them end later.
        if any(s.status is SequenceStatus.RUNNING for s in self._stated):
            paused = frozenset(s for s in self._batch_running if self._pauses(s, now_s))
        return StepThrottle(paused=paused, batch_prefill_s=0.0)

    def _yielding(self, least_s: float, now_s: float) -> StepThrottle:
        """Nobody is short of time: what yields stands still while others are answered."""
        yielding = [s for s in self._batch_running if s.request.objective.is_yielding]
        if not yielding or not self._answers_others():
            self._paused_since_s.clear()
            return StepThrottle(paused=frozenset(), batch_prefill_s=least_s)
        paused = frozenset(s for s in yielding if self._pauses(s, now_s))
        return StepThrottle(paused=paused, batch_prefill_s=0.0)

    def _answers_others(self) -> bool:
        """True if a sequence is answered that is not batch."""
        return any(
            s.status is SequenceStatus.RUNNING and s not in self._batch for s in self._charges
        )

    def _pauses(self, sequence: Sequence, now_s: float) -> bool:
        """True if its pause begins or goes on; after `max_pause_s` it gets one step."""
        since_s = self._paused_since_s.setdefault(sequence, now_s)
        if now_s - since_s < self._slo.max_pause_s:
            return True
        del self._paused_since_s[sequence]
        return False

    # ---- pre-emption ----------------------------------------------------------------------

    @property
    def may_displace(self) -> bool:
        """True if there is more than one tenant, or batch that could make room for others."""
        return bool(self._batch and self._stated) or super().may_displace

    def displaced(
        self, newcomer: Sequence, holders: Mapping[Sequence, int], *, wanted: int, capacity: int
    ) -> Sequence | None:
        """Return the fair queue's choice; else, for one short of time, the cheapest batch answer.

        Cheapest is the one that has the least to compute again.
        """
        victim = super().displaced(newcomer, holders, wanted=wanted, capacity=capacity)
        if victim is not None or not self._batch or not self._is_pressing(newcomer):
            return victim
        able = [sequence for sequence in holders if self.gives_way_to(sequence, newcomer)]
        if not able:
            return None
        victim = min(able, key=lambda s: (s.view.num_computed_tokens, -s.arrival_number))
        self._batch[victim] += 1
        return victim

    def gives_way_to(self, sequence: Sequence, newcomer: Sequence) -> bool:
        """True if it is batch that may still lose its seat, and the newcomer's tenant may ask."""
        num_displaced = self._batch.get(sequence)
        if num_displaced is None or num_displaced >= self._slo.max_displacements:
            return False
        if newcomer.request.objective.is_batch or newcomer.request.objective.ttft_s is None:
            return False
        if sequence.request.tenant == newcomer.request.tenant:
            return True
        lead = self._account(newcomer).served - self._books_of(newcomer).virtual_time
        return lead <= self._slo.max_lead_tokens

    def _is_pressing(self, newcomer: Sequence) -> bool:
        """True if it has little time left, and enough to gain by a seat."""
        ttft_s = newcomer.request.objective.ttft_s
        if newcomer not in self._stated or ttft_s is None or newcomer.first_token_s is not None:
            return False
        now_s = self._now_s
        return now_s <= self.start_by_s(newcomer) <= now_s + _PRESSING_SHARE * ttft_s
