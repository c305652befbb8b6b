"""Arms that name a model: the request is read as one that names it itself.

A model may be an alias, with a chain of its own. So the arm is found before the chain is, and a
request that cannot be served in it goes back to the model that it named.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from outrider.engine.errors import EngineError
from outrider.gateway.answering.candidates.basis import AnswerBasis
from outrider.gateway.answering.candidates.chain_walk import ChainWalk
from outrider.gateway.answering.candidates.fallback import Lineup
from outrider.gateway.answering.reading.arms import (
    assignment_of,
    choosing_of,
    forget_arms,
    may_be_arms_fault,
)
from outrider.gateway.answering.reading.parsed_request import ParsedRequest, RequestContext
from outrider.gateway.contract.errors.tree import BadRequestError, GatewayError
from outrider.gateway.contract.schema.envelope import read_request
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.contract.schema.parsing import refuse_doubled_names
from outrider.gateway.experiments.assigner import ARM_HEADER, Assignment
from outrider.gateway.experiments.experiments import Experiments
from outrider.gateway.settings.arm_overlay import MODEL, MODELS

Walk = Callable[[bytes, RequestContext], ChainWalk]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmedRequest:
    """A request that names its arm's model. `assignment`: the arms that gave it the name."""

    body: bytes
    context: RequestContext
    assignment: Assignment


def with_arms_model(
    experiments: Experiments, endpoint: Endpoint, body: bytes, context: RequestContext
) -> ArmedRequest | RequestContext:
    """Return the request as its arm names its model, or the context where no arm does.

    The context keeps the arms, which were found by what the client named: an alias, for example.
    Raises BadRequestError for a forced arm that does not exist, and for doubled names.
    """
    if experiments.registry.assigner is None and ARM_HEADER not in context.headers:
        return context
    try:
        read = read_request(body, endpoint)
    except BadRequestError:
        return context  # its reader says what is wrong
    refuse_doubled_names(body)
    assignment = assignment_of(experiments, choosing_of(read), body, endpoint, context)
    context = msgspec.structs.replace(context, is_assigned=True, assignment=assignment)
    if assignment is None or assignment.overlay.model is None:
        return context
    document = {name: value for name, value in read.document.items() if name != MODELS}
    document[MODEL] = assignment.overlay.model
    return ArmedRequest(body=msgspec.json.encode(document), context=context, assignment=assignment)


class ArmWalk:
    """The way of a request along its arm's models, then as the client asked. Use it once."""

    def __init__(
        self,
        walk: Walk,
        lineup: Callable[[ParsedRequest], Lineup],
        armed: ArmedRequest,
        body: bytes,
        note: Callable[[Assignment, Exception, RequestContext], None],
    ) -> None:
        """`walk` makes the way of a body; `body` is the client's; `note` counts one left out."""
        self._armed = armed
        self._lineup = lineup
        self._body = body
        self._note = note
        self._new_walk = walk
        self._walk = walk(armed.body, armed.context)
        self._has_left = False

    async def begin(self) -> ParsedRequest:
        """Read the request for the first model that it fits. Raises GatewayError or EngineError."""
        try:
            return await self._walk.begin()
        except (GatewayError, EngineError) as error:
            if not may_be_arms_fault(self._armed.assignment, error):
                raise
            return await self._leave(error)

    def basis(self, parsed: ParsedRequest) -> AnswerBasis:
        """Return what the answer follows from, as the request was read for its first model."""
        return self._walk.basis(parsed)

    async def instead(self, error: Exception) -> Lineup | None:
        """Return the lineup after one that has led to this error; None if there is none."""
        if self._has_left:
            return await self._walk.instead(error)
        try:
            found = await self._walk.instead(error)
        except (GatewayError, EngineError) as last:
            if not may_be_arms_fault(self._armed.assignment, last):
                raise
            return self._lineup(await self._leave(last))
        if found is not None or not may_be_arms_fault(self._armed.assignment, error):
            return found
        return self._lineup(await self._leave(error))

    async def _leave(self, error: Exception) -> ParsedRequest:
        """Read the request as the client sent it, in no arm."""
        self._has_left = True
        context = msgspec.structs.replace(self._armed.context, assignment=None)
        forget_arms(context)
        self._walk = self._new_walk(self._body, context)
        parsed = await self._walk.begin()
        self._note(self._armed.assignment, error, context)
        return parsed
