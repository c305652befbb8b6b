"""The names that requests may use, kept up to date with the engine's and the servers' lists."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.engine.errors import EngineError
from outrider.engine.events import TierInfo
from outrider.gateway.answering.reading.local_models import LocalModels
from outrider.gateway.answering.reading.model_catalog import (
    LocalFormats,
    ModelCatalog,
    ResolvedModel,
    TierModels,
)
from outrider.gateway.answering.reading.upstream_parts import UpstreamParts
from outrider.gateway.contract.errors.tree import GatewayError, ModelNotFoundError, NotReadyError
from outrider.gateway.contract.schema.kinds import AUTO
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.verifier.params import TIERS, Tier


@dataclass(frozen=True, slots=True)
class _Known:
    """The data that the names are built from. The catalog is rebuilt only when this changes."""

    is_local_known: bool
    local: tuple[tuple[str, tuple[TierInfo, ...]], ...]
    listed: tuple[tuple[str, ...], ...]


class LiveModelCatalog:
    """Makes `ModelCatalog` when something has changed.

    The servers' lists are fetched in the background. Only callers that need an upstream list wait
    for it: local models answer whether or not upstream servers can be reached.
    """

    def __init__(
        self,
        upstream: UpstreamParts,
        models: LocalModels,
        formats: Mapping[Tier, LocalFormats],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """`formats`: of the local tiers, known while the engine is not ready.

        `aliases`: the model that each further name stands for first.
        """
        self._aliases = aliases or {}
        self._upstream = upstream
        self._models = models
        self._formats = formats
        self._listed: dict[str, tuple[str, ...]] = {}
        self._known: _Known | None = None
        self._names: ModelCatalog | None = None
        self._last_local: dict[str, tuple[TierInfo, ...]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def resolve(self, model: str, tier: str | None, scopes: Scopes) -> ResolvedModel:
        """Return the models that a request means (see `ModelCatalog.resolve`).

        Raises NotReadyError too: the names of checkpoints are unknown while the engine loads. A
        fleet's first engine is waited for, where no upstream tier could answer meanwhile.
        """
        if not self._upstream.tiers:
            await self._models.until_known()
        names = await self.current()
        if model not in names and self._asking:
            await asyncio.wait(self._asking.values())  # the name may be in one of their lists
            names = await self.current()
        try:
            return names.resolve(model, tier, scopes)
        except ModelNotFoundError:
            if self._known is not None and not self._known.is_local_known:
                raise NotReadyError(
                    f"The engine is loading or being restarted; whether it has the model {model!r} "
                    "is not known yet. Try again soon."
                ) from None
            raise

    async def refreshed(self) -> ModelCatalog:
        """Return the catalog with the servers' current lists; fetch those that are stale."""
        tiers = self._upstream.tiers
        listed = await asyncio.gather(*(tier.models() for tier in tiers.values()))
        self._listed = dict(zip(tiers, listed, strict=True))
        return await self.current()

    async def current(self) -> ModelCatalog:
        """Return the catalog as far as it is known."""
        local = await self._local()
        tiers = self._upstream.tiers
        for name, tier in tiers.items():
            if tier.settings.model is None and not self._listed.get(name):
                # Without a setting, only the server itself knows the name of its model.
                self._ask(name)
        listed = tuple(self._listed.get(name, ()) for name in tiers)
        is_known = not self._upstream.rules.has_local or all(local.values())
        known = _Known(is_local_known=is_known, local=tuple(local.items()), listed=listed)
        if self._names is None or known != self._known:
            self._known = known
            self._names = ModelCatalog(
                local,
                [
                    TierModels(
                        tier=name,
                        server=tier.settings.server,
                        model=tier.settings.model,
                        listed=ids,
                        max_context=tier.settings.max_context,
                        supports=tier.settings.supports,
                    )
                    for (name, tier), ids in zip(tiers.items(), listed, strict=True)
                ],
                handoff=self._upstream.rules.upstream_tier,
                formats=self._formats,
                aliases=self._aliases,
            )
        return self._names

    async def usual_model(self, tier: str) -> str | None:
        """An upstream tier's model where a request names none; waits for the tier's list."""
        names = await self.current()
        if names.usual_model(tier) is None and (asking := self._asking.get(tier)):
            await asyncio.wait((asking,))
            names = await self.current()
        return names.usual_model(tier)

    def _ask(self, name: str) -> None:
        """Start to fetch a tier's list; one that has failed is not fetched again at once."""
        if name not in self._asking:
            self._asking[name] = asyncio.create_task(self._learn(name), name=f"models {name}")

    async def _learn(self, name: str) -> None:
        try:
            self._listed[name] = await self._upstream.tiers[name].models()
        finally:
            del self._asking[name]

    async def _local(self) -> dict[str, tuple[TierInfo, ...]]:
        """Return the engine's names; while it is not ready, those that do not depend on it."""
        rules = self._upstream.rules
        if not rules.has_local:
            return {AUTO: ()}
        try:
            self._last_local = await self._models.names()
            return self._last_local
        except (EngineError, GatewayError):
            if not self._upstream.tiers:
                raise
            if self._last_local:  # the engine restarts with the same models
                return self._last_local
            loaded = [tier for tier in TIERS if tier in self._formats]
            return {AUTO: (), **dict.fromkeys(loaded, ())}
