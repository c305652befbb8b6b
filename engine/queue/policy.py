"""Which waiting sequence starts next, and which running one gives its place up for it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.sequences.sequence import Sequence
from engine.ttft_predictor import ServiceTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepThrottle:
    """Who gets less of a step than he could use, because others are short of time.

    paused: running sequences that get no row of it. batch_prefill_s: how long the prompts of those
    for whom nobody waits may make a pass.
    """

    paused: frozenset[Sequence]
    batch_prefill_s: float


class QueuePolicy(Protocol):
    """Orders `Scheduler.waiting`, and says who gives way. To be inherited from."""

    def attach(self, times: ServiceTimes, *, num_places: int) -> None:
        """Told once, by the scheduler that will ask: what things take, and how many run at once."""

    def order(self, waiting: list[Sequence], now_s: float) -> Iterable[Sequence]:
        """The sequences, all of one tier, in the order in which they should start.

        May be lazy: sequences start, and are told to `started`, while it is read.
        """

    def added(self, sequence: Sequence) -> None:
        """A sequence came to the queue: a new one, or from the other tier."""

    def started(self, sequence: Sequence) -> None:
        """A sequence left the queue for a place; its prefix has been matched."""

    def removed(self, sequence: Sequence) -> None:
        """A sequence that was added has ended, is held or leaves its tier. It may be waiting."""

    def preempted(self, sequence: Sequence) -> None:
        """A running sequence went back to the queue."""

    @property
    def has_objectives(self) -> bool:
        """Whether anybody who is there has said how fast it should be: then the next two count."""
        return False

    def step_throttle(self, now_s: float) -> StepThrottle | None:
        """Who holds back in the step that begins. None: nobody."""
        return None

    def start_by_s(self, sequence: Sequence) -> float:
        """When its prompt has to be begun at the latest; earlier goes first within a pass."""
        return sequence.arrival_s

    def gives_way_to(self, sequence: Sequence, newcomer: Sequence) -> bool:
        """Whether a running sequence would lose its place to a newcomer that is short of time."""
        return False

    @property
    def may_displace(self) -> bool:
        """Whether `displaced` could name anybody."""
        return False

    def displaced(
        self, newcomer: Sequence, holders: Mapping[Sequence, int], *, wanted: int, capacity: int
    ) -> Sequence | None:
        """Who has to go back to the queue, so that a newcomer finds a place.

        holders: running sequences and how much each has of what is short, of `capacity` in all;
        `wanted` is what the newcomer needs, with those of its tenant that were promised some.
        None: nobody. Whoever is named is pre-empted.
        """
        return None


class ArrivalOrder(QueuePolicy):
    """First come, first served; a pre-empted sequence is back at its old place."""

    def order(self, waiting: list[Sequence], now_s: float) -> list[Sequence]:
        """Oldest first."""
        return sorted(waiting, key=lambda sequence: sequence.arrival_number)
