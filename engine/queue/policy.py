"""Policy of the queue: the next sequence to start, and the running one to pre-empt for it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from outrider.engine.sequences.sequence import Sequence
from outrider.engine.ttft_predictor import ServiceTimes
from outrider.verifier.params import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class StepThrottle:
    """Limits on a step's batch work, so that requests close to their deadline can run."""

    paused: frozenset[Sequence]
    """Running sequences that get no row of it."""
    batch_prefill_s: float
    """How long the prompts of batch requests may make a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewcomerHolds:
    """Counts of sequences that the policy held back although they were next."""

    num_now: int = 0
    num_ended: int = 0
    seconds: float = 0.0
    """From the moment at which each was passed over until it might start or had gone."""


NO_HOLDS: Final = NewcomerHolds()


class QueuePolicy(Protocol):
    """Orders `Scheduler.waiting` and chooses sequences to pre-empt. To be inherited from."""

    def attach(self, times: ServiceTimes, *, max_sequences: int) -> None:
        """Receive the service times and the number of seats, once, from the scheduler."""

    def order(self, waiting: list[Sequence], now_s: float) -> Iterable[Sequence]:
        """The sequences, all of one tier, in the order in which they should start.

        May be lazy: sequences start, and are told to `started`, while it is read.
        """

    def added(self, sequence: Sequence) -> None:
        """A sequence came to the queue: a new one, or from the other tier."""

    def started(self, sequence: Sequence) -> None:
        """A sequence left the queue for a seat; its prefix has been matched."""

    def removed(self, sequence: Sequence) -> None:
        """A sequence that was added has ended, is held or leaves its tier. It may be waiting."""

    def preempted(self, sequence: Sequence) -> None:
        """A running sequence went back to the queue."""

    def newcomer_holds(self, tier: Tier) -> NewcomerHolds:
        """Return a tier's sequences that the policy itself holds back, and has held back."""
        del tier
        return NO_HOLDS

    @property
    def has_objectives(self) -> bool:
        """True if any sequence has a latency objective: then the next two methods count."""
        return False

    def step_throttle(self, now_s: float) -> StepThrottle | None:
        """Return the throttle of the step that begins; None where there is none."""
        return None

    def start_by_s(self, sequence: Sequence) -> float:
        """Return the latest time to begin its prompt; the earliest goes first within a pass."""
        return sequence.arrival_s

    def gives_way_to(self, sequence: Sequence, newcomer: Sequence) -> bool:
        """True if a running sequence would lose its seat to a newcomer that is short of time."""
        return False

    @property
    def may_displace(self) -> bool:
        """True if `displaced` could name a sequence."""
        return False

    def displaced(
        self, newcomer: Sequence, holders: Mapping[Sequence, int], *, wanted: int, capacity: int
    ) -> Sequence | None:
        """Return the sequence to pre-empt, so that a newcomer finds a seat; None for none.

        `holders`: running sequences and how much each has of what is short, of `capacity` in all;
        `wanted` is what the newcomer needs, with those of its tenant that were promised some.
        """
        return None


class ArrivalOrder(QueuePolicy):
    """First come, first served; a pre-empted sequence is back at its old position."""

    def order(self, waiting: list[Sequence], now_s: float) -> list[Sequence]:
        """Oldest first."""
        return sorted(waiting, key=lambda sequence: sequence.arrival_number)
