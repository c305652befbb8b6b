"""Bounds how many requests may wait, and shares the room among tenants."""

from collections.abc import Collection
from typing import Final, Protocol

from outrider.engine.errors import QueueFullError
from outrider.engine.request import EngineRequest

_RETRY_AFTER_S: Final = 1.0


class Waiting(Protocol):
    """A request that waits, in the queue or before it."""

    @property
    def request(self) -> EngineRequest:
        """The request."""


def check_room(request: EngineRequest, waiting: Collection[Waiting], *, max_waiting: int) -> None:
    """Raise QueueFullError where `max_waiting` requests wait, unless others take all the room.

    A tenant that has less than its share of it, by weight among those that wait, is taken in; but
    never are there twice as many.
    """
    num_waiting = len(waiting)
    if num_waiting < max_waiting:
        return
    weights = {each.request.tenant: each.request.weight for each in waiting}
    weights[request.tenant] = request.weight
    num_own = sum(each.request.tenant == request.tenant for each in waiting)
    share = max_waiting * request.weight / sum(weights.values())
    if num_own >= share or num_waiting >= 2 * max_waiting:
        raise QueueFullError(num_waiting=num_waiting, retry_after_s=_RETRY_AFTER_S)
