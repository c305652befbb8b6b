"""The names that requests may use, kept up with what the engine and the servers list."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from engine.errors import EngineError
from engine.events import TierInfo
from engine.request import TIERS, Tier
from gateway.errors.tree import GatewayError, ModelNotFoundError, NotReadyError
from gateway.handoff.cloud_parts import CloudParts
from gateway.planning.jobs import JobBuilder
from gateway.planning.model_catalog import AUTO, ModelCatalog, ResolvedModel, TierModels


@dataclass(frozen=True, slots=True)
class _Known:
    """What the names are made from. Names are made anew only when this changes."""

    is_local_known: bool
    listed: tuple[tuple[str, ...], ...]


class LiveModelCatalog:
    """Makes `ModelCatalog` when something has changed.

    What servers list is asked for in the background. Waits for it only who cannot go on without:
    what the local models answer does not depend on whether others can be reached.
    """

    def __init__(self, cloud: CloudParts, jobs: JobBuilder, local_tiers: Collection[Tier]) -> None:
        """`local_tiers` are known while the engine is not ready."""
        self._cloud = cloud
        self._jobs = jobs
        self._local_tiers = local_tiers
        self._listed: dict[str, tuple[str, ...]] = {}
        self._known: _Known | None = None
        self._names: ModelCatalog | None = None
        self._last_local: dict[str, tuple[TierInfo, ...]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def resolve(self, model: str, tier: str | None) -> ResolvedModel:
        """What a request means (see `ModelCatalog.resolve`).

        Raises NotReadyError too: while the engine loads nobody knows the names of its checkpoints.
        """
        names = await self.current()
        if model not in names and self._asking:
            await asyncio.wait(self._asking.values())  # it may be one of theirs
            names = await self.current()
        try:
            return names.resolve(model, tier)
        except ModelNotFoundError:
            if self._known is not None and not self._known.is_local_known:
                raise NotReadyError(
                    f"The engine is loading or being restarted; whether it has the model {model!r} "
                    "is not known yet. Try again soon."
                ) from None
            raise

    async def refreshed(self) -> ModelCatalog:
        """With what the servers list now; asks those that were not asked for a while."""
        tiers = self._cloud.tiers
        listed = await asyncio.gather(*(tier.models() for tier in tiers.values()))
        self._listed = dict(zip(tiers, listed, strict=True))
        return await self.current()

    async def current(self) -> ModelCatalog:
        """As far as is known."""
        local = await self._local()
        tiers = self._cloud.tiers
        for name, tier in tiers.items():
            if tier.settings.model is None and not self._listed.get(name):
                # Nobody says what its server is to be asked for but the server itself.
                self._ask(name)
        listed = tuple(self._listed.get(name, ()) for name in tiers)
        is_known = not self._cloud.rules.has_local or all(local.values())
        known = _Known(is_local_known=is_known, listed=listed)
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
                    )
                    for (name, tier), ids in zip(tiers.items(), listed, strict=True)
                ],
                handoff=self._cloud.rules.cloud,
            )
        return self._names

    async def usual_model(self, tier: str) -> str | None:
        """What a tier elsewhere is asked for where nothing else is said; waits for its list."""
        names = await self.current()
        if names.usual_model(tier) is None and (asking := self._asking.get(tier)):
            await asyncio.wait((asking,))
            names = await self.current()
        return names.usual_model(tier)

    def _ask(self, name: str) -> None:
        """Have a tier's list asked for; one that has failed is not asked again at once."""
        if name not in self._asking:
            self._asking[name] = asyncio.create_task(self._learn(name), name=f"models {name}")

    async def _learn(self, name: str) -> None:
        try:
            self._listed[name] = await self._cloud.tiers[name].models()
        finally:
            del self._asking[name]

    async def _local(self) -> dict[str, tuple[TierInfo, ...]]:
        """The engine's names; while it is not ready, those that do not depend on it."""
        rules = self._cloud.rules
        if not rules.has_local:
            return {AUTO: ()}
        try:
            self._last_local = await self._jobs.names()
            return self._last_local
        except (EngineError, GatewayError):
            if not self._cloud.tiers:
                raise
            if self._last_local:  # it is being restarted, with the same models
                return self._last_local
            loaded = [tier for tier in TIERS if tier in self._local_tiers]
            return {AUTO: (), **dict.fromkeys(loaded, ())}
