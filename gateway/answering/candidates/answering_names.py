"""Names what may answer a request that has not been read yet, for checks of some models."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Final

from outrider.gateway.answering.candidates.chains import MAX_MODELS, ChainBook, ChainLink
from outrider.gateway.answering.candidates.pass_through import PASSED_ROUTES
from outrider.gateway.answering.reading.live_model_catalog import LiveModelCatalog
from outrider.gateway.answering.reading.model_catalog import ResolvedModel
from outrider.gateway.answering.reading.upstream_parts import UpstreamParts
from outrider.gateway.contract.errors.tree import ModelNotFoundError, NotReadyError
from outrider.gateway.contract.schema.kinds import AUTO
from outrider.gateway.experiments.registry import ExperimentRegistry
from outrider.gateway.tenancy.keys.keys import ANONYMOUS

_OPTIONS: Final = "outrider"
_MOST_NAMES: Final = 4 * MAX_MODELS
"""More than a request that is answered names, with and without Ollama's `:latest`."""
_PASSED: Final = frozenset(route.path.strip("/") for route in PASSED_ROUTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweringNames:
    """Finds the tiers that may answer a request, and every name of each."""

    chains: ChainBook
    catalog: LiveModelCatalog
    upstream: UpstreamParts
    experiments: ExperimentRegistry

    async def find(
        self, document: Mapping[str, Any], named: Set[str], endpoint: str
    ) -> Mapping[str, Set[str]] | None:
        """Return the names by tier, rather too many; None: anything may answer.

        `named`: the models that the request's JSON names. Raises GatewayError and EngineError as
        reading the request would.
        """
        if self.experiments.sets_models or len(named) > _MOST_NAMES:
            return None
        links = self.chains.links_of(sorted(named), lambda _, alias: alias.models)
        is_shaped = self.experiments.assigner is not None or _has_options(document, links)
        found: defaultdict[str, set[str]] = defaultdict(set)
        is_open = is_shaped
        for link in links:
            if (resolved := await self._resolved(link.model)) is None:
                if link.model.endswith(":latest"):
                    continue  # it is named without that too
                return None
            is_open |= resolved.named == "auto"
            self._add(found, resolved, link.model)
            if resolved.named == "local" and not resolved.local:
                return None  # the engine has not told yet
        if is_open and not await self._add_open(found, is_any=is_shaped or endpoint in _PASSED):
            return None
        return found

    async def _resolved(self, model: str) -> ResolvedModel | None:
        try:
            return await self.catalog.resolve(model, None, ANONYMOUS.scopes)
        except (ModelNotFoundError, NotReadyError):
            return None

    def _add(self, found: Mapping[str, set[str]], resolved: ResolvedModel, name: str) -> None:
        """Add what a name means; `auto` means no tier by itself."""
        if resolved.tier is not None:
            model = resolved.model or ""
            plain = model.removesuffix(":latest")
            found[resolved.tier].update((name, resolved.tier, model, f"{resolved.tier}/{model}"))
            found[resolved.tier].update((plain, f"{resolved.tier}/{plain}"))
        elif resolved.named == "local":
            for info in resolved.local:
                found[info.tier].update((name, info.tier, info.model_id))

    async def _add_open(self, found: Mapping[str, set[str]], *, is_any: bool) -> bool:
        """Add the tiers of `auto`, or all; return whether they are known."""
        rules, names = self.upstream.rules, await self.catalog.current()
        of_auto = (rules.small, rules.upstream_tier)
        for tier in self.upstream.tiers if is_any else filter(None, of_auto):
            model = names.usual_model(tier) or ""
            found[tier].update((tier, model, f"{tier}/{model}"))
        local = names.resolve(AUTO).local
        both: set[str] = set()
        for info in local:
            found[info.tier].update((info.tier, info.model_id))
            both |= found[info.tier]
        for info in local if is_any else ():
            found[info.tier].update(both)  # in a speculative cascade each writes the other's answer
        return bool(local) or not rules.has_local


def _has_options(document: Mapping[str, Any], links: Iterable[ChainLink]) -> bool:
    """Return whether options may have another tier answer than the one that is named."""
    return _OPTIONS in document or any(_OPTIONS in link.defaults for link in links)
