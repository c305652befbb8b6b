"""Endpoints of Ollama's API about models: /api/tags, /api/ps, /api/show, /api/version."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from starlette.requests import Request
from starlette.responses import Response

from outrider.engine.errors import EngineError
from outrider.gateway.answering.reading.live_model_catalog import LiveModelCatalog
from outrider.gateway.contract.errors.tree import GatewayError
from outrider.gateway.contract.schema.model_cards import ModelCard
from outrider.gateway.contract.schema.structs import json_response
from outrider.gateway.http.apis.ollama import models
from outrider.gateway.http.apis.ollama.answers import LoadedModels, OllamaModels, OllamaVersion
from outrider.gateway.http.apis.ollama.schema import OllamaShowRequest
from outrider.gateway.http.apis.reading import read_body
from outrider.gateway.tenancy.keys.keys import Principal

API_VERSION: Final = "0.13.0"
"""The release of Ollama whose API this is: clients ask for features by it."""
_LATEST: Final = ":latest"


class Cards(Protocol):
    """Tells which models a key may use."""

    async def cards(self, principal: Principal) -> list[ModelCard]:
        """Return all of them."""

    async def card(self, model_id: str, principal: Principal) -> ModelCard:
        """Return one of them. Raises GatewayError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaEndpoints:
    """Describes the gateway and its models to Ollama's clients."""

    cards: Cards
    catalog: LiveModelCatalog
    read_body: Callable[[Request], Awaitable[bytes]]
    ignores_unknown: bool

    async def version(self, _: Request, __: Principal) -> Response:
        """Return the version of the API."""
        return json_response(OllamaVersion(version=API_VERSION))

    async def tags(self, _: Request, principal: Principal) -> Response:
        """List the names that `model` accepts, of this key."""
        cards = await self.cards.cards(principal)
        return json_response(OllamaModels(models=[models.listed(card) for card in cards]))

    async def ps(self, _: Request, principal: Principal) -> Response:
        """List those behind which models of this machine are."""
        lines = map(models.loaded, await self.cards.cards(principal))
        return json_response(LoadedModels(models=[line for line in lines if line is not None]))

    async def show(self, request: Request, principal: Principal) -> Response:
        """Describe one of the names."""
        body = await self.read_body(request)
        read = await read_body(OllamaShowRequest, body, ignores_unknown=self.ignores_unknown)
        name = await meant_name(self.catalog, read.request.model)
        return json_response(models.shown(await self.cards.card(name, principal)))


async def meant_name(catalog: LiveModelCatalog, name: str) -> str:
    """Return a name without its :latest, which Ollama's clients append, unless it has that itself.

    While the names are not known the request's own refusal says so.
    """
    if not name.endswith(_LATEST) or name == _LATEST:
        return name
    try:
        names = await catalog.current()
    except (GatewayError, EngineError):
        return name.removesuffix(_LATEST)
    return name if name in names else name.removesuffix(_LATEST)
