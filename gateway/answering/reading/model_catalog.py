"""The model or tier that a request's `model` means, and the list of GET /v1/models."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.engine.events import TierInfo
from outrider.gateway.answering.reading.placement_policy import Named
from outrider.gateway.contract.errors.tree import BadRequestError, ModelNotFoundError
from outrider.gateway.contract.schema.kinds import AUTO, ModelCapability, ServerKind
from outrider.gateway.contract.schema.model_cards import TierCard, UpstreamCard
from outrider.gateway.settings.tiers import RESERVED_NAMES
from outrider.gateway.tenancy.keys.keys import ANONYMOUS, Scopes
from outrider.verifier.params import TIERS, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFormats:
    """The formats that a local tier's model speaks. `may_think`: it marks its reasoning."""

    tool_format: str
    may_think: bool = False

    def card(self, info: TierInfo) -> TierCard:
        """Describe the tier."""
        capabilities: list[ModelCapability] = ["structured_outputs", "tools"]
        if self.may_think:
            capabilities.append("reasoning")
        return TierCard(
            tier=info.tier,
            model_id=info.model_id,
            max_context=info.max_context,
            num_parameters=info.num_parameters,
            dtype=info.dtype,
            device=info.device,
            capabilities=capabilities,
            tool_format=self.tool_format,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierModels:
    """An upstream tier and the models that it is known to have."""

    tier: str
    server: ServerKind = "openai"
    model: str | None = None
    """Set in the settings."""
    listed: tuple[str, ...] = ()
    """The server's."""
    max_context: int | None = None
    """Tokens."""
    supports: tuple[ModelCapability, ...] = ()

    @property
    def usual(self) -> str | None:
        """The model for requests that name the tier only; None where none is set or listed."""
        return self.model or next(iter(self.listed), None)

    def card(self, model: str | None) -> UpstreamCard:
        """Describe the tier as it answers requests for this model."""
        return UpstreamCard(
            tier=self.tier,
            model_id=model,
            max_context=self.max_context,
            server=self.server,
            capabilities=list(self.supports),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """The models that a name means."""

    name: str
    named: Named
    local: tuple[TierInfo, ...] = ()
    """The checkpoints that may answer; empty for an upstream tier."""
    tier: str | None = None
    """The upstream tier."""
    model: str | None = None
    """The model to request from the tier's server. None: no model's name is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A name that `model` accepts, and the tiers that may answer."""

    id: str
    owned_by: str
    behind: Sequence[TierCard | UpstreamCard]
    created: int = 0
    """Seconds since 1970; 0 where it is unknown."""


class ModelCatalog:
    """Every name that `model` accepts. Of equal ones the local wins, then the earlier tier.

    A tier's own name comes before what servers list; what they list under a word of ours (auto,
    small, large, none) is reached as TIER/ID only, so that no local name ever means a server.
    """

    def __init__(
        self,
        local: Mapping[str, tuple[TierInfo, ...]],
        tiers: Sequence[TierModels] = (),
        *,
        handoff: str | None = None,
        formats: Mapping[Tier, LocalFormats],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """`local` by name, with `auto`; without checkpoints where the engine is not ready to tell.

        `handoff`: the tier that may answer `auto` too. `formats`: of the local tiers. `aliases`:
        the model that each further name stands for first; they win over names that servers list.
        """
        self._formats = formats
        self._tiers = {models.tier: models for models in tiers}
        self._handoff = handoff
        self._local_tiers = tuple(tier for tier in TIERS if tier in local)
        self._resolved = {AUTO: ResolvedModel(name=AUTO, named="auto", local=local.get(AUTO, ()))}
        for name, infos in local.items():
            if name != AUTO:
                self._resolved[name] = ResolvedModel(name=name, named="local", local=infos)
        self._add(self._remote(models.tier, models, models.usual) for models in tiers)
        aliases = aliases or {}
        for models in tiers:
            self._add(self._of_model(models, model) for model in _ids(models))
        for name, model in aliases.items():
            resolved = self._resolved.get(model) or self._of_path(model)
            if resolved is not None:
                self._resolved[name] = replace(resolved, name=name)

    def __contains__(self, name: object) -> bool:
        """True if it is listed. A name TIER/ID is understood even if it is not."""
        return name in self._resolved

    def all(self) -> tuple[str, ...]:
        """The names, local ones first."""
        return tuple(self._resolved)

    def tiers(self) -> tuple[str, ...]:
        """The values of `outrider.tier`: the loaded local tiers, then the upstream ones."""
        return (*self._local_tiers, *self._tiers)

    def usual_model(self, tier: str) -> str | None:
        """The model to request from an upstream tier where the request names none of its own."""
        return self._tiers[tier].usual

    def resolve(
        self, model: str, tier: str | None = None, scopes: Scopes = ANONYMOUS.scopes
    ) -> ResolvedModel:
        """Return the models that a request with this `model` and this `outrider.tier` means.

        `scopes`: those of the key, which bound the names in an error.
        Raises ModelNotFoundError, and BadRequestError for a tier that does not exist or contradicts
        the model.
        """
        resolved = self._resolved.get(model) or self._of_path(model)
        if resolved is None:
            raise ModelNotFoundError(model, scopes.usable(self._tiers_behind()))
        return resolved if tier is None else self._narrowed(resolved, tier, scopes)

    def listed(self, name: str, scopes: Scopes = ANONYMOUS.scopes) -> ListedModel:
        """Return a name as GET /v1/models/NAME shows it. Raises ModelNotFoundError."""
        return self._listed(self.resolve(name, scopes=scopes))

    def all_listed(self) -> list[ListedModel]:
        """Return all names, as GET /v1/models lists them."""
        return [self._listed(resolved) for resolved in self._resolved.values()]

    def _add(self, found: Iterable[ResolvedModel | None]) -> None:
        for resolved in found:
            if resolved is not None:
                self._resolved.setdefault(resolved.name, resolved)

    def _remote(self, name: str, models: TierModels, model: str | None) -> ResolvedModel:
        return ResolvedModel(name=name, named="upstream", tier=models.tier, model=model)

    def _of_model(self, models: TierModels, model: str) -> ResolvedModel:
        """A server's model under its own name; where that is taken, under TIER/ID."""
        own = self._remote(model, models, model)
        is_free = model not in RESERVED_NAMES and self._resolved.get(model, own) == own
        return own if is_free else self._remote(f"{models.tier}/{model}", models, model)

    def _of_path(self, name: str) -> ResolvedModel | None:
        """Resolve TIER/ID. The server need not list the id: it may answer to others too."""
        tier, _, model = name.partition("/")
        if tier not in self._tiers or not model:
            return None
        return self._remote(name, self._tiers[tier], model)

    def _tiers_behind(self) -> dict[str, list[str]]:
        """Return the tiers behind each name."""
        return {one.id: [behind.tier for behind in one.behind] for one in self.all_listed()}

    def _narrowed(self, resolved: ResolvedModel, tier: str, scopes: Scopes) -> ResolvedModel:
        """Restrict a resolved name to a tier."""
        if tier not in self.tiers():
            known = ", ".join(filter(scopes.allows_tier, self.tiers())) or "none"
            raise _bad_tier(f"unknown tier {tier!r}; available: {known}")
        if resolved.named == "auto" and tier in self._tiers:
            return self._remote(resolved.name, self._tiers[tier], self.usual_model(tier))
        if resolved.named != "auto" and tier not in _tiers_of(resolved):
            has = " or ".join(_tiers_of(resolved))
            raise _bad_tier(f"{tier} contradicts the model, which means the {has} tier")
        local = tuple(info for info in resolved.local if info.tier == tier)
        return (
            resolved
            if resolved.named == "upstream"
            else replace(resolved, named="local", local=local)
        )

    def _listed(self, resolved: ResolvedModel) -> ListedModel:
        behind: list[TierCard | UpstreamCard] = [
            self._formats[info.tier].card(info) for info in resolved.local
        ]
        if resolved.tier is not None:
            behind.append(self._tiers[resolved.tier].card(resolved.model))
        elif resolved.named == "auto" and self._handoff is not None:
            behind.append(self._tiers[self._handoff].card(self.usual_model(self._handoff)))
        return ListedModel(
            id=resolved.name,
            owned_by=resolved.tier or "outrider",
            behind=behind,
            created=max((info.created for info in resolved.local), default=0),
        )


def local_tiers(names: Mapping[str, Sequence[TierInfo]]) -> dict[str, list[str]]:
    """Return the tiers behind each name of the local models."""
    return {name: [info.tier for info in infos] for name, infos in names.items()}


def _tiers_of(resolved: ResolvedModel) -> tuple[str, ...]:
    """The tiers that a name means; a local tier's name implies it without a checkpoint."""
    if resolved.tier is not None:
        return (resolved.tier,)
    return tuple(info.tier for info in resolved.local) or (resolved.name,)


def _ids(models: TierModels) -> list[str]:
    """The ids of a tier's models, each once, the configured one first."""
    named = (models.model,) if models.model else ()
    return list(dict.fromkeys((*named, *models.listed)))


def _bad_tier(complaint: str) -> BadRequestError:
    return BadRequestError(f"outrider.tier: {complaint}.", param="outrider.tier")
