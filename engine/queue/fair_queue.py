"""Fair queueing between tenants: deficit round robin on tokens, with weights and priorities.

Deficit round robin gives each tenant a quantum a round and lets it start what the quantum pays for
(Shreedhar and Varghese, "Efficient Fair Queuing using Deficit Round Robin", 1995). Here the quantum
is taken to its limit, a token: next is the tenant that has had least so far, in tokens over weight.
That is as fair as rounds can be, and needs none (Goyal et al., "Start-time Fair Queuing", 1996;
Sheng et al., "Fairness in Serving Large Language Models", 2024, count the same way).
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from operator import attrgetter
from typing import Final

from outrider.engine.queue.policy import QueuePolicy
from outrider.engine.request import HIGH, LOW
from outrider.engine.sequences.sequence import Sequence
from outrider.engine.ttft_predictor import ServiceTimes
from outrider.verifier.params import Tier

_FIRST_GUESS_TOKENS: Final = 128.0
_LENGTH_WEIGHT: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class FairQueueConfig:
    """Bounds on the effect of priorities."""

    aging_s: float = 30.0
    """A request that has waited so long counts as the next higher priority, and again after as
    long. So no tenant starves behind urgent requests, its own or others'."""
    max_lead_tokens: float = 2048.0
    """The most tokens (over its weight) that a tenant may have had beyond the one whose turn it is;
    beyond that its high priority does not count. Priority is being served sooner, not more."""


@dataclass(slots=True, kw_only=True)
class _Account:
    """The account of one tenant on one tier."""

    served: float
    """Tokens that it has had, over its weight."""
    weight: float
    mean_answer_tokens: float
    num_present: int = 0
    """The tenant's sequences on the tier, waiting or running."""
    num_fresh: int = 0
    """The tenant's sequences on the tier that never ran."""

    def expected_answer(self, sequence: Sequence) -> float:
        """Count how many tokens a sequence will still write, as far as one can know."""
        return min(self.mean_answer_tokens, sequence.num_remaining_tokens)


@dataclass(slots=True, kw_only=True)
class _Charge:
    """The charge for a sequence's start."""

    num_prompt_tokens: int
    num_answer_tokens: float
    num_output_before: int
    gave_way: bool = False


@dataclass(slots=True)
class _Books:
    """The accounts of one tier."""

    accounts: dict[str, _Account] = field(default_factory=dict)
    virtual_time: float = 0.0
    """The least `served` of a tenant with fresh sequences, at the last start. A tenant that had
    nothing waiting begins there: idle time earns no credit."""
    mean_answer_tokens: float = _FIRST_GUESS_TOKENS
    """The first mean of a tenant that has no account yet."""

    def enter(self, tenant: str, weight: float) -> None:
        """Open an account, or count one sequence more in it."""
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = _Account(
                served=self.virtual_time, weight=weight, mean_answer_tokens=self.mean_answer_tokens
            )
        if not account.num_fresh:
            account.served = max(account.served, self.virtual_time)
        account.num_fresh += 1
        account.num_present += 1
        account.weight = weight

    def charge(self, tenant: str, cost: float) -> None:
        """Charge a tenant for a sequence that starts for the first time."""
        account = self.accounts[tenant]
        # The least of all: a high priority may start a tenant that has had more.
        least = min(other.served for other in self.accounts.values() if other.num_fresh)
        self.virtual_time = max(self.virtual_time, least)
        account.served += cost
        account.num_fresh -= 1

    def leave(self, tenant: str, *, is_fresh: bool) -> None:
        """Note that a sequence has gone; forget tenants that would lose nothing by it."""
        account = self.accounts[tenant]
        account.num_present -= 1
        account.num_fresh -= is_fresh
        if not any(account.num_present for account in self.accounts.values()):
            self.accounts.clear()
            return
        for name, account in list(self.accounts.items()):
            if not account.num_present and account.served <= self.virtual_time:
                del self.accounts[name]


