"""A request's time at one replica, and what the request asks of its pool."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outrider.engine.errors import EngineDiedError, EngineError
from outrider.engine.events import Ending, EngineInfo, Failed, Finished
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.fleet.block_sources import Source
from outrider.gateway.engines.fleet.candidates import Wanted
from outrider.gateway.engines.fleet.demand import Demand, Needs
from outrider.gateway.engines.fleet.replica import EngineReplica

if TYPE_CHECKING:
    from outrider.gateway.engines.fleet.flight import Flight


@dataclass(slots=True, eq=False)
class ReplicaAttempt:
    """A request's time at one replica.

    It has an id of its own, so nothing of an earlier attempt can be taken for its events.
    """

    request: EngineRequest
    replica: EngineReplica
    generation: str | None
    """The generation of its replica's process."""
    info: EngineInfo
    is_switching: bool
    """It is the first on another tier, and nothing of it was seen yet."""
    is_counted: bool = False
    """Its replica's end was counted."""
    numerics: str = ""
    """The arithmetic of its prompt and answer (`PrefillDone.numerics`)."""
    has_ended: bool = False
    ending: Ending | None = None


class Fleet(Protocol):
    """A pool, as its requests see it."""

    resume_within_s: float
    is_closed: bool
    demand: Demand

    def enter(self, flight: "Flight") -> None:
        """Take in a request that begins. Raises InvalidRequestError where its id is in use."""

    def leave(self, flight: "Flight") -> None:
        """Forget a request that has ended."""

    async def place(self, wanted: Wanted) -> EngineReplica | None:
        """Choose the replica for a request; None where there is none now."""

    def can_place(self, wanted: Wanted) -> bool:
        """Return whether there is a replica for a request."""

    def find_source(
        self, request: EngineRequest, replica: EngineReplica, *, may_prefill: bool
    ) -> Source | None:
        """Return where the replica that a request was placed at gets its blocks from, if any."""

    def may_return(self, needs: Needs) -> bool:
        """Return whether a replica with these tiers was lost lately, and may come back."""

    def num_uncached_tokens(self, request: EngineRequest) -> int:
        """Return the prompt tokens that the chosen replica is to compute."""

    def note_prefill(self, request_id: str, num_cached_tokens: int) -> None:
        """Hear that a replica has computed a prompt."""

    def note_departure(self, request_id: str) -> None:
        """Hear that a request is no longer at its replica."""

    def note_loss(self, replica: EngineReplica, generation: str | None) -> None:
        """Hear that a replica's process has ended; tells all flights that it had."""

    def note_served(self, request: EngineRequest) -> None:
        """Hear that a request was served to its end."""

    def note_answer(self, attempt: ReplicaAttempt, token_ids: list[int]) -> None:
        """Hear what one replica alone has written, from the first token to the last."""

    def note_failover(self, reason: str) -> None:
        """Hear that a request goes on at another replica."""

    def unplaced(self, request: EngineRequest) -> EngineError:
        """Return why there is no replica for a new request."""


def ended_by_itself(ending: Ending | None) -> bool:
    """Return whether an answer came to its own end."""
    return isinstance(ending, Finished) and ending.finish_reason != "abort"


def is_loss(ending: Ending | None) -> bool:
    """Return whether its replica was lost with a request."""
    return ending is None or (isinstance(ending, Failed) and ending.code == EngineDiedError.code)
