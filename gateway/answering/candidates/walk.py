"""The way of one request along the models that its arm, its alias or it itself names.

An arm's model comes first: the request is read as one that names it. The model may be an alias, so
the arm is found before the chain is. Behind the arm's models the request goes on as its client sent
it, in no arm. Each model is read only when it is needed.
"""

import logging
from contextlib import suppress

import msgspec

from outrider.engine.errors import EngineError
from outrider.gateway.answering.candidates.chains import (
    ChainBook,
    ModelChain,
    error_of_all,
    goes_on,
)
from outrider.gateway.answering.candidates.failures import name_of
from outrider.gateway.answering.reading.arms import (
    assignment_of,
    choosing_of,
    may_be_arms_fault,
    unarmed,
)
from outrider.gateway.answering.reading.parsed_request import ParsedRequest, RequestContext
from outrider.gateway.answering.reading.reading import RequestReader
from outrider.gateway.contract.answers.responder import DIRECT, RouteReason
from outrider.gateway.contract.errors.tree import BadRequestError, GatewayError, NotReadyError
from outrider.gateway.contract.schema.envelope import read_request
from outrider.gateway.contract.schema.header_text import header_text
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.contract.schema.parsing import RequestJson, refuse_doubled_names
from outrider.gateway.experiments.assigner import ARM_HEADER, Assignment
from outrider.gateway.settings.arm_overlay import MODEL, MODELS

logger = logging.getLogger(__name__)


