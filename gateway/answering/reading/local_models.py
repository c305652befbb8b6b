"""The models of the local engine: whether they are there, and the names that they answer to."""

import logging
from collections.abc import Set
from dataclasses import dataclass, field

from outrider.engine.errors import EngineError
from outrider.engine.events import EngineInfo, TierInfo
from outrider.gateway.answering.reading.model_catalog import local_tiers
from outrider.gateway.contract.errors.tree import ModelNotFoundError, NotReadyError
from outrider.gateway.contract.schema.kinds import AUTO
from outrider.gateway.engines.adapters.registry import AdapterRegistry
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.router.assurance import LiveAssurance
from outrider.router.policy import pair_complaint
from outrider.verifier.params import TIERS, Tier

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class LocalModels:
    """Keeps the description of the engine."""

    engine: EngineClient
    loaded: Set[Tier]
    """The tiers that the settings name."""
    adapters: AdapterRegistry
    """Those that have a name."""
    pair: str | None = None
    """Fingerprints of the models that the router was trained for; None: nothing is compared."""
    assured: LiveAssurance | None = None
    """Holds for a small model of some width; None: nothing is assured."""
    start_error: Exception | None = None
    """Why the engine could not be loaded at all."""
    fleet: EnginePool | None = None
    """The engine, where it is a pool."""
    _info: EngineInfo | None = field(default=None, init=False)
    _own_names: dict[str, tuple[TierInfo, ...]] = field(default_factory=dict, init=False)

    async def engine_info(self) -> EngineInfo:
        """Return what is loaded; asked until all tiers are known, which do not change.

        Raises NotReadyError while no engine serves and none is waited for, and EngineError if the
        router was trained for other models.
        """
        if not self.engine.is_paused:
            self.require_ready()
        if self._info is None or not self._info.tiers.keys() >= self.loaded:
            info = await self.engine.info()
            prints = [info.tiers[tier].fingerprint if tier in info.tiers else "" for tier in TIERS]
            by_tier = dict(zip(TIERS, prints, strict=True))
            complaint = pair_complaint(self.pair, by_tier["small"], by_tier["large"])
            if complaint is not None:
                raise EngineError(f"{complaint[0].upper()}{complaint[1:]}")
            self._note_width(info)
            self._info, self._own_names = info, _names_of(info)
        return self._info

    def _note_width(self, info: EngineInfo) -> None:
        """Tell the router's assurance in which width the small model is."""
        small = info.tiers.get("small")
        if self.assured is None or small is None:
            return
        complaint = self.assured.use(small.scheme)
        if complaint is not None:
            logger.warning("no quality is assured reason=%s", complaint)

    def require_ready(self) -> None:
        """Raise NotReadyError while the engine is loading or being restarted."""
        if self.engine.is_ready:
            return
        if self.start_error is not None:
            raise NotReadyError(f"The engine failed to start: {self.start_error}")
        raise NotReadyError(self.engine.not_ready_reason)

    async def until_known(self) -> None:
        """Return when the models are known; those of a fleet without engines once one has started.

        Raises EngineNotStartedError, QueueFullError.
        """
        if self.fleet is not None:
            await self.fleet.until_known(self.loaded)

    @property
    def fingerprints(self) -> str | None:
        """The loaded models' fingerprints; None until they are known (`engine_info`)."""
        if self._info is None:
            return None
        return " ".join(f"{tier}={info.fingerprint}" for tier, info in self._info.tiers.items())

    async def names(self) -> dict[str, tuple[TierInfo, ...]]:
        """Return every name that `model` accepts, with the checkpoints that may answer to it."""
        tiers = (await self.engine_info()).tiers
        own, adapted = self._own_names, self.adapters.candidates(tiers)
        return own | {name: infos for name, infos in adapted.items() if name not in own}

    async def tiers_named(self, model: str, scopes: Scopes) -> tuple[TierInfo, ...]:
        """Return the checkpoints that may answer to a name. Raises ModelNotFoundError."""
        await self.engine_info()
        if (own := self._own_names.get(model)) is not None:  # by far the most requests
            return own
        names = await self.names()
        if model not in names:
            raise ModelNotFoundError(model, scopes.usable(local_tiers(names)))
        return names[model]


def _names_of(info: EngineInfo) -> dict[str, tuple[TierInfo, ...]]:
    """Return the names of the loaded models, without adapters, with what answers to them."""
    ordered = [info.tiers[tier] for tier in TIERS if tier in info.tiers]
    names = {AUTO: tuple(ordered)} | {info.tier: (info,) for info in ordered}
    # A real id is an alias; should both tiers have the same, the large one has it.
    return names | {info.model_id: (info,) for info in ordered if info.model_id not in names}