class FairQueue(QueuePolicy):
    """Tenants take turns by what they have had; a tenant's own requests by priority and arrival.

    A start is charged with the tokens to compute and the answer to be expected; the end corrects
    it. A pre-empted sequence comes first of its tenant and is not charged again. Each
    tier is a queue by itself.

    Where seats or blocks are short, a tenant below its share of them may displace a sequence of
    one that is above; the same sequence once at most, so that every one ends.
    """

    def __init__(self, config: FairQueueConfig | None = None) -> None:
        """`config`: bounds on priorities; None for the defaults."""
        self._config = config or FairQueueConfig()
        self._books: dict[Tier, _Books] = {}
        self._charges: dict[Sequence, _Charge] = {}

    def attach(self, times: ServiceTimes, *, max_sequences: int) -> None:
        """Ignore times and seats: this order depends on neither."""

    # ---- what happens to sequences --------------------------------------------------------

    def preempted(self, sequence: Sequence) -> None:
        """A running sequence went back to the queue; it keeps its charge."""

    def added(self, sequence: Sequence) -> None:
        """A sequence came to the queue."""
        request = sequence.request
        self._books_of(sequence).enter(request.tenant, request.weight)

    def started(self, sequence: Sequence) -> None:
        """Charge the tenant, unless the sequence started before and was charged then."""
        if sequence in self._charges:
            return
        account = self._account(sequence)
        charge = self._charges[sequence] = _Charge(
            num_prompt_tokens=sequence.num_uncomputed_tokens,
            num_answer_tokens=account.expected_answer(sequence),
            num_output_before=sequence.num_output_tokens,
        )
        request = sequence.request
        cost = charge.num_prompt_tokens + charge.num_answer_tokens
        self._books_of(sequence).charge(request.tenant, cost / request.weight)

    def removed(self, sequence: Sequence) -> None:
        """Correct the charge of a sequence that has gone, by what it used."""
        charge = self._charges.pop(sequence, None)
        if charge is not None:
            account = self._account(sequence)
            num_written = sequence.num_output_tokens - charge.num_output_before
            too_much = charge.num_answer_tokens - num_written
            if num_written:
                for known in (account, self._books_of(sequence)):
                    gap = num_written - known.mean_answer_tokens
                    known.mean_answer_tokens += _LENGTH_WEIGHT * gap
            else:  # it never came to the end of its prompt
                too_much += min(charge.num_prompt_tokens, sequence.num_uncomputed_tokens)
            account.served -= too_much / sequence.request.weight
        self._books_of(sequence).leave(sequence.request.tenant, is_fresh=charge is None)

    # ---- the order ----------------------------------------------------------------------

    def order(self, waiting: list[Sequence], now_s: float) -> Iterator[Sequence]:
        """Yield one tier's sequences in starting order. Lazy: mostly the first few are wanted."""
        if not waiting:
            return
        queues: dict[tuple[str, int], deque[Sequence]] = {}
        for sequence in self._arranged(waiting, now_s):
            key = (sequence.request.tenant, self._priority(sequence, now_s))
            if (queue := queues.get(key)) is None:
                queue = queues[key] = deque()
            queue.append(sequence)
        yield from self._take_turns(queues)

    def _arranged(self, waiting: list[Sequence], now_s: float) -> list[Sequence]:
        """Order within a tenant and a priority; pre-empted sequences come first.

        `now_s`: for policies that go by it.
        """
        by_arrival = sorted(waiting, key=attrgetter("arrival_number"))
        if self._charges:
            by_arrival.sort(key=lambda sequence: sequence not in self._charges)
        return by_arrival

    def _priority(self, sequence: Sequence, now_s: float) -> int:
        """Return what a sequence's priority has come to by now; batch work begins with LOW."""
        priority, aging_s = sequence.request.priority, self._config.aging_s
        if sequence.request.objective.is_batch:
            priority = LOW
        if (waited_s := now_s - sequence.submitted_s) >= aging_s:
            return min(priority + int(waited_s / aging_s), HIGH)
        return priority

    def _take_turns(self, queues: dict[tuple[str, int], deque[Sequence]]) -> Iterator[Sequence]:
        """Yield sequences by turns, from one queue for each tenant and priority."""
        books = self._books_of(next(iter(queues.values()))[0])
        served = {tenant: books.accounts[tenant].served for tenant, _ in queues}
        highest_served = books.virtual_time + self._config.max_lead_tokens

        def rank(tenant: str, priority: int) -> tuple[int, float, int, int]:
            counts_as = priority if served[tenant] <= highest_served else min(priority, HIGH - 1)
            head = queues[tenant, priority][0]
            return (-counts_as, served[tenant], -priority, head.arrival_number)

        turns = [(rank(tenant, priority), tenant, priority) for tenant, priority in queues]
        heapify(turns)
        while turns:
            known, tenant, priority = turns[0]
            now = rank(tenant, priority)
            if now != known:  # the tenant has had something by another of its queues
                heapreplace(turns, (now, tenant, priority))
                continue
            queue = queues[tenant, priority]
            sequence = queue.popleft()
            if sequence not in self._charges:
                account = books.accounts[tenant]
                cost = sequence.num_uncomputed_tokens + account.expected_answer(sequence)
                served[tenant] += cost / sequence.request.weight
            if queue:
                heapreplace(turns, (rank(tenant, priority), tenant, priority))
            else:
                heappop(turns)
            yield sequence

    # ---- pre-emption ----------------------------------------------------------------------

    @property
    def may_displace(self) -> bool:
        """True if there is more than one tenant."""
        return len(self._weights()) > 1

    def displaced(
        self, newcomer: Sequence, holders: Mapping[Sequence, int], *, wanted: int, capacity: int
    ) -> Sequence | None:
        """Return the latest sequence of the tenant that is farthest above its share.

        Only a newcomer whose tenant stays below its own share may displace one.
        """
        weights = self._weights()
        if len(weights) < 2:
            return None
        held = dict.fromkeys(weights, 0)
        for sequence, size in holders.items():
            held[sequence.request.tenant] = held.get(sequence.request.tenant, 0) + size
        per_weight = capacity / sum(weights.values())
        tenant = newcomer.request.tenant
        if held[tenant] + wanted > weights[tenant] * per_weight:
            return None
        able = [
            sequence
            for sequence in holders
            if held[sequence.request.tenant] > weights[sequence.request.tenant] * per_weight
            and not self._charges[sequence].gave_way
            and (sequence.tier != newcomer.tier or self._has_had_more(sequence, newcomer))
        ]
        if not able:
            return None
        victim = max(
            able,
            key=lambda s: (
                held[s.request.tenant] / weights[s.request.tenant],
                s.arrival_number,
            ),
        )
        self._charges[victim].gave_way = True
        return victim

    def _has_had_more(self, holder: Sequence, newcomer: Sequence) -> bool:
        """True if a holder's tenant was served no less than a newcomer's on their tier."""
        return self._account(holder).served >= self._account(newcomer).served

    def _weights(self) -> dict[str, float]:
        """The weight of every tenant that is there, on whatever tier."""
        return {
            tenant: account.weight
            for books in self._books.values()
            for tenant, account in books.accounts.items()
            if account.num_present
        }

    # ---- the accounts ---------------------------------------------------------------------

    def _books_of(self, sequence: Sequence) -> _Books:
        return self._books.setdefault(sequence.tier, _Books())

    def _account(self, sequence: Sequence) -> _Account:
        return self._books_of(sequence).accounts[sequence.request.tenant]