class RequestWalk:
    """Reads one request for each of its models in turn. Use it once."""

    def __init__(
        self,
        reader: RequestReader,
        chains: ChainBook,
        endpoint: Endpoint,
        body: RequestJson,
        context: RequestContext,
    ) -> None:
        """Find the arm and the chain. Raises GatewayError as `assignment_of` and `chain_of` do."""
        self._reader = reader
        self._chains = chains
        self._endpoint = endpoint
        self._sent = body
        self._arms: Assignment | None = None
        """The arms that name the model; None where none do, or they were left."""
        self._context = context
        self._parsed: ParsedRequest | None = None
        self._body = body
        self._chain: ModelChain | None = None
        self._index = 0
        self._errors: list[GatewayError | EngineError] = []
        self._follow(self._as_armed())

    async def begin(self) -> ParsedRequest:
        """Read the request for the first model that it fits. Raises GatewayError or EngineError."""
        try:
            return await self._begin()
        except (GatewayError, EngineError) as error:
            return await self._leave_arms(error)

    async def after(self, error: GatewayError | EngineError) -> ParsedRequest:
        """Read the request anew after this error.

        Without its experiments, where they may be at fault; then for the next models. Raises one
        error for all models where there is none.
        """
        try:
            return await self._next(error)
        except (GatewayError, EngineError) as last:
            return await self._leave_arms(last)

    async def read(self) -> ParsedRequest:
        """Read the request for the current model. Raises GatewayError or EngineError."""
        chain = self._chain
        if chain is not None:
            self._body = chain.body(self._index)
        self._parsed = await self._reader.read(self._endpoint, self._body, self._context)
        if chain is not None:
            self._parsed = msgspec.structs.replace(
                self._parsed,
                falls_back_on=chain.falls_back_on(self._index),
                next_models=tuple(link.model for link in chain.links[self._index + 1 :]),
                chain_reason=self._routed_reason(chain),
                route=chain.route,
            )
        return self._parsed

    def _routed_reason(self, chain: ModelChain) -> RouteReason:
        """Return why a router's choice is the current model."""
        if chain.route is None:
            return DIRECT
        failed = zip(chain.links, self._errors, strict=False)
        passed = [f"{link.model}: {name_of(error)}" for link, error in failed]
        reason = header_text("; ".join((chain.route.reason, *passed)))
        quality = chain.route.quality
        return RouteReason(hand_off="failure" if passed else None, reason=reason, quality=quality)

    async def without_arms(self, error: Exception) -> ParsedRequest | None:
        """Read the request in no arm if its arm may have led to this error; else return None."""
        parsed, self._parsed = self._parsed, None
        arms = None if parsed is None else parsed.assignment
        if parsed is None or arms is None or not may_be_arms_fault(arms, error):
            return None
        if arms.overlay.model is not None:
            return None  # the body names the arm's model
        plain = await self._reader.read(self._endpoint, self._body, unarmed(self._context))
        self._reader.note_left_out(arms, error, self._context)
        return msgspec.structs.replace(plain, falls_back_on=parsed.falls_back_on)

    def _as_armed(self) -> RequestJson:
        """Return the request as its arms name the model; as it was sent where they name none.

        The context keeps the arms, which were found by what the client named: an alias, for
        example.
        """
        experiments, body, context = self._reader.experiments, self._sent, self._context
        if not experiments.registry.sets_models and not self._chains.aliases:
            return body
        if experiments.registry.assigner is None and ARM_HEADER not in context.headers:
            return body
        try:
            read = read_request(body, self._endpoint)
        except BadRequestError:
            return body  # its reader says what is wrong
        refuse_doubled_names(body.raw)
        arms = assignment_of(experiments, choosing_of(read), body, self._endpoint, context)
        self._context = msgspec.structs.replace(context, is_assigned=True, assignment=arms)
        if arms is None or arms.overlay.model is None:
            return body
        self._arms = arms
        document = {name: value for name, value in read.document.items() if name != MODELS}
        return RequestJson(document=document | {MODEL: arms.overlay.model})

    def _follow(self, body: RequestJson) -> None:
        """Go to the first model that this body names."""
        chain = self._chains.chain_of(self._endpoint, body, self._context.principal)
        self._body, self._chain, self._index = body, chain, 0
        self._errors = []
        if chain is not None:
            self._context = msgspec.structs.replace(self._context, is_named_by_chain=True)

    async def _begin(self) -> ParsedRequest:
        if self._chain is not None:
            await self._check_names(self._chain)
        while True:
            try:
                return await self.read()
            except (GatewayError, EngineError) as error:
                self._advance(error)

    async def _check_names(self, chain: ModelChain) -> None:
        """Raise ModelNotFoundError for a name that no model has, whether or not it is reached."""
        for link in chain.links[1:]:
            # Names of checkpoints are not known while the engine loads: the walk will see.
            with suppress(NotReadyError, EngineError):
                await self._reader.names.resolve(link.model, None, self._context.principal.scopes)

    async def _next(self, error: GatewayError | EngineError) -> ParsedRequest:
        plain = await self.without_arms(error)
        if plain is not None:
            return plain
        while True:
            failed = self._advance(error)
            logger.info("next model of the chain failed=%s why=%s", failed, name_of(error))
            try:
                read = await self.read()
            except (GatewayError, EngineError) as another:
                error = another
                continue
            if read.route is not None:
                return read
            why = f"{header_text(failed)}: {name_of(error)}"
            reason = RouteReason(hand_off="failure", reason=why)
            return msgspec.structs.replace(read, chain_reason=reason)

    def _advance(self, error: GatewayError | EngineError) -> str:
        """Go to the next model; return the name of the one before.

        Raises the error of all models where there is none or none may answer.
        """
        chain, index = self._chain, self._index
        if chain is None:
            raise error
        self._errors.append(error)
        if chain.is_last(index) or not goes_on(error, chain.falls_back_on(index)):
            raise error_of_all(self._errors)
        self._index += 1
        return chain.links[index].model

    async def _leave_arms(self, error: GatewayError | EngineError) -> ParsedRequest:
        """Read the request as it was sent, in no arm. Raises this error if it is no arm's fault."""
        arms = self._arms
        if arms is None or not may_be_arms_fault(arms, error):
            raise error
        self._arms = None
        self._context = msgspec.structs.replace(unarmed(self._context), is_named_by_chain=False)
        self._follow(self._sent)
        parsed = await self._begin()
        self._reader.note_left_out(arms, error, self._context)
        return parsed
