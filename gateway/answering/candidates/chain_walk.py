"""The way of one request along its chain: the next model is read only when it is needed."""

import logging
from collections.abc import Callable
from contextlib import suppress

import msgspec

from outrider.engine.errors import EngineError
from outrider.gateway.answering.candidates.basis import AnswerBasis
from outrider.gateway.answering.candidates.chains import ModelChain, goes_on, told_together
from outrider.gateway.answering.candidates.fallback import Lineup
from outrider.gateway.answering.reading.parsed_request import ParsedRequest, RequestContext
from outrider.gateway.answering.reading.reading import RequestReader
from outrider.gateway.contract.answers.responder import RouteReason
from outrider.gateway.contract.errors.tree import GatewayError, NotReadyError
from outrider.gateway.contract.schema.header_text import header_text
from outrider.gateway.contract.schema.kinds import Endpoint, FallbackKind

log = logging.getLogger(__name__)


class ChainWalk:
    """Reads one request for each model of its chain in turn. Use it once."""

    def __init__(
        self,
        reader: RequestReader,
        lineup: Callable[..., Lineup],
        endpoint: Endpoint,
        body: bytes,
        context: RequestContext,
        chain: ModelChain | None,
    ) -> None:
        """`chain`: None for a request that names one model."""
        self._reader = reader
        self._lineup = lineup
        self._endpoint = endpoint
        self._body = body
        self._context = context
        self._chain = chain
        self._index = 0
        self._parsed: ParsedRequest | None = None
        self._errors: list[GatewayError | EngineError] = []

    async def begin(self) -> ParsedRequest:
        """Read the request for the first model that it fits. Raises GatewayError or EngineError."""
        if self._chain is None:
            self._parsed = await self._reader.read(self._endpoint, self._body, self._context)
            return self._parsed
        self._context = msgspec.structs.replace(self._context, is_named_by_chain=True)
        await self._check_names(self._chain)
        while True:
            try:
                return await self._read(self._chain)
            except (GatewayError, EngineError) as error:
                self._advance(error)

    def basis(self, parsed: ParsedRequest) -> AnswerBasis:
        """Return what the answer follows from, as the request was read for its first model."""
        links = () if self._chain is None else self._chain.links[self._index + 1 :]
        models = tuple(link.model for link in links)
        return AnswerBasis(parsed=parsed, body=self._body, models_behind=models)

    async def instead(self, error: Exception) -> Lineup | None:
        """Return the lineup that follows one that has led to this error; None if there is none.

        The request without its experiments, where they may be at fault; then the next models.
        Raises one error for all models of a chain.
        """
        parsed, self._parsed = self._parsed, None
        if parsed is not None:
            plain = await self._reader.without_arms(parsed, self._body, self._context, error)
            if plain is not None:
                return self._lineup(
                    msgspec.structs.replace(plain, falls_back_on=parsed.falls_back_on)
                )
        if self._chain is None or not isinstance(error, GatewayError | EngineError):
            return None
        while True:
            failed = self._chain.links[self._index].model
            kind = self._advance(error)
            log.info("next model of the chain failed=%s why=%s", failed, kind)
            try:
                read = await self._read(self._chain)
            except (GatewayError, EngineError) as another:
                error = another
                continue
            why = f"{header_text(failed)}: {getattr(error, 'code', None) or type(error).__name__}"
            return self._lineup(read, RouteReason(hand_off="failure", reason=why))

    async def _check_names(self, chain: ModelChain) -> None:
        """Raise ModelNotFoundError for a name that no model has, whether or not it is reached."""
        for link in chain.links[1:]:
            # Names of checkpoints are not known while the engine loads: the walk will see.
            with suppress(NotReadyError, EngineError):
                await self._reader.names.resolve(link.model, None, self._context.principal.scopes)

    async def _read(self, chain: ModelChain) -> ParsedRequest:
        self._body = chain.body(self._index)
        read = await self._reader.read(self._endpoint, self._body, self._context)
        self._parsed = msgspec.structs.replace(read, falls_back_on=chain.falls_back_on(self._index))
        return self._parsed

    def _advance(self, error: GatewayError | EngineError) -> FallbackKind | str:
        """Go to the next model. Raises the error of all where there is none or none may answer."""
        assert self._chain is not None
        self._errors.append(error)
        if not goes_on(error, self._chain.falls_back_on(self._index)) or (
            self._index + 1 >= len(self._chain.links)
        ):
            raise told_together(self._errors)
        self._index += 1
        return getattr(error, "code", None) or type(error).__name__
