"""The interface of models that may answer a request, and a line of them."""

from collections.abc import Callable, Sequence
from typing import Protocol, Self

import msgspec

from outrider.engine.errors import EngineError
from outrider.gateway.contract.answers.responder import DIRECT, Place, Responder, RouteReason
from outrider.gateway.contract.errors.tree import GatewayError
from outrider.gateway.contract.schema.routing import RouteReport

Patience = Callable[[], float | None]
"""Returns the seconds in which a candidate must begin to answer; None: no bound."""


def unbounded() -> None:
    """Return no bound: the patience with the last candidate."""


class Candidate(Protocol):
    """Models of one kind that may answer one request: this process's, or a server's."""

    @property
    def place(self) -> Place:
        """The kind."""

    @property
    def words(self) -> str:
        """The kind, for messages."""

    @property
    def ignored_fields(self) -> Sequence[str]:
        """The client's fields that these models do not get."""

    @property
    def patience_s(self) -> Patience:
        """Returns the seconds in which they must begin: others must still have time to answer."""

    def expected_s(self) -> float | None:
        """Return the seconds of an answer; 0 or None while nothing was measured."""

    async def open(self, origin: RouteReason) -> Responder:
        """Make a responder, not yet begun. Raises HandOffError where others are to answer."""

    async def route_report(self, origin: RouteReason) -> RouteReport:
        """Return the report of a request that they begin. Raises as `open` does."""

    def may_go_on(self, error: GatewayError | EngineError) -> bool:
        """Return whether another candidate may answer after this error of theirs."""

    def after(self, origin: RouteReason, error: Exception) -> RouteReason:
        """Return why the next candidate is tried after this error."""

    def by_itself(self) -> Self:
        """Return the same models, for when those that they handed over to have failed."""


class Lineup(msgspec.Struct, frozen=True, kw_only=True):
    """The candidates that may answer a request, in order.

    `candidates`, one a place, are tried as long as nothing was sent. `origin`: why the first is.
    continues_on_failure: another candidate may continue a broken answer. `on_begin` gets
    the reason of a responder that begins in place of the first choice, and its tier. `arm`: the
    request's arms of experiments.
    """

    candidates: Sequence[Candidate]
    origin: RouteReason = DIRECT
    continues_on_failure: bool = False
    on_begin: Callable[[RouteReason, str], None] = msgspec.field(default=lambda origin, tier: None)
    arm: str = ""
